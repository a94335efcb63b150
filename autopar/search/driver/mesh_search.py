"""The searches on one mesh: folded, whole, among pinned plans, and from plans of meshes with merged axes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from autopar.cost_models import Machine
from autopar.effort import Budget
from autopar.errors import InfeasibleError, TimeLimitError
from autopar.graph import Graph
from autopar.schedule import Assignment
from autopar.schedule.scheduled_plan import ScheduledPlan
from autopar.search.baselines.scheduled import ScheduledBaselines
from autopar.search.bounds.aggregated_memory import aggregated_memory_bound
from autopar.search.bounds.surrogate import floor_of_space
from autopar.search.choices.pins import Pins
from autopar.search.choices.space import BudgetExhausted, Space
from autopar.search.coarsening.merged_axes import AxisMerge, axis_merges
from autopar.search.coarsening.one_axis import one_axis_neighbourhood, table_entries
from autopar.search.driver.result import SearchResult, Shared
from autopar.search.driver.search_model import restrict_to_plan, search_model, search_part
from autopar.search.driver.state import SearchRequest
from autopar.search.folding.fold import Folding, fold_layers
from autopar.search.folding.tied_model import tie_model
from autopar.search.ilp.build import build_model
from autopar.search.ilp.model import Model
from autopar.search.settings import GAIN, PARTS_AFTER_DRAFTS, SOLVE_SHARE, WHOLE_ENTRIES
from autopar.sharding import ALL_ORDERS


@dataclass(frozen=True)
class MeshSearch:
    """Searches for one plan, one after another, each with what those before have found.

    Args:
        graph, machine, pins, asked: of the plan.
        shared: spaces and models, by kind.
        known: schedules found so far. Each search adds its own.
        written: the baselines, with the schedules of a search that was left for another.
    """

    graph: Graph
    machine: Machine
    pins: Pins
    asked: SearchRequest
    shared: Shared
    known: list[ScheduledPlan]
    written: ScheduledBaselines = field(default_factory=ScheduledBaselines)

    def run(self, relaxed: Assignment | None = None, relaxed_seconds: float = math.inf) -> SearchResult:
        """The search on the mesh: folded if layers fold, from plans of merged axes if there are too many choices.

        Args:
            relaxed: the plan of the same search without some of the pins, and its seconds.

        Raises:
            BudgetExhausted: choices were not enumerated or priced in time.
        """
        asked, pins = self.asked, self.pins
        folding = fold_layers(self.graph) if self.machine.overlaps and "folding" not in asked.telemetry.skip else None
        kept = folding.pins(pins) if folding is not None else None
        found: SearchResult | None = None
        if relaxed is not None and folding is not None and kept is None:
            found = self._search_spread_pins(folding, relaxed)
            as_good = found is not None and found.seconds <= relaxed_seconds * (1 + GAIN)
            if found is not None and (as_good or found.interrupted or asked.budget.over):
                return found
        elif relaxed is not None:
            begun = self.search_pinned([relaxed])
            if begun is not None and begun.interrupted:
                return begun
        if folding is not None and kept is not None:
            space = self._space("folded", folding.graph, kept)
            enumerated = self._enumerate_choices(space)
            if not enumerated or self._has_too_many_choices(space):
                found = self._search_from_merged_axes(space, folding, enumerated)
            else:
                model = tie_model(self.shared.model("folded", lambda: build_model(space)), folding, asked.thresholds)
                found = self._search_model(model, space, replace(asked, telemetry=asked.telemetry.within("folded")))
            if found is not None and found.ended:
                return found
        try:
            return self._search_whole()
        except (KeyboardInterrupt, BudgetExhausted, TimeLimitError) as reason:
            if found is None:
                raise
            return replace(found, interrupted=isinstance(reason, KeyboardInterrupt))

    def search_pinned(self, plans: Sequence[Assignment], *, baselines: bool = False) -> SearchResult | None:
        """The best plan with the strategies of plans that need not keep the pins; None where none fits."""
        inside = self._inside("pinned", SOLVE_SHARE, bounds=[*self.asked.bounds], baselines=baselines)
        whole = self._space("whole", self.graph, self.pins)
        written = self.written if baselines else ScheduledBaselines()
        part = whole.restricted_to_plans(plans)
        return self._attempt(lambda: search_part(part, whole, None, self.pins, inside, self.known, written, (), None))

    def _space(self, kind: str, graph: Graph, pins: Pins) -> Space:
        return self.shared.space(kind, lambda: Space(graph, self.machine, self.asked.optimizer, pins))

    def _inside(self, place: str, share: float, **changes: Any) -> SearchRequest:
        """The request of a search without a bound, for a share of the work left."""
        budget, telemetry = self.asked.budget.share(share), self.asked.telemetry.within(place)
        return replace(self.asked, budget=budget, telemetry=telemetry, proves=False, **changes)

    def _attempt(self, search: Callable[[], SearchResult | None]) -> SearchResult | None:
        """The result of a search, whose plan is known from now on; None where it found none."""
        try:
            found = search()
        except (InfeasibleError, TimeLimitError, BudgetExhausted):
            return None
        if found is not None and found.scheduled_plan is not None:
            self.known.append(found.scheduled_plan)
        return found

    def _search_model(self, model: Model | None, space: Space, asked: SearchRequest) -> SearchResult | None:
        """The search on a model, which is None where layers cannot be tied."""
        return None if model is None else search_model(model, space, self.pins, asked, self.known, self.written)

    def _search_spread_pins(self, folding: Folding, relaxed: Assignment) -> SearchResult | None:
        """The search where pins tell equal layers apart.

        The pins of one layer are those of all in a folded search, which has half of the work. Its strategies and those of the plan
        without pins are combined, each layer on its own. The bound is that without the pins.
        """
        plans, spread = [relaxed], folding.spread_pins(self.pins)
        if spread is not None:
            space = Space(folding.graph, self.machine, self.asked.optimizer, spread)
            if self._enumerate_choices(space) and not self._has_too_many_choices(space):
                model = tie_model(build_model(space), folding, self.asked.thresholds)
                found = self._attempt(lambda: self._search_model(model, space, self._inside("alike", 0.5, candidates=1)))
                if found is not None and found.interrupted:
                    return found
                if found is not None and found.scheduled_plan is not None:
                    plans.append(found.scheduled_plan.assignment)
                if model is not None:
                    self.written.unfold(model)
        return self.search_pinned(plans, baselines=True)

    def _search_whole(self) -> SearchResult:
        """The search with each layer on its own."""
        space, asked = self._space("whole", self.graph, self.pins), self.asked
        enumerated = self._enumerate_choices(space)
        if not enumerated or self._has_too_many_choices(space):
            found = self._search_from_merged_axes(space, None, enumerated)
            if found is not None:
                return found
            if asked.budget.over:
                what, hint = asked.budget.meter.used_up()
                raise TimeLimitError(f"{what} among plans of merged axes and those near them", hint)
            self._enumerate_choices(space, 1.0)
        found = self._search_model(self.shared.model("whole", lambda: build_model(space)), space, asked)
        assert found is not None
        return found

    @property
    def _has_many_axes(self) -> bool:
        return sum(size > 1 for size in self.machine.mesh.sizes) > ALL_ORDERS and self.machine.overlaps

    def _has_too_many_choices(self, space: Space) -> bool:
        """Whether the problem over all choices is too large to be solved at once."""
        return self._has_many_axes and table_entries(space) > self.asked.thresholds.coarse_entries

    def _enumerate_choices(self, space: Space, share: float = 1 / 2) -> bool:
        """Enumerates all strategies. False where the budget did not suffice and plans of merged axes can stand in."""
        many = self._has_many_axes and share < 1.0
        last = Budget(self.asked.budget.meter, math.inf)
        space.budget = self.asked.budget.share(share) if many else last
        try:
            for op in space.graph.ops:
                space.op_choices(op)
        except BudgetExhausted:
            if not many:
                raise
            return False
        finally:
            space.budget = last
        return True

    def _search_from_merged_axes(self, space: Space, folding: Folding | None, enumerated: bool) -> SearchResult | None:
        """The best plan that a search from meshes with merged axes leads to; None where none fits in memory.

        All choices are searched from there, if a gap is open and there is work for it. Else the strategies of the best draft are searched
        alone. Pins may leave no draft: then the neighbourhood of the baselines is searched. The cheapest-choice floor and the
        aggregated-memory bound bound every plan.

        Args:
            enumerated: whether all choices are. Else there is no bound.

        Raises:
            KeyboardInterrupt: Ctrl-C came before there was a plan.
        """
        graph, asked, known = self.graph, self.asked, self.known
        bound = max([floor_of_space(space, folding) if enumerated else 0.0, *asked.bounds])
        if enumerated and asked.recompute and graph.mode == "train" and "aggregated memory" not in asked.telemetry.skip:
            with asked.telemetry.phase("aggregated memory", lambda: (math.inf, bound)):
                bound = max(bound, aggregated_memory_bound(space, folding, asked.limit, asked.budget.share(SOLVE_SHARE)))
        least = min((plan.seconds for plan in known), default=math.inf)
        less = replace(asked, baselines=not enumerated, telemetry=asked.telemetry.within("merged axes"))
        merges = list(axis_merges(self.machine, ALL_ORDERS))
        plans, found, interrupted = _draft_merged_plans(graph, merges, self.pins, less, bound, least, folding is not None)
        draft = found.scheduled_plan if found is not None else None
        is_best = draft is not None and draft.seconds < least
        before = [plan.assignment for plan in known]
        plans = [*plans, *before] if is_best else [*before, *plans]
        written = ScheduledBaselines()
        parts = [space] if enumerated and not interrupted and _should_search_all(space, draft, bound, asked) else []
        if plans:
            parts.append(restrict_to_plan(space, plans[0]))
        elif enumerated:
            plans = written.assignments(space, folding)
            parts += [one_axis_neighbourhood(space, plans)] if plans else []
        for part in parts:
            over = interrupted or asked.budget.over
            inside = replace(
                asked, budget=asked.budget.at_most(0.0) if interrupted else asked.budget, telemetry=asked.telemetry.within("near"),
                proves=part is space, bounds=[bound], baselines=asked.baselines and enumerated and not over,
            )  # fmt: skip
            start = draft.limits if draft is not None and is_best else None
            try:
                result = search_part(
                    part, space, folding, self.pins, inside, known, written.unscheduled(), plans, start
                )  # fmt: skip
            except InfeasibleError:
                break
            except (KeyboardInterrupt, BudgetExhausted, TimeLimitError) as reason:
                interrupted |= isinstance(reason, KeyboardInterrupt)
                continue
            if result is not None and result.scheduled_plan is not None:
                return replace(result, interrupted=interrupted or result.interrupted)
        if interrupted:
            raise KeyboardInterrupt
        return None


def _should_search_all(space: Space, merged: ScheduledPlan | None, bound: float, asked: SearchRequest) -> bool:
    """Whether the search over all choices promises a gain, and has the work for it."""
    limits = asked.thresholds
    if merged is None or merged.memory.peak > limits.roomy * asked.limit or merged.seconds * (1 - limits.whole_gap) <= bound:
        return False
    return table_entries(space) <= min(WHOLE_ENTRIES, limits.entries_per_work * asked.budget.left)


def _draft_merged_plans(
    graph: Graph, ways: Sequence[AxisMerge], pins: Pins, asked: SearchRequest, bound: float, least: float, folded: bool
) -> tuple[list[Assignment], SearchResult | None, bool]:  # fmt: skip
    """Draft plans of meshes with axes merged, the best first; the result of the best; and whether Ctrl-C ended that.

    Args:
        ways: the merges to search, in order.
        bound: seconds that bound all plans.
        least: seconds of the best plan known.
        folded: whether plans are of the folded graph, where they were searched so.
    """
    plans, interrupted = list[Assignment](), False
    best: SearchResult | None = None
    reached = math.inf
    for number, merging in enumerate(ways):
        left = asked.budget.left
        merged = merging.pins(pins)
        if merged is None:
            continue
        if left <= 0 or reached * (1 - asked.gap) <= bound:
            continue
        budget = asked.budget.share(1 / (len(ways) - number + PARTS_AFTER_DRAFTS))
        less = replace(asked, budget=budget, proves=False, bounds=[], progress=None, draft=True, candidates=1)
        try:
            found = MeshSearch(graph, merging.machine, merged, less, Shared(), []).run()
        except InfeasibleError:
            continue
        except (TimeLimitError, BudgetExhausted):
            if not plans and bound > 0.0:
                break  # other merges would take as long; baselines are faster
            continue
        except KeyboardInterrupt:
            if not plans and least == math.inf:
                raise
            return plans, best, True
        if found.scheduled_plan is not None and found.searched_assignment is not None:
            plan = found.searched_assignment if folded else found.scheduled_plan.assignment
            better = found.scheduled_plan.seconds < reached
            plans.insert(0 if better else len(plans), merging.assignment(plan))
            best, reached = (found, found.scheduled_plan.seconds) if better else (best, reached)
        if interrupted := found.interrupted:
            break
    return plans, best, interrupted
