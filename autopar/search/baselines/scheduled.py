"""The plans written by hand, as a search schedules them: what it begins from and what it is compared with."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from autopar.schedule import Assignment
from autopar.schedule.passes import default_limits
from autopar.schedule.tuning import ScheduledPlan
from autopar.search.baselines.checkpointing import with_policies
from autopar.search.baselines.recipes import find_baselines
from autopar.search.choices.pins import Pins
from autopar.search.choices.space import Space
from autopar.search.driver.state import SearchState
from autopar.search.folding.fold import Folding
from autopar.search.folding.tied_model import TiedModel
from autopar.search.ilp.model import Model
from autopar.search.settings import ROOMY_BASELINE, TUNED_BASELINES


@dataclass
class ScheduledBaselines:
    """The plans by name, once they are scheduled.

    Args:
        rivals: each as short as was found, and leaner ones where memory binds.
        contradicted: the reasons why others are none, by name.
        made: what ``find_baselines`` says of the space that is searched, where it was asked before.
    """

    rivals: dict[str, ScheduledPlan] = field(default_factory=dict)
    contradicted: dict[str, str] = field(default_factory=dict)
    made: tuple[dict[str, Assignment], dict[str, str]] | None = None

    def alike(self, space: Space, folding: Folding | None) -> list[Assignment]:
        """Their assignments; where equal layers are folded, of those that have them alike."""
        self.made = find_baselines(space)
        return [plan for plan in self.made[0].values() if folding is None or folding.agrees(plan)]

    def again(self) -> ScheduledBaselines:
        """The same assignments, to be scheduled for another search in the same space."""
        return ScheduledBaselines(made=self.made)

    def schedule(self, search: SearchState, space: Space, pins: Pins, again: bool) -> None:
        """Schedules all of them, unless an earlier search has, and offers them.

        Args:
            again: second runs may be among what makes them fit.
        """
        rivals, limit = self.rivals, search.limit
        try:
            if not rivals:
                self._schedule(search, space, pins, again)
        finally:  # what ends it leaves those that are there
            for name in _by_worth(rivals, limit):
                search.offer(rivals[name], "baseline")

    def settle(self, search: SearchState) -> None:
        """Schedules those at full depth that may be better than the best of a search that has ended."""
        names = _by_worth(self.rivals, search.limit)
        for name in names:
            self.rivals[name] = search.sure(self.rivals[name])
            search.offer(self.rivals[name], "baseline")
        if search.long and names:
            self.rivals[names[0]] = search.finished(self.rivals[names[0]], 1)

    def _schedule(self, search: SearchState, space: Space, pins: Pins, again: bool) -> None:
        rivals = self.rivals
        assignments, self.contradicted = self._assignments(search.model, space, pins)
        for name, assignment in assignments.items():
            if rivals and search.left <= 0:
                break
            least = min((rival.placed_seconds for rival in rivals.values() if rival.memory.peak <= search.limit), default=math.inf)
            rivals[name] = search.schedule(assignment, None, tries=0, beside=least)
        few = search.large or search.long
        if not few:
            self._tune(search, len(rivals), apart=again)
        if again:
            rivals.update(_leaner(rivals, search))
        if few:
            self._tune(search, TUNED_BASELINES, apart=False)

    def _assignments(self, model: Model, space: Space, pins: Pins) -> tuple[dict[str, Assignment], dict[str, str]]:
        """The baselines, of the folded graph where their layers are alike, and the reasons why others are none."""
        found, contradicted = self.made or find_baselines(space)
        if isinstance(model, TiedModel) and not all(map(model.fold.agrees, found.values())):  # it walks the whole graph
            return find_baselines(replace(space, graph=model.whole_graph, pins=pins))
        return found, contradicted

    def _tune(self, search: SearchState, count: int, *, apart: bool) -> None:
        """Tries limits for the best of them, those of the best so far first: of what trails then not many more are tried.

        Args:
            apart: for each as if it were alone: its limits are to show whether memory binds it.
        """
        best: ScheduledPlan | None = None
        for name in _by_worth(self.rivals, search.limit)[:count]:
            limits = best.limits if best is not None else None
            beside = best.placed_seconds if best is not None else math.inf
            found = search.schedule(self.rivals[name].assignment, limits, search.tries, beside)
            self.rivals[name] = found
            best = found if not apart and found.better(best, search.limit) else best

    def unfold(self, model: Model) -> None:
        """Makes them plans of the graph that is planned, for a search that follows on it."""
        for name, rival in self.rivals.items():
            self.rivals[name] = replace(rival, assignment=model.whole(rival.assignment))


def _by_worth(rivals: Mapping[str, ScheduledPlan], limit: int) -> list[str]:
    return sorted(rivals, key=lambda name: (rivals[name].memory.peak > limit, rivals[name].seconds))


def _leaner(rivals: Mapping[str, ScheduledPlan], search: SearchState) -> dict[str, ScheduledPlan]:
    """Of baselines that do not fit, or give up overlap to fit, the first that does without under one policy of recomputation after another
    (``NAME+POLICY``), as long as they keep nothing as busy as all that fit take, and what stays of a step to the next fits."""
    model, limit = search.model, search.limit
    found: dict[str, ScheduledPlan] = {}
    best = min((rival.seconds for rival in rivals.values() if rival.memory.peak <= limit), default=math.inf)
    for name in sorted(rivals, key=lambda name: rivals[name].seconds):
        if not _binds(rivals[name], search) or rivals[name].busiest_seconds() >= best or rivals[name].memory.resting > limit:
            continue
        plan = rivals[name].assignment
        graph = model.space.graph if len(plan.strategies) == len(model.space.graph.ops) else model.whole_graph
        for policy, leaner in with_policies(graph, plan, model.space.machine):
            if search.left <= 0:
                return found
            tried = search.schedule(leaner, None, tries=0 if search.large else search.tries)
            found[f"{name}+{policy}"] = tried
            if tried.memory.peak <= limit:
                best = min(best, tried.seconds)
                if not _binds(tried, search):
                    break
    return found


def _binds(rival: ScheduledPlan, search: SearchState) -> bool:
    """Whether memory keeps a plan from fitting, or from gathering ahead as it would."""
    short = rival.limits.ahead_bytes < default_limits(search.model.space.machine).ahead_bytes
    return rival.memory.peak > search.limit or (short and rival.memory.peak > ROOMY_BASELINE * search.limit)
