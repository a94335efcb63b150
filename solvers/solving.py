"""The way in: ``solve`` runs a method by name and returns what its incumbent supports."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import ArrayLike

from solvers.array_program import solve_array_program
from solvers.auto import solve_auto
from solvers.incumbent import Incumbent, Progress
from solvers.integer_program import solve_pulp
from solvers.kernels import COMPILED
from solvers.message_search import solve_messages
from solvers.problem import INFINITE, Problem
from solvers.settings import SETTINGS
from solvers.solution import Solution

METHODS: Final[dict[str, Callable[[Incumbent], None]]] = {
    "auto": solve_auto,
    "highs": solve_array_program,
    "messages": solve_messages,
    "pulp-highs": solve_pulp,
}
"""Every method by name: it reads ``incumbent.problem`` and tells the incumbent what it finds and proves."""

announce: Callable[[], None] | None = None
"""Called once before a large problem is solved without compiled kernels, for a program that can say so."""
INTERRUPTED = "interrupted; this is the best so far"
"""The message of a solution after Ctrl-C."""
FINEST = 2**40
"""Memory over time is counted in shares of about this."""


def solve(
    problem: Problem,
    *,
    work: float | None = None,
    time_limit: float = 60.0,
    gap: float = 1e-6,
    method: str = "auto",
    seed: int = 0,
    start: ArrayLike | None = None,
    progress: Progress | None = None,
    patient: bool = True,
) -> Solution:
    """The cheapest choices found with so much work, with a proved bound.

    ``work`` is counted in what is done, not in seconds: one unit is about one CPU second, and the same problem, seed, start and work give
    the same answer whatever else the machine does. ``time_limit`` seconds only cut off, which ``Solution.cut`` tells; without ``work`` it
    says how much work there is too. Stops when (objective - bound) / objective <= ``gap``; unless ``patient`` also once a round of work
    has brought little. ``start`` is one choice a node to begin from; ``progress`` is called with (best cost or None, bound, gap, seconds).
    Ctrl-C returns the best so far. Raises ValueError for an unknown method.
    """
    if method not in METHODS:
        raise ValueError(f"no method {method!r}\nhint: one of {', '.join(METHODS)}")
    began = time.perf_counter()
    _say_slow(len(problem.edge_costs))
    incumbent = Incumbent(problem, began, began + time_limit, gap, seed, progress, patient, time_limit if work is None else work)
    if start is not None:
        incumbent.offer(np.asarray(start))
    try:
        METHODS[method](incumbent)
        find_smallest_limit(incumbent)
    except KeyboardInterrupt:
        incumbent.message = INTERRUPTED
    return incumbent.solution(method)


def _say_slow(entries: int) -> None:
    global announce
    if announce is not None and entries >= SETTINGS.slow_entries and not COMPILED:
        announce()
        announce = None


def find_smallest_limit(incumbent: Incumbent) -> None:
    """Where no answer respects the limit: choices of little memory over time, whose peak is a limit known to be feasible."""
    problem = incumbent.problem
    if incumbent.objective is not None or problem.limit is None:
        return
    life = np.maximum(problem.item_end - problem.item_begin, 0).astype(np.float64)
    area = np.concatenate([[0.0], np.cumsum(problem.item_usage * life)])[problem.item_ptr]
    coarse = np.ceil(np.diff(area) * (FINEST / max(float(area[-1]), 1.0))).astype(np.int64)
    lean = dataclasses.replace(
        problem,
        costs=np.where(problem.costs >= INFINITE, INFINITE, coarse),
        edge_costs=np.where(problem.edge_costs >= INFINITE, INFINITE, 0),
        limit=None,
    )
    now = time.perf_counter()
    allowed = max(SETTINGS.lean_work, SETTINGS.lean_share * incumbent.work_left)
    seconds = max(SETTINGS.lean_work, SETTINGS.lean_share * incumbent.seconds_left)
    relaxed = Incumbent(lean, now, now + seconds, gap=SETTINGS.lean_gap, seed=incumbent.seed, allowed=allowed)
    METHODS["auto"](relaxed)
    incumbent.spend(relaxed.spent)
    incumbent.cut = incumbent.cut or relaxed.cut
    if relaxed.choices is not None:
        incumbent.offer(relaxed.choices)
