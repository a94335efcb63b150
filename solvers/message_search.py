"""Rounds for large cores: prices and messages raise the bound, neighbourhood search improves the choices.

Once the bound stalls, a second search has the dual's share of a round.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from solvers.arrays import Floats
from solvers.dual_ascent import MemoryDual, dot, priced
from solvers.incumbent import Incumbent
from solvers.kernels import certify
from solvers.kernels.constants import FAR
from solvers.local_search import LocalSearch
from solvers.pairwise import Pairs, forbidding, pairs
from solvers.reduction import Core, reduce
from solvers.settings import SETTINGS


def solve_messages(incumbent: Incumbent) -> None:
    """Reduce, then search until the gap is closed or time is over."""
    core = reduce(incumbent.problem)
    incumbent.spend(core.work)
    if core.infeasible:
        incumbent.infeasible = True
    elif core.num_nodes == 0:
        incumbent.offer(core.expand(np.zeros(0, dtype=np.int64)))
        incumbent.prove(core.constant)
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
        self.searches = [LocalSearch(self.graph, self.items, self.costs, 2 * self.incumbent.seed + k, spend) for k in (0, 1)]
        self.offered = np.inf
        self.history: list[float] = []

    def run(self, rounds: int) -> None:
        """So many rounds, or fewer when the incumbent is over."""
        if self.rounds == 0:
            if "warm start" not in SETTINGS.skip:
                self._warm_start()
            self.dual.warm_up(SETTINGS.surely * self.incumbent.gap, float(self.core.constant))
        for _ in range(rounds):
            if self.incumbent.over:
                return
            self._round()

    def bound(self, prices: Floats | None = None, messages: Floats | None = None) -> float:
        """The certified bound of the best prices, computed from scratch, in the problem's unit."""
        prices = self.dual.best_prices if prices is None else prices
        messages = self.dual.best_messages if messages is None else messages
        theta = priced(self.costs, self.items, prices)
        self.incumbent.spend(SETTINGS.message_work * len(self.graph.table))
        paid = dot(prices, self.dual.room)
        value = certify(self.graph, theta, messages) - paid
        scale = abs(value) + paid
        return min(self.excluded, self.core.constant + value - SETTINGS.safety * scale * len(self.graph.low))

    @property
    def limited(self) -> bool:
        """Whether memory keeps anything out; else what messages come to is an answer, mostly the best, and the search waits for it."""
        return len(self.items.capacity) > 0

    def stalled(self) -> bool:
        """Whether the bound has stopped closing the gap."""
        rounds = SETTINGS.stall_rounds
        if len(self.history) < rounds or not np.isfinite(self.offered):
            return False
        return self.history[-1] - self.history[-rounds] < SETTINGS.stall * (self.offered - self.history[-1])

    def _warm_start(self) -> None:
        if self.incumbent.choices is not None:
            start = self.core.restrict(self.incumbent.choices)
            if (start >= 0).all() and self.incumbent.objective is not None:
                self.offered = float(self.incumbent.objective - self.core.constant)
                for search in self.searches:
                    search.adopt(start, self.offered)
        if self.incumbent.objective is not None:
            self.dual.upper = float(self.incumbent.objective - self.core.constant)

    def _round(self) -> None:
        dual = self.dual
        self.incumbent.spend(SETTINGS.start_work)
        if self.limited or self.rounds > 0:
            self.searches[0].search(SETTINGS.sweeps, dual)
        if self.stalled() and "second search" not in SETTINGS.skip:
            self.searches[1].search(SETTINGS.sweeps, dual)
        else:
            dual.ascend(SETTINGS.dual_updates)
        self.rounds += 1
        self._exchange()

    def _exchange(self) -> None:
        for search in self.searches:
            search.adopt(self.dual.answer, self.dual.answer_cost)
        best = min(self.searches, key=lambda search: search.cost)
        if best.best is not None and best.cost < self.offered:
            self.offered = best.cost
            self.incumbent.offer(self.core.expand(best.best))
            self.dual.upper = best.cost
            for search in self.searches:
                search.adopt(best.best, best.cost)
        elif best.best is None:
            for search in self.searches:
                if search.closest is not None:
                    self.incumbent.offer(self.core.expand(search.closest))
        if self.dual.bound >= FAR / 2:
            self._nothing_left()  # some node's choices are all forbidden by its neighbours'
        elif not self.history or self.dual.bound > self.history[-1]:
            self.incumbent.prove(self.bound())
        if not self.stalled():
            self.history.append(self.dual.bound)

    def _nothing_left(self) -> None:
        if np.isfinite(self.excluded):
            self.incumbent.prove(self.excluded)
        else:
            self.incumbent.infeasible = True
