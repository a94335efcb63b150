"""``auto``: exact at once for small cores; messages for large ones, and exact again for what they leave.

A small core is one LP away. A large one is searched until its bound stalls or rules out so much that the rest is small; then the rest
is solved exactly, which proves the answer or improves it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np

from solvers.array_program import solve_core
from solvers.arrays import Floats
from solvers.compiled import runs_compiled
from solvers.exact_elimination import solve_by_elimination
from solvers.message_search import MessageSearch
from solvers.messages import priced
from solvers.record import Record
from solvers.reduction import Core, reduce
from solvers.shrinking import shrink, slacks

DIRECT = 20_000
"""Entries of edge tables up to which a core goes to HiGHS at once."""
EXACT = 120_000
"""Entries up to which what messages leave does."""
SHARE = 0.4
"""Share of the time left that one exact attempt may take."""
LOOK = 4
"""Rounds after which it is asked whether they gain."""
GAIN = 0.03
"""Share of the gap that has to close for that. What is left is looked at as long as they gain; by one that is not patient, which asks after
each, once they do not, and where too much is left it ends."""
WORTHWHILE = 0.6
"""A new core is begun when it has at most this share of the entries of the present one."""


def solve_automatic(record: Record) -> None:
    """Reduce, then choose the road by size."""
    core = reduce(record.problem)
    if solve_by_elimination(record, core) and record.done:
        return
    if core.num_entries <= DIRECT:
        solve_core(record, core)
        return
    Campaign(record, core).run()


@dataclass
class Campaign:
    """Rounds of messages on ever smaller cores, with exact attempts between."""

    record: Record
    core: Core
    attempted: float = np.inf
    gap: float = np.inf

    def run(self) -> None:
        """Until the record is over, or little is gained and it is not patient."""
        search, patient = MessageSearch(self.record, self.core), self.record.patient
        while not self.record.over:
            search.run(LOOK if patient else 1)
            if self.record.over or self.record.objective is None:
                continue
            gains = self._gains()
            core = self._rest(search) if gains is patient else None
            tries = core is not None and core.num_entries <= min(EXACT, WORTHWHILE * self.attempted)
            if core is not None and tries:
                self.attempted = core.num_entries
                deadline = time.perf_counter() + SHARE * self.record.seconds_left
                solve_core(self.record, core, self.record.objective, deadline)
            if not (patient or gains or tries):
                return
            smaller = core is not None and core.num_entries <= WORTHWHILE * search.core.num_entries and core.num_nodes > 0
            if core is not None and smaller and not self.record.over:
                search = MessageSearch(self.record, core, _carried(search, core), float(self.record.objective or 0))

    def _gains(self) -> bool:
        """Whether the gap has closed enough since it last had."""
        gains = self.record.current_gap <= (1 - GAIN) * self.gap
        if gains:
            self.gap = self.record.current_gap
        return gains

    def _rest(self, search: MessageSearch) -> Core | None:
        """The core of what bound and answer leave, None when that is not much less."""
        objective = self.record.objective
        assert objective is not None
        if not runs_compiled() and search.core.num_entries > EXACT:
            return None  # it would take longer than it saves
        theta = np.empty(len(search.costs))
        items, prices = search.items, search.dual.best_prices
        priced(search.costs, items.ptr, items.begin, items.end, search.dual.usage, prices, theta)
        choice, pair = slacks(search.graph, theta, search.dual.best_messages)
        room = (objective - search.bound()) * (1 + 1e-9) + 1e-3
        if search.core.num_entries > EXACT and np.count_nonzero(pair < room) > 0.9 * len(pair):
            return None
        rest = shrink(search.core, search.graph, choice, pair, room)
        if rest is None:
            return None
        core = reduce(rest.problem, objective - search.core.constant + 1)
        return replace(
            core,
            constant=core.constant + search.core.constant,
            expand=lambda choices: rest.expand(core.expand(choices)),
            restrict=lambda choices: core.restrict(rest.restrict(choices)),
        )


def _carried(search: MessageSearch, core: Core) -> Floats:
    """The prices of a core's times at the times that are left of them."""
    prices = np.zeros(len(core.capacity))
    if len(prices):
        place = np.searchsorted(core.times, np.arange(len(search.dual.best_prices)), side="right") - 1
        np.add.at(prices, np.maximum(place, 0), search.dual.best_prices)
    return prices
