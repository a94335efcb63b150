"""A plan that needs too much memory, made to fit: its strategies stay, what backward needs is kept or made again.

With one strategy for each operator the integer problem is small even for deep models: what is left to choose is how tensors are
resharded, kept and made again (``again``). Its answer is scheduled, and where the schedule holds more than the limit, that much is left
free (``fitting``).
"""

from __future__ import annotations

import math
from time import perf_counter

import numpy as np

from autopar.schedule import Assignment
from autopar.search.building import build_model
from autopar.search.extract import extract
from autopar.search.fitting import Reserves
from autopar.search.model import Weights
from autopar.search.space import Space
from autopar.search.tuning import Timed, best_schedule
from solvers import solve

MOMENTS = 6
"""Times of second runs that are told apart."""
FITTINGS = 8
"""Times that a problem is solved, each with more left free."""
KEEPING_GAP = 2e-3
KEEPING_SECONDS = 8.0
"""The gap at which one solve stops, and its time."""


def fit(
    space: Space, plan: Assignment, weights: Weights, limit: int, *, tries: int, seed: int, seconds: float, free: np.ndarray | None = None
) -> tuple[Timed | None, np.ndarray]:
    """The best schedule found with the strategies of ``plan``, within ``limit`` bytes a rank where one is; None when nothing is found.
    And the bytes left free at last, at each time.

    Args:
        free: bytes to leave free from the beginning, as another plan of the graph was seen to need.
        weights: what seconds count, of the collectives above all.
        tries: limits of the passes that are tried for each answer.
        seconds: for all of it.
    """
    model = build_model(space.restricted(plan.inputs, plan.strategies), again=MOMENTS)
    problem, _ = model.problem(limit, weights)
    reserves = Reserves(model, limit, pairs=False)
    if free is not None:
        reserves.bytes = free
    until = perf_counter() + seconds
    start, best = None, None
    for _ in range(FITTINGS):
        left = until - perf_counter()
        if left <= 0:
            break
        asked = reserves.applied(problem)
        solution = solve(
            asked, time_limit=min(KEEPING_SECONDS, left), gap=KEEPING_GAP, seed=seed,
            start=None if start is None else reserves.completed(start),
        )  # fmt: skip
        if solution.choices is None:
            if not reserves.ease():
                break
            continue
        start = solution.choices[: len(model.nodes)]
        found = best_schedule(
            space.graph, extract(model, start), space.machine, space.optimizer, limit, tries=tries,
            start=best.schedule.limits if best is not None else None, beside=best.seconds if best is not None else math.inf,
        )  # fmt: skip
        if found.better(best, limit):
            best = found
        if found.memory.peak <= limit or not reserves.learn(problem, start, found.schedule):
            break
    return best, reserves.bytes
