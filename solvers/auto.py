"""``auto``: exact at once for small cores; messages for large ones, and exact again for what they leave.

A small core is one LP away. A large one is searched until its bound stalls or rules out so much that the rest is small; then the rest
is solved exactly, which proves the answer or improves it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from .array_program import solve_core
from .arrays import Floats
from .dual_ascent import priced
from .exact_elimination import solve_by_elimination
from .incumbent import Incumbent
from .message_search import MessageSearch
from .reduced_cost_fixing import fix_by_reduced_cost, reduced_costs
from .reduction import Core, reduce
from .settings import SETTINGS


def solve_auto(incumbent: Incumbent) -> None:
    """Reduce, then choose the road by size."""
    core = reduce(incumbent.problem)
    incumbent.spend(core.work)
    if "elimination" not in SETTINGS.skip and solve_by_elimination(incumbent, core) and incumbent.done:
        return
    if core.num_entries <= SETTINGS.direct_entries:
        solve_core(incumbent, core)
        return
    AlternatingSolver(incumbent, core).run()


@dataclass
class AlternatingSolver:
    """Rounds of messages on ever smaller cores, with exact attempts between."""

    incumbent: Incumbent
    core: Core
    attempted: float = np.inf
    gap: float = np.inf

    def run(self) -> None:
        """Until the incumbent is over, or little is gained and it is not patient."""
        search, patient = MessageSearch(self.incumbent, self.core), self.incumbent.patient
        while not self.incumbent.over:
            search.run(SETTINGS.rounds_between_looks if patient else 1)
            if self.incumbent.over or self.incumbent.objective is None:
                continue
            gains = self._gains()
            core = self._rest(search) if gains is patient and "fixing" not in SETTINGS.skip else None
            tries = core is not None and core.num_entries <= min(SETTINGS.exact_entries, SETTINGS.smaller * self.attempted)
            if core is not None and tries:
                self.attempted = core.num_entries
                solve_core(self.incumbent, core, self.incumbent.objective, SETTINGS.exact_share * self.incumbent.work_left)
            if not (patient or gains or tries):
                return
            smaller = core is not None and core.num_entries <= SETTINGS.smaller * search.core.num_entries and core.num_nodes > 0
            if core is not None and smaller and not self.incumbent.over:
                search = MessageSearch(self.incumbent, core, _carried(search, core), float(self.incumbent.objective or 0))

    def _gains(self) -> bool:
        """Whether the gap has closed enough since it last had."""
        gains = self.incumbent.current_gap <= (1 - SETTINGS.least_gain) * self.gap
        if gains:
            self.gap = self.incumbent.current_gap
        return gains

    def _rest(self, search: MessageSearch) -> Core | None:
        """The core of what bound and answer leave, None when that is not much less."""
        objective = self.incumbent.objective
        assert objective is not None
        theta = priced(search.costs, search.items, search.dual.best_prices)
        choice, pair = reduced_costs(search.graph, theta, search.dual.best_messages)
        self.incumbent.spend(3 * SETTINGS.entry_work * len(pair))
        room = (objective - search.bound()) * (1 + SETTINGS.tight) + 1
        if search.core.num_entries > SETTINGS.exact_entries and np.count_nonzero(pair < room) > SETTINGS.smaller * len(pair):
            return None
        rest = fix_by_reduced_cost(search.core, search.graph, choice, pair, room)
        if rest is None:
            return None
        core = reduce(rest.problem, objective - search.core.constant + 1)
        self.incumbent.spend(core.work)
        return replace(
            core,
            constant=core.constant + search.core.constant,
            expand=lambda choices: rest.expand(core.expand(choices)),
            restrict=lambda choices: core.restrict(rest.restrict(choices)),
        )


def _carried(search: MessageSearch, core: Core) -> Floats:
    """The prices of a core's times at the times that are left of them."""
    prices = np.zeros(len(core.items.capacity))
    if len(prices):
        place = np.searchsorted(core.items.time, np.arange(len(search.dual.best_prices)), side="right") - 1
        np.add.at(prices, np.maximum(place, 0), search.dual.best_prices)
    return prices
