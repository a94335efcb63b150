"""The way in: ``solve`` runs a method by name and returns what its record supports."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import ArrayLike

from solvers.array_program import solve_array_program
from solvers.automatic import solve_automatic
from solvers.integer_program import solve_cbc, solve_highs
from solvers.message_search import solve_messages
from solvers.problem import Problem
from solvers.record import Progress, Record
from solvers.solution import Solution

METHODS: Final[dict[str, Callable[[Record], None]]] = {
    "auto": solve_automatic,
    "highs": solve_array_program,
    "messages": solve_messages,
    "pulp-highs": solve_highs,
    "pulp-cbc": solve_cbc,
}
"""Every method by name: it reads ``record.problem`` and tells the record what it finds and proves."""


def solve(
    problem: Problem,
    time_limit: float = 60.0,
    gap: float = 1e-6,
    method: str = "auto",
    seed: int = 0,
    start: ArrayLike | None = None,
    progress: Progress | None = None,
) -> Solution:
    """The cheapest choices found within ``time_limit`` seconds, with a proved bound.

    Stops when (objective - bound) / objective <= ``gap``. ``start`` is one choice a node to begin from; ``progress`` is called with
    (best cost or None, bound, gap, seconds). Ctrl-C returns the best so far. The same seed gives the same answer where the time limit
    does not bind. Raises ValueError for an unknown method.
    """
    if method not in METHODS:
        raise ValueError(f"no method {method!r}\nhint: one of {', '.join(METHODS)}")
    began = time.perf_counter()
    record = Record(problem, began, began + time_limit, gap, seed, progress)
    if start is not None:
        record.offer(np.asarray(start))
    try:
        METHODS[method](record)
    except KeyboardInterrupt:
        record.message = "interrupted; this is the best so far"
    return record.solution(method)
