"""Pareto: the least step under each of a ladder of memory limits."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

from autopar.errors import InfeasibleError
from autopar.plan import Plan

EVERYTHING = 2**60
"""Bytes that no plan needs."""
FIRST = 0.3
"""Share of the time for the plan that may take all memory, from which the ladder hangs."""


@dataclass(frozen=True)
class Made:
    """A plan, and whether its search was ended by Ctrl-C."""

    plan: Plan
    interrupted: bool = False


Within = Callable[[int, float], Made]
"""What plans within so many bytes a rank until a moment of ``perf_counter``."""


@dataclass(frozen=True)
class Pareto:
    """Plans by the memory they were allowed, the least first. A plan that fits in less stands again where nothing better was found."""

    plans: tuple[Plan, ...]

    def to_json(self) -> str:
        """One row a limit, with the plan's figures."""
        rows = [
            {
                "memory_limit_bytes_per_rank": plan.memory_limit_bytes_per_rank, "objective_seconds": plan.objective.seconds,
                "bound_seconds": plan.objective.bound_seconds, "gap": plan.objective.gap, "status": plan.objective.status,
                "peak_memory_bytes_per_rank": plan.predicted.peak_memory_bytes_per_rank, "microbatches": plan.microbatches,
                "recomputed_operators": len(plan.recomputed), "mesh": plan.mesh,
            }
            for plan in self.plans
        ]  # fmt: skip
        target = self.plans[0].model.target
        return json.dumps({"schema": "autopar.pareto/1", "target": target, "rows": rows}, indent=1) + "\n"

    def __str__(self) -> str:
        from autopar.report.frontier import frontier

        return frontier(self)

    def _repr_html_(self) -> str:
        from autopar.report.frontier import frontier_html

        return frontier_html(self)


def climb(plan_within: Within, rungs: int, ends: float) -> Pareto:
    """The ladder's plans; those there are when Ctrl-C ends it.

    Args:
        rungs: 2 or more.
        ends: when all is to be done.

    Raises:
        InfeasibleError, TimeLimitError: as of ``plan_within``.
    """
    now = perf_counter()
    free = plan_within(EVERYTHING, now + FIRST * (ends - now))
    most = free.plan.predicted.peak_memory_bytes_per_rank
    found: list[Plan] = []
    limits = [most]
    try:
        least = most if free.interrupted else _least(plan_within, ends)
        limits = sorted({least + (most - least) * rung // (rungs - 1) for rung in range(rungs)})
        for rung, limit in enumerate(limits):
            now = perf_counter()
            made = free if free.interrupted else plan_within(limit, now + max(ends - now, 1.0) / (len(limits) - rung))
            better = [other for other in (*found[-1:], free.plan) if other.predicted.peak_memory_bytes_per_rank <= limit]
            found.append(min([made.plan, *better], key=lambda other: other.objective.seconds))
            if made.interrupted:
                break
    except KeyboardInterrupt:
        if not found:
            limits, found = [most], [free.plan]
    bound, bounded = 0.0, list[Plan]()
    for limit, plan in reversed(list(zip(limits, found, strict=False))):  # what bounds all plans in more memory bounds those in less
        bound = min(max(bound, plan.objective.bound_seconds), plan.objective.seconds)
        bounded.append(_at(plan, limit, bound))
    return Pareto(tuple(reversed(bounded)))


def _least(plan_within: Within, ends: float) -> int:
    """The least memory that a plan is known to need."""
    now = perf_counter()
    try:
        made = plan_within(1, now + FIRST * max(ends - now, 1.0))
    except InfeasibleError as error:
        if not error.least:
            raise
        return error.least
    return made.plan.predicted.peak_memory_bytes_per_rank


def _at(plan: Plan, limit: int, bound: float) -> Plan:
    """A plan as the answer for another limit that it keeps to, with the bound there."""
    seconds = plan.objective.seconds
    gap = (seconds - bound) / seconds if seconds > 0 else 0.0
    status = "optimal" if gap <= 1e-6 else "feasible"
    objective = plan.objective.model_copy(update={"bound_seconds": bound, "gap": gap, "status": status})
    baselines = {
        name: row.model_copy(update={"feasible": row.peak_memory_bytes_per_rank <= limit}) if row.peak_memory_bytes_per_rank else row
        for name, row in plan.baselines.items()
    }
    return plan.model_copy(update={"memory_limit_bytes_per_rank": limit, "objective": objective, "baselines": baselines})
