"""A plan that needs too much memory, made to fit: its strategies stay, what backward needs is kept or made again.

With one strategy for each operator the integer problem is small even for deep models: what is left to choose is how tensors are
resharded, kept and made again (``again``). Its answer is scheduled, and where the schedule holds more than the limit, the problem's limit
is lowered by the excess.
"""

from __future__ import annotations

from autopar.schedule import Assignment
from autopar.search.building import build_model
from autopar.search.exposure import Exposure
from autopar.search.extract import extract
from autopar.search.space import Space
from autopar.search.tuning import Timed, best_schedule
from solvers import solve

LOWERINGS = 6
"""Times that the problem's limit is lowered."""
MARGIN = 2000
"""Beside the excess the limit goes down by this part of itself."""
KEEPING_GAP = 2e-3
KEEPING_SECONDS = 6.0
"""The gap at which one solve stops, and its time."""


def fit(space: Space, plan: Assignment, exposure: Exposure, limit: int, *, tries: int, seed: int, seconds: float) -> Timed | None:
    """The best schedule found with the strategies of ``plan`` within ``limit`` bytes a rank; None when nothing is found.

    Args:
        exposure: the prices of collectives.
        tries: limits of the passes that are tried for each answer.
        seconds: for all of it.
    """
    model = build_model(space.restricted(plan.inputs, plan.strategies), again=True)
    lowered, start, best = limit, None, None
    for _ in range(LOWERINGS):
        problem, _ = model.problem(lowered, exposure)
        solution = solve(problem, time_limit=min(KEEPING_SECONDS, seconds), gap=KEEPING_GAP, seed=seed, start=start)
        if solution.choices is None:
            return best
        start = solution.choices
        found = best_schedule(
            space.graph, extract(model, solution.choices), space.machine, space.optimizer, limit,
            start=best.schedule.limits if best is not None else None, tries=tries,
        )  # fmt: skip
        if found.better(best, limit):
            best = found
        excess = found.memory.peak - limit
        if excess <= 0:
            return best
        lowered -= excess + limit // MARGIN
        if lowered <= 0:
            return best
    return best
