"""The least step under each of a ladder of memory limits: one plan that may take all memory, the least that does, and limits between."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

from autopar.cost_models import UNLIMITED
from autopar.errors import InfeasibleError
from autopar.pareto import Pareto
from autopar.plan import Plan
from autopar.planning.session import PlanWithin

FIRST = 0.3
"""Share of the time for the plan that may take all memory; the highest limit is what it takes."""


def plan_ladder(plan_within: PlanWithin, rungs: int, deadline: float) -> Pareto:
    """The plans of the ladder, or those there are when Ctrl-C ends it. A plan that fits in less memory also answers for more.

    Args:
        rungs: memory limits, 2 or more, in even steps from the least memory known to do to what the best plan takes.
        deadline: when the searches end, of ``perf_counter``.

    Raises:
        InfeasibleError, TimeLimitError: as of ``plan_within``.
    """
    now = perf_counter()
    free = plan_within(UNLIMITED, now + FIRST * (deadline - now))
    most = free.plan.predicted.peak_memory_bytes_per_rank
    plans: list[Plan] = []
    memory_limits = [most]
    try:
        least = most if free.interrupted else _least_memory(plan_within, deadline)
        memory_limits = sorted({least + (most - least) * rung // (rungs - 1) for rung in range(rungs)})
        for rung, memory_limit in enumerate(memory_limits):
            now = perf_counter()
            share = max(deadline - now, 1.0) / (len(memory_limits) - rung)
            planned = free if free.interrupted else plan_within(memory_limit, now + share)
            fitting = [plan for plan in (*plans[-1:], free.plan) if plan.predicted.peak_memory_bytes_per_rank <= memory_limit]
            plans.append(min([planned.plan, *fitting], key=lambda plan: plan.objective.seconds))
            if planned.interrupted:
                break
    except KeyboardInterrupt:
        if not plans:
            memory_limits, plans = [most], [free.plan]
    return Pareto(_with_bounds(memory_limits, plans))


def _least_memory(plan_within: PlanWithin, deadline: float) -> int:
    """The least bytes per rank that a plan is known to need."""
    now = perf_counter()
    try:
        planned = plan_within(1, now + FIRST * max(deadline - now, 1.0))
    except InfeasibleError as error:
        if not error.least:
            raise
        return error.least
    return planned.plan.predicted.peak_memory_bytes_per_rank


def _with_bounds(memory_limits: Sequence[int], plans: Sequence[Plan]) -> tuple[Plan, ...]:
    """Each plan as the answer for its limit. A bound on all plans in more memory also bounds those in less."""
    bound, answers = 0.0, list[Plan]()
    for memory_limit, plan in reversed(list(zip(memory_limits, plans, strict=False))):
        bound = min(max(bound, plan.objective.bound_seconds), plan.objective.seconds)
        answers.append(_answer(plan, memory_limit, bound))
    return tuple(reversed(answers))


def _answer(plan: Plan, memory_limit: int, bound_seconds: float) -> Plan:
    """A plan as the answer for another limit that it keeps to, with the bound there."""
    seconds = plan.objective.seconds
    gap = (seconds - bound_seconds) / seconds if seconds > 0 else 0.0
    status = "optimal" if gap <= 1e-6 else "feasible"
    objective = plan.objective.model_copy(update={"bound_seconds": bound_seconds, "gap": gap, "status": status})
    baselines = {
        name: row.model_copy(update={"feasible": row.peak_memory_bytes_per_rank <= memory_limit}) if row.peak_memory_bytes_per_rank else row
        for name, row in plan.baselines.items()
    }
    return plan.model_copy(update={"memory_limit_bytes_per_rank": memory_limit, "objective": objective, "baselines": baselines})
