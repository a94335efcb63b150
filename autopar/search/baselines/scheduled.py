"""Scheduled baselines: warm starts of a search, and the plans that its result is compared with."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from autopar.schedule import Assignment
from autopar.schedule.passes import default_limits
from autopar.schedule.scheduled_plan import ScheduledPlan
from autopar.search.baselines.checkpointing import apply_policies
from autopar.search.baselines.recipes import find_baselines
from autopar.search.choices.pins import Pins
from autopar.search.choices.space import Space
from autopar.search.driver.state import SearchState
from autopar.search.folding.fold import Folding
from autopar.search.folding.tied_model import TiedModel
from autopar.search.ilp.model import Model
from autopar.search.settings import TUNED_BASELINES


@dataclass
class ScheduledBaselines:
    """Baselines by name, with their schedules once there are any.

    Args:
        rivals: the fastest schedule found of each, and of recomputing variants (``NAME+POLICY``) where memory binds.
        found_baselines: ``find_baselines`` of the searched space, if it was called before.
    """

    rivals: dict[str, ScheduledPlan] = field(default_factory=dict)
    found_baselines: dict[str, Assignment] | None = None

    def assignments(self, space: Space, folding: Folding | None) -> list[Assignment]:
        """Assignments of the baselines. With folded layers only those that treat equal layers alike."""
        self.found_baselines = find_baselines(space)
        return [plan for plan in self.found_baselines.values() if folding is None or folding.unfolds(plan)]

    def unscheduled(self) -> ScheduledBaselines:
        """The same assignments, without schedules, for another search in the same space."""
        return ScheduledBaselines(found_baselines=self.found_baselines)

    def schedule(self, search: SearchState, space: Space, pins: Pins, may_recompute: bool) -> None:
        """Schedules all baselines, unless an earlier search did, and offers them as incumbents.

        Args:
            may_recompute: recomputation may be used to make them fit.
        """
        rivals, limit = self.rivals, search.limit
        try:
            if not rivals:
                self._schedule(search, space, pins, may_recompute)
        finally:  # an interrupt keeps those scheduled so far
            for name in _sorted_by_worth(rivals, limit):
                search.offer(rivals[name], "baseline")

    def schedule_at_full_depth(self, search: SearchState) -> None:
        """Schedules the baselines at full depth that may beat the incumbent of an ended search.

        The fastest baseline of a long graph gets local search over its order as well.
        """
        names = _sorted_by_worth(self.rivals, search.limit)
        for name in names:
            self.rivals[name] = search.confirm(self.rivals[name])
            search.offer(self.rivals[name], "baseline")
        if search.size.is_long and names:
            self.rivals[names[0]] = search.improve_order(self.rivals[names[0]], 1)

    def _schedule(self, search: SearchState, space: Space, pins: Pins, may_recompute: bool) -> None:
        rivals = self.rivals
        for name, assignment in self._assignments(search.model, space, pins).items():
            if rivals and search.work_left <= 0:
                break
            least = min((rival.placed_seconds for rival in rivals.values() if rival.memory.peak <= search.limit), default=math.inf)
            rivals[name] = search.schedule(assignment, None, tries=0, incumbent_seconds=least)
        if may_recompute:
            rivals.update(_recomputing_variants(rivals, search))
        self._tune(search)

    def _assignments(self, model: Model, space: Space, pins: Pins) -> dict[str, Assignment]:
        """The baselines, of the folded graph if all treat equal layers alike, else of the whole graph."""
        found = self.found_baselines or find_baselines(space)
        if isinstance(model, TiedModel) and not all(map(model.fold.unfolds, found.values())):  # propagates over the whole graph
            return find_baselines(replace(space, graph=model.planned_graph, pins=pins))
        return found

    def _tune(self, search: SearchState) -> None:
        """Tries limits of the schedule passes for the fastest baselines, beginning with the limits of the fastest so far.

        A baseline that trails the fastest gets few tries.
        """
        best: ScheduledPlan | None = None
        for name in _sorted_by_worth(self.rivals, search.limit)[:TUNED_BASELINES]:
            limits = best.limits if best is not None else None
            beside = best.placed_seconds if best is not None else math.inf
            found = search.schedule(self.rivals[name].assignment, limits, search.size.tries, beside)
            self.rivals[name] = found
            best = found if found.better(best, search.limit) else best

    def unfold(self, model: Model) -> None:
        """Turns folded baselines into plans of the planned graph, for a search that follows."""
        for name, rival in self.rivals.items():
            self.rivals[name] = replace(rival, assignment=model.unfold(rival.assignment))


def _sorted_by_worth(rivals: Mapping[str, ScheduledPlan], limit: int) -> list[str]:
    return sorted(rivals, key=lambda name: (rivals[name].memory.peak > limit, rivals[name].seconds))


def _recomputing_variants(rivals: Mapping[str, ScheduledPlan], search: SearchState) -> dict[str, ScheduledPlan]:
    """Recomputing variants of the baselines that memory binds, as ``NAME+POLICY``.

    Policies are tried in order until one fits without giving up overlap. A baseline is skipped whose busiest stream takes as long as the
    fastest that fits, or whose memory between steps exceeds the limit.
    """
    model, limit = search.model, search.limit
    found: dict[str, ScheduledPlan] = {}
    best = min((rival.seconds for rival in rivals.values() if rival.memory.peak <= limit), default=math.inf)
    for name in sorted(rivals, key=lambda name: rivals[name].seconds):
        if not _is_memory_bound(rivals[name], search) or rivals[name].busiest_seconds() >= best or rivals[name].memory.resting > limit:
            continue
        plan = rivals[name].assignment
        graph = model.space.graph if len(plan.strategies) == len(model.space.graph.ops) else model.planned_graph
        for policy, leaner in apply_policies(graph, plan, model.space.machine):
            if search.work_left <= 0:
                return found
            tried = search.schedule(leaner, None, tries=0)
            found[f"{name}+{policy}"] = tried
            if tried.memory.peak <= limit:
                best = min(best, tried.seconds)
                if not _is_memory_bound(tried, search):
                    break
    return found


def _is_memory_bound(rival: ScheduledPlan, search: SearchState) -> bool:
    """Whether memory keeps a plan from fitting, or from prefetching as much as it would."""
    short = rival.limits.ahead_bytes < default_limits(search.model.space.machine).ahead_bytes
    return rival.memory.peak > search.limit or (short and rival.memory.peak > search.request.thresholds.roomy * search.limit)
