"""``auto``: one exact sweep where tables fit. Else messages, and sparse elimination of what they leave; with a limit, integer programs.

A small core with a limit is one LP away. A large one is searched until its bound stalls or rules out so much that the rest is small; then
the rest is solved exactly, which proves the answer or improves it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .array_program import solve_core
from .arrays import Floats
from .exact_elimination import solve_by_elimination
from .incumbent import Incumbent
from .message_search import MessageSearch
from .reduced_cost_fixing import shrink
from .reduction import Core, reduce
from .settings import SETTINGS
from .sparse_elimination import eliminate


def solve_auto(incumbent: Incumbent) -> None:
    """Reduce, then choose the road by size."""
    core = reduce(incumbent.problem)
    incumbent.spend(core.work)
    if "elimination" not in SETTINGS.skip and solve_by_elimination(incumbent, core) and incumbent.done:
        return
    if core.infeasible or core.num_nodes == 0 or (core.num_entries <= SETTINGS.direct_entries and len(core.items.capacity)):
        solve_core(incumbent, core)
    elif len(core.items.capacity):
        AlternatingSolver(incumbent, core).run()
    else:
        solve_without_memory(incumbent, core)


def solve_without_memory(incumbent: Incumbent, core: Core) -> None:
    """Rounds of messages and local search; after each an elimination with more rows, on the core of what may still be better."""
    search, known, attempts = MessageSearch(incumbent, core), np.inf, 0
    while not incumbent.over:
        search.run(1)
        if incumbent.over or incumbent.objective is None:
            continue
        if incumbent.objective < known:
            known = incumbent.objective
            rest = shrink(search, known)
            if rest is not None and (rest.infeasible or rest.num_nodes == 0):
                solve_core(incumbent, rest, known)
                return
            if rest is not None and rest.num_entries <= SETTINGS.worth_beginning * search.core.num_entries:
                search = MessageSearch(incumbent, rest, excluded=known)
                search.run(1)
                if incumbent.over:
                    return
        worth = incumbent.patient or incumbent.gap < SETTINGS.proof_gap or search.core.num_entries <= SETTINGS.exact_entries
        if attempts < len(SETTINGS.sparse_rows) and worth and "elimination" not in SETTINGS.skip:
            gap = incumbent.current_gap
            ends = eliminate(incumbent, search, SETTINGS.sparse_rows[attempts])
            gains = attempts == 0 or incumbent.current_gap <= (1 - SETTINGS.least_gain) * gap  # the first has few rows
            attempts = attempts + 1 if ends and gains else len(SETTINGS.sparse_rows)
        elif not incumbent.patient:
            return


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
            core = None
            if gains is patient and "fixing" not in SETTINGS.skip:
                most = SETTINGS.smaller if search.core.num_entries > SETTINGS.exact_entries else 1.0
                core = shrink(search, self.incumbent.objective, most)
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


def _carried(search: MessageSearch, core: Core) -> Floats:
    """The prices of a core's times at the times that are left of them."""
    prices = np.zeros(len(core.items.capacity))
    if len(prices):
        place = np.searchsorted(core.items.time, np.arange(len(search.dual.best_prices)), side="right") - 1
        np.add.at(prices, np.maximum(place, 0), search.dual.best_prices)
    return prices
