"""The road for large cores: prices and messages on one core, neighbourhood search on the other, in rounds of fixed work.

Rounds, rather than a free exchange, make the answer a function of the seed where the time limit does not bind. Once the bound stalls
both workers search.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass

import numpy as np

from solvers.arrays import Floats
from solvers.compiled import runs_compiled
from solvers.items import Items
from solvers.local_search import Hints, LocalSearch
from solvers.messages import certify, priced
from solvers.network import NEVER
from solvers.pairs import FAR, Pairs, pairs
from solvers.prices import Dual
from solvers.record import Record
from solvers.reduction import Core, reduce

SWEEPS, PLAIN_SWEEPS = 30, 6
"""Sweeps of the search in a round, and without compiled code, when sweeps are slower still than messages."""
UPDATES = 16
"""Changes of prices in a round: about the same work."""
SURELY = 0.1
"""Share of the gap asked at which messages at no prices of memory end."""
STALL = 2e-2
"""The ascent rests when twelve rounds close less than this share of the gap."""
SAFETY = 1e-12
"""Share of the costs summed by which a bound is lowered for the rounding of floats."""
VISITED = 2e-9
"""Work of an entry of a table that a pass of messages, or a sweep of the search, reads."""


def solve_messages(record: Record) -> None:
    """Reduce, then search until the gap is closed or time is over."""
    core = reduce(record.problem)
    if core.infeasible:
        record.infeasible = True
    elif core.num_nodes == 0:
        record.offer(core.expand(np.zeros(0, dtype=np.int64)))
        record.prove(core.constant)
    else:
        search = MessageSearch(record, core)
        while not record.over:
            search.run(1)


@dataclass
class MessageSearch:
    """The rounds on one core. ``record`` gets every better answer and bound.

    ``prices`` are those to begin with; answers that cost more than ``excluded``, which is reached, may be missing from the core.
    """

    record: Record
    core: Core
    prices: Floats | None = None
    excluded: float = np.inf
    rounds: int = 0

    def __post_init__(self) -> None:
        core = self.core
        self.graph: Pairs = pairs(core)
        self.costs: Floats = np.where(core.costs >= NEVER, FAR, core.costs.astype(np.float64))
        self.items = Items(core.item_ptr, core.item_begin, core.item_end, core.item_usage, core.capacity)
        self.dual = Dual(self.graph, self.items, self.costs, start=self.prices)
        self.searches = [LocalSearch(self.graph, self.items, self.costs, 2 * self.record.seed + k) for k in (0, 1)]
        self.offered = np.inf
        self.history: list[float] = []

    def run(self, rounds: int) -> None:
        """So many rounds, or fewer when the record is over."""
        if self.rounds == 0:
            self._warm_start()
            self.dual.warm_up(SURELY * self.record.gap, float(self.core.constant))
        threads = 2 if runs_compiled() else 1  # a second thread would only wait for the interpreter
        with ThreadPoolExecutor(threads) as pool:
            for _ in range(rounds):
                if self.record.over:
                    return
                self._round(pool)

    def bound(self, prices: Floats | None = None, messages: Floats | None = None) -> float:
        """The certified bound of the best prices, computed from scratch, in the problem's unit."""
        prices = self.dual.best_prices if prices is None else prices
        messages = self.dual.best_messages if messages is None else messages
        theta = np.empty(len(self.costs))
        priced(self.costs, self.items.ptr, self.items.begin, self.items.end, self.dual.usage, prices, theta)
        value = certify(self.graph, theta, messages) - float(prices @ self.dual.room)
        scale = abs(value) + float(prices @ self.dual.room)
        return min(self.excluded, self.core.constant + value - SAFETY * scale * len(self.graph.low))

    @property
    def limited(self) -> bool:
        """Whether memory keeps anything out; else what messages come to is an answer, mostly the best, and the search waits for it."""
        return len(self.items.capacity) > 0

    def stalled(self) -> bool:
        """Whether the bound has stopped closing the gap."""
        if len(self.history) < 12 or not np.isfinite(self.offered):
            return False
        return self.history[-1] - self.history[-12] < STALL * (self.offered - self.history[-1])

    def _warm_start(self) -> None:
        if self.record.choices is not None:
            start = self.core.restrict(self.record.choices)
            if (start >= 0).all() and self.record.objective is not None:
                self.offered = float(self.record.objective - self.core.constant)
                for search in self.searches:
                    search.adopt(start, self.offered)
        if self.record.objective is not None:
            self.dual.upper = float(self.record.objective - self.core.constant)

    def _round(self, pool: ThreadPoolExecutor) -> None:
        def stop() -> bool:
            return self.record.seconds_left <= 0

        dual, sweeps = self.dual, SWEEPS if runs_compiled() else PLAIN_SWEEPS
        hints = Hints(dual.best_prices.copy(), dual.best_messages.copy(), dual.decoded.copy(), dual.bound)
        work: list[Future[None]] = []
        if self.limited or self.rounds > 0:
            work.append(pool.submit(copy_context().run, self.searches[0].search, sweeps, hints, stop))
        if self.stalled():
            work.append(pool.submit(copy_context().run, self.searches[1].search, sweeps, hints, stop))
        else:
            work.append(pool.submit(copy_context().run, dual.ascend, UPDATES, stop))
        for job in work:
            job.result()
        self.record.spend(VISITED * len(self.graph.table) * (2 * UPDATES + sweeps) * len(work))
        self.rounds += 1
        self._exchange()

    def _exchange(self) -> None:
        for search in self.searches:
            search.adopt(self.dual.answer, self.dual.answer_cost)
        best = min(self.searches, key=lambda search: search.cost)
        if best.best is not None and best.cost < self.offered:
            self.offered = best.cost
            self.record.offer(self.core.expand(best.best))
            self.dual.upper = best.cost
            for search in self.searches:
                search.adopt(best.best, best.cost)
        elif best.best is None:
            for search in self.searches:
                if search.closest is not None:
                    self.record.offer(self.core.expand(search.closest))
        if self.dual.bound >= FAR / 2:
            self._nothing_left()  # some node's choices are all forbidden by its neighbours'
        elif not self.history or self.dual.bound > self.history[-1]:
            self.record.prove(self.bound())
        if not self.stalled():
            self.history.append(self.dual.bound)

    def _nothing_left(self) -> None:
        if np.isfinite(self.excluded):
            self.record.prove(self.excluded)
        else:
            self.record.infeasible = True
