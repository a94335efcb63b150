"""The way in: ``solve`` runs a method by name and returns what its incumbent supports."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import ArrayLike

from .array_program import solve_array_program
from .auto import solve_auto
from .incumbent import Incumbent, Progress
from .integer_program import solve_pulp
from .kernels import COMPILED
from .message_search import solve_messages
from .problem import INFINITE, Problem
from .settings import SETTINGS
from .solution import INTERRUPTED, Solution

METHODS: Final[dict[str, Callable[[Incumbent], None]]] = {
    "auto": solve_auto,
    "highs": solve_array_program,
    "messages": solve_messages,
    "pulp-highs": solve_pulp,
}
"""Every method by name: it reads ``incumbent.problem`` and tells the incumbent what it finds and proves."""

announce: Callable[[], None] | None = None
"""Called once before a large problem is solved without compiled kernels, for a program that can say so."""


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
    """Find cheap choices within ``work``, with a proved bound.

    Args:
        work: units of about one CPU second, counted in what is done: the same problem, seed, start and work give the same answer on every
            machine. Default: ``time_limit``. ``pulp-highs`` counts HiGHS's work; writing the program in PuLP takes seconds besides.
        time_limit: seconds after which the solve is cut off, which ``Solution.cut`` tells. If nothing respects the limit by then, up to
            ``Settings.lean_seconds`` more go to choices of little memory.
        gap: (objective - bound) / objective at which the solve ends.
        start: one choice a node to begin from.
        progress: called with (best cost or None, bound, gap, seconds).
        patient: whether to go on once a round of work has brought little.

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
    if announce is not None and entries >= SETTINGS.direct_entries and not COMPILED:
        announce()
        announce = None


def find_smallest_limit(incumbent: Incumbent) -> None:
    """Offer choices of little memory over time where none respect the limit: their peak is a limit known to be feasible."""
    problem = incumbent.problem
    if incumbent.objective is not None or problem.limit is None:
        return
    life = np.maximum(problem.item_end - problem.item_begin, 0).astype(np.float64)
    area = np.concatenate([[0.0], np.cumsum(problem.item_usage * life)])[problem.item_ptr]
    coarse = np.ceil(np.diff(area) * (INFINITE / 2 / max(float(area[-1]), 1.0))).astype(np.int64)
    lean = dataclasses.replace(
        problem,
        costs=np.where(problem.costs >= INFINITE, INFINITE, coarse),
        edge_costs=np.where(problem.edge_costs >= INFINITE, INFINITE, 0),
        limit=None,
    )
    now = time.perf_counter()
    deadline = max(incumbent.deadline, now + SETTINGS.lean_seconds)
    relaxed = Incumbent(lean, now, deadline, gap=incumbent.gap, seed=incumbent.seed, allowed=SETTINGS.lean_work)
    METHODS["auto"](relaxed)
    incumbent.spend(relaxed.spent)
    incumbent.cut = incumbent.cut or relaxed.cut
    if relaxed.choices is not None:
        incumbent.offer(relaxed.choices)
