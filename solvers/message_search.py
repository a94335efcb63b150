"""Rounds for large cores: prices and messages raise the bound, neighbourhood search improves the choices."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .array_program import solve_core
from .arrays import Floats
from .dual_ascent import MemoryDual, dot, priced
from .incumbent import Incumbent
from .kernels import certify
from .kernels.constants import FAR
from .local_search import LocalSearch
from .pairwise import Pairs, forbidding, pairs
from .reduction import Core, reduce
from .settings import SETTINGS


def solve_messages(incumbent: Incumbent) -> None:
    """Reduce, then search until the gap is closed or time is over."""
    core = reduce(incumbent.problem)
    incumbent.spend(core.work)
    if core.infeasible or core.num_nodes == 0:
        solve_core(incumbent, core)
    else:
        search = MessageSearch(incumbent, core)
        while not incumbent.over:
            search.run(1)


@dataclass
class MessageSearch:
    """The rounds on one core. ``incumbent`` gets every better answer and bound.

    ``prices`` are those to begin with; answers that cost more than ``excluded``, which is reached, may be missing from the core.
    """

    incumbent: Incumbent
    core: Core
    prices: Floats | None = None
    excluded: float = np.inf
    rounds: int = 0

    def __post_init__(self) -> None:
        core = self.core
        self.graph: Pairs = pairs(core)
        self.costs: Floats = forbidding(core.costs)
        self.items = core.items
        spend = self.incumbent.spend
        self.dual = MemoryDual(self.graph, self.items, self.costs, spend, start=self.prices)
        self.local = LocalSearch(self.graph, self.items, self.costs, self.incumbent.seed, spend)
        self.proved = -np.inf

    def run(self, rounds: int) -> None:
        """So many rounds, or fewer when the incumbent is over."""
        if self.rounds == 0:
            if "warm start" not in SETTINGS.skip:
                self._warm_start()
            self.dual.warm_up(SETTINGS.closing_gap * self.incumbent.gap, float(self.core.constant))
        for _ in range(rounds):
            if self.incumbent.over:
                return
            self._round()

    def bound(self) -> float:
        """The certified bound of the best prices, computed from scratch, in the problem's unit."""
        theta = priced(self.costs, self.items, self.dual.best_prices)
        self.incumbent.spend(SETTINGS.entry_work * len(self.graph.table))
        paid = dot(self.dual.best_prices, self.dual.room)
        value = certify(self.graph, theta, self.dual.best_messages) - paid
        scale = abs(value) + paid
        return min(self.excluded, self.core.constant + value - SETTINGS.safety * scale * len(self.graph.low))

    def _warm_start(self) -> None:
        if self.incumbent.choices is None or self.incumbent.objective is None:
            return
        self.dual.upper = float(self.incumbent.objective - self.core.constant)
        start = self.core.restrict(self.incumbent.choices)
        if (start >= 0).all():
            self.local.adopt(start, self.dual.upper)

    def _round(self) -> None:
        self.incumbent.spend(SETTINGS.start_work)
        limited = len(self.items.capacity) > 0  # else what messages come to is an answer, mostly the best, and the search waits for it
        if limited or self.rounds > 0:
            self.local.search(SETTINGS.sweeps, self.dual)
        self.dual.ascend(SETTINGS.dual_updates)
        self.rounds += 1
        self._tell()

    def _tell(self) -> None:
        """Offer a better answer, and prove a better bound."""
        local, dual = self.local, self.dual
        local.adopt(dual.answer, dual.answer_cost)
        if local.best is not None and local.cost < dual.upper:
            dual.upper = local.cost
            self.incumbent.offer(self.core.expand(local.best))
        if dual.bound >= FAR / 2:  # some node's choices are all forbidden by its neighbours'
            self.incumbent.exhaust(self.excluded)
        elif dual.bound > self.proved:
            self.proved = dual.bound
            self.incumbent.prove(self.bound())
