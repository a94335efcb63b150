"""A plan as text: what ``print(plan)`` and ``autopar show`` print. Plain text of any width, so that it reads in a pipe and in a log."""

from __future__ import annotations

from autopar.plan import Plan
from autopar.report import tables


def summary(plan: Plan) -> str:
    """The plan's overview, baselines, tensors and collectives."""
    found = [tables.overview(plan), tables.baselines(plan), tables.tensors(plan), tables.collectives(plan)]
    return "\n\n".join("\n".join(table.lines()) for table in found if table.rows)
