"""``auto``: exact at once for small cores; messages for large ones, and exact again for what they leave.

A small core is one LP away. A large one is searched until its bound stalls or rules out so much that the rest is small; then the rest
is solved exactly, which proves the answer or improves it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np

from solvers.array_program import solve_core
from solvers.message_search import MessageSearch
from solvers.messages import priced
from solvers.record import Record
from solvers.reduction import Core, reduce
from solvers.shrinking import Shrunk, shrink, slacks

DIRECT = 20_000
"""Entries of edge tables up to which a core goes to HiGHS at once."""
EXACT = 60_000
"""Entries up to which what messages leave does."""
SHARE = 0.4
"""Share of the time left that one exact attempt may take."""
EAGER_ROUNDS = 4
"""Rounds between two looks at what is left."""


def solve_automatic(record: Record) -> None:
    """Reduce, then choose the road by size."""
    core = reduce(record.problem)
    if core.num_entries <= DIRECT:
        solve_core(record, core)
        return
    Campaign(record, core).run()


@dataclass
class Campaign:
    """Rounds of messages with exact attempts between."""

    record: Record
    core: Core
    rounds: int = 0
    attempted: int = 2**62

    def run(self) -> None:
        """Until the record is over."""
        self.search = MessageSearch(self.record, self.core)
        while not self.record.over:
            self.search.run(self._time_to_look)
            if not self.record.over:
                self._attempt()

    def _time_to_look(self) -> bool:
        self.rounds += 1
        return self.rounds % EAGER_ROUNDS == 0 and self.record.objective is not None

    def _attempt(self) -> None:
        """Solve what bound and answer leave, when that is small and smaller than at the last attempt."""
        rest = self._rest()
        if rest is None or len(rest.problem.edge_costs) > 20 * EXACT:
            return
        objective = self.record.objective
        assert objective is not None
        core = reduce(rest.problem, objective - self.core.constant)
        if core.num_entries > min(EXACT, 0.7 * self.attempted):
            return
        self.attempted = core.num_entries
        deadline = time.perf_counter() + SHARE * self.record.seconds_left
        solve_core(self.record, _joined(core, rest, self.core.constant), objective, deadline)

    def _rest(self) -> Shrunk | None:
        search, objective = self.search, self.record.objective
        if objective is None:
            return None
        theta = np.empty(len(search.costs))
        items, prices = search.items, search.dual.best_prices
        priced(search.costs, items.ptr, items.begin, items.end, search.dual.usage, prices, theta)
        choice, pair = slacks(search.graph, theta, search.dual.best_messages)
        room = objective - search.bound()
        return shrink(self.core, search.graph, choice, pair, room * (1 + 1e-9) + 1e-3)


def _joined(core: Core, rest: Shrunk, constant: int) -> Core:
    """The core of the rest, as a core of the original problem."""
    return replace(core, constant=core.constant + constant, expand=lambda choices: rest.expand(core.expand(choices)))
