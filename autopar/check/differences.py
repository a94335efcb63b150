"""Difference: one place where a plan is not what it says; and when two figures count as the same."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from autopar.graph import Graph
from autopar.pipeline_plan import PipelinePlan
from autopar.plan import Plan

TOLERANCE = 1e-9
"""Relative difference allowed between seconds in the file and seconds recomputed: the order of a sum may differ."""


@dataclass(frozen=True)
class Difference:
    """One place where the plan is not what it says: ``where`` in the file, and ``what`` is wrong.

    ``runs``: the plan can be run all the same; what is wrong is a price, a count or the order of a listing.
    """

    where: str
    what: str
    runs: bool = False

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


def close(given: float, right: float) -> bool:
    return math.isclose(given, right, rel_tol=TOLERANCE, abs_tol=1e-18)


def seconds(where: str, given: float, right: float) -> Iterator[Difference]:
    """A price that is not as recomputed."""
    if not close(given, right):
        yield Difference(where, f"{given:.10g} in the plan, {right:.10g} recomputed", runs=True)


def count(where: str, given: int, right: int) -> Iterator[Difference]:
    """A count that is not as recomputed."""
    if given != right:
        yield Difference(where, f"{given} in the plan, {right} recomputed", runs=True)


def compare_with_target(plan: Plan | PipelinePlan, graph: Graph) -> Iterator[Difference]:
    """What the plan says of the model's graph, and of how microbatches of it make up a step.

    Args:
        graph: of one microbatch. Where it does not say of how many it is one, it is compared alone.
    """
    if graph.sha256 != plan.model.graph_sha256:
        yield Difference("model.graph_sha256", f"{plan.model.graph_sha256[:12]}... in the plan, {graph.sha256[:12]}... for the target")
    elif plan.accumulation is not None and graph.microbatches == plan.microbatches:
        row, made = plan.accumulation, graph.accumulation
        cut = tuple(item.name for item in graph.of_kind("input") if item.tensor in made.cut)
        pairs = {
            "cut": (row.cut, cut), "weight": (row.weight, made.weight), "whole": (row.whole, made.whole),
            "divisor": (row.divisor or "", made.divisor),
        }  # fmt: skip
        for name, (given, right) in pairs.items():
            if given != right:
                yield Difference(f"accumulation.{name}", f"{given!r} in the plan, {right!r} for the target")
