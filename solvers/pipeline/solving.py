"""``solve_pipeline``: bound over all cuts, local search over cuts and warm-ups, branch and bound, single orders at last."""

from __future__ import annotations

import math
import time

import numpy as np

from ..kernels import improve_orders
from ..settings import SETTINGS as SOLVERS
from ..solution import INTERRUPTED
from .bounds import AllCuts
from .chain import line_length, make_chain
from .cut_list import close
from .cut_search import CutSearch, lean_cut
from .incumbent import PipelineIncumbent, Progress
from .intervals import Intervals
from .problem import PipelineProblem
from .settings import SETTINGS
from .solution import PipelineSolution


def solve_pipeline(
    problem: PipelineProblem,
    *,
    work: float | None = None,
    time_limit: float = 60.0,
    gap: float = SOLVERS.negligible,
    seed: int = 0,
    progress: Progress | None = None,
) -> PipelineSolution:
    """Find a cut, modes and orders with a short step, with a bound over all of them.

    Args:
        work: units of about one CPU second, counted in what is done: the same problem, seed and work give the same answer on every machine.
            Default: ``time_limit``, at most ``SETTINGS.most_work``.
        time_limit: seconds after which the search is cut off, which ``PipelineSolution.cut_off`` tells.
        gap: (step - bound) / step at which the search ends.
        progress: called with (best step or None, bound, gap, seconds).

    Ctrl-C returns the best so far.
    """
    began = time.perf_counter()
    allowed = min(time_limit, SETTINGS.most_work) if work is None else work
    incumbent = PipelineIncumbent(problem, began, began + time_limit, allowed, gap, progress)
    try:
        _search(incumbent, seed)
    except KeyboardInterrupt:
        incumbent.message = INTERRUPTED
    return incumbent.solution()


def _search(incumbent: PipelineIncumbent, seed: int) -> None:
    problem, intervals = incumbent.problem, Intervals(incumbent.problem)
    incumbent.prove(AllCuts(problem).bound())
    cuts = CutSearch(incumbent, intervals, seed)
    if not incumbent.over:
        cuts.run(SETTINGS.cut_share * incumbent.allowed, SETTINGS.first_starts)
    if not incumbent.over:
        close(incumbent, intervals, SETTINGS.tree_share * incumbent.allowed)
    if not incumbent.over:
        cuts.run(SETTINGS.cut_share * incumbent.allowed, SETTINGS.starts)
    if not incumbent.over and incumbent.orders is not None:
        improve(incumbent, seed)
    if incumbent.orders is None:
        incumbent.smallest_limit = smallest_limit(problem)


def improve(incumbent: PipelineIncumbent, seed: int) -> None:
    """Local search over the orders of the best cut, until ``order_patience`` rounds of moves gain nothing."""
    problem, random, length = incumbent.problem, np.random.default_rng(seed), line_length(incumbent.problem)
    assert incumbent.orders is not None
    chain, orders, idle = make_chain(problem, [mix.cost for mix in incumbent.mixes]), incumbent.orders.copy(), 0
    ends = np.cumsum(incumbent.cut).tolist()
    moves = max(1, SETTINGS.operations_at_once // (problem.devices * length))
    while idle < SETTINGS.order_patience and not incumbent.over:
        draws = np.empty((moves, 3), dtype=np.int64)
        draws[:, 0], draws[:, 1] = random.integers(problem.devices, size=moves), random.integers(length, size=moves)
        draws[:, 2] = random.integers(1, SETTINGS.farthest + 1, size=moves) * random.choice((-1, 1), size=moves)
        improve_orders(chain, orders, incumbent.clock, draws.reshape(-1), incumbent.step)
        idle = 0 if incumbent.offer(ends, incumbent.mixes, orders) else idle + 1
        incumbent.spend(SETTINGS.operation_work * problem.devices * length * moves)


def smallest_limit(problem: PipelineProblem) -> float:
    """Bytes with which some plan fits: one microbatch at a time, with the cut whose heaviest chunk has the fewest bytes."""
    layers = [min(mode.rest + mode.held for mode in modes) for modes in problem.costs]
    ends, held = lean_cut(problem), [0.0] * problem.devices
    for begin, end, place in zip((0, *ends), ends, problem.places, strict=False):
        held[place] += math.fsum(layers[begin:end])
    return max(held)
