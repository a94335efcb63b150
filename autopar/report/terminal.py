"""A plan as text: what ``print(plan)`` and ``autopar show`` print, of any width for pipes and logs, or fitted to a terminal."""

from __future__ import annotations

from autopar.plan import Plan
from autopar.report import tables


def summary(plan: Plan, columns: int | None = None) -> str:
    """The plan's overview, what was measured, baselines, tensors and collectives.

    Args:
        columns: the width of the terminal, if it goes to one.
    """
    found = [tables.overview(plan), tables.candidates(plan), tables.baselines(plan), tables.tensors(plan), tables.collectives(plan)]
    return "\n\n".join("\n".join(table.lines(columns)) for table in found if table.rows)
