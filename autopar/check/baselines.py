"""Plans by hand beside a plan: what is said to fit does fit, and takes no less than the bound."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from autopar.check.differences import TOLERANCE, Difference
from autopar.rows import BaselinePlan


def compare_with_baselines(rows: Mapping[str, BaselinePlan], memory_limit: int, bound_seconds: float) -> Iterator[Difference]:
    """The differences of the baselines of a plan.

    Args:
        memory_limit: bytes per rank.
        bound_seconds: of the plan.
    """
    for name, row in rows.items():
        peak, price, where = row.peak_memory_bytes_per_rank, row.objective_seconds, f"baselines.{name}"
        if peak is not None and row.feasible != (peak <= memory_limit):
            yield Difference(where, f"feasible is {row.feasible} at {peak} bytes, the limit is {memory_limit}", runs=True)
        if row.feasible and price is not None and price < bound_seconds * (1 - TOLERANCE):
            what = f"it fits and takes {price:.10g} s, less than objective.bound_seconds, {bound_seconds:.10g}"
            yield Difference(where, what, runs=True)
