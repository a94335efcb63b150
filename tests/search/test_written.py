"""Plans written by hand, as searches schedule them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from autopar.schedule import Assignment
from autopar.schedule.tuning import ScheduledPlan
from autopar.search.baselines.scheduled import ScheduledBaselines
from autopar.search.choices.pins import Pins
from autopar.search.choices.space import Space
from autopar.search.driver import find_plan as finding
from autopar.search.driver import phase_table as rounds
from autopar.search.driver.state import SearchState
from autopar.search.folding import tied_model as folded
from autopar.search.folding.tied_model import TiedModel
from autopar.search.ilp.build import build_model
from autopar.search.ilp.model import Model
from autopar.search.settings import FEWEST_REPEATS
from tests.search.requests import asked as request
from tests.search.test_folding import folding, graph, machine

Assignments = tuple[dict[str, Assignment], dict[str, str]]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Model]:
    """The models for which plans were written."""
    found: list[Model] = []
    before = ScheduledBaselines._assignments

    def noted(self: ScheduledBaselines, model: Model, space: Space, pins: Pins) -> Assignments:
        found.append(model)
        return before(self, model, space, pins)

    monkeypatch.setattr(ScheduledBaselines, "_assignments", noted)
    return found


def test_a_search_left_for_the_whole_graph_hands_over_what_it_scheduled(asked: list[Model], monkeypatch: pytest.MonkeyPatch) -> None:
    """They are the same plans, with the same schedules."""
    searched: list[Model] = []

    def left(search: rounds.Search, begin: Callable[[], None]) -> bool:
        begin()
        searched.append(search.model)
        return not search.is_folded

    monkeypatch.setattr(rounds.Search, "run", left)
    found = finding.find_plan(graph(), machine())
    assert [type(model) for model in searched] == [TiedModel, Model]
    assert [type(model) for model in asked] == [TiedModel]
    monkeypatch.setattr(finding, "fold_layers", lambda graph: None)
    whole = finding.find_plan(graph(), machine())
    assert {name: (one.seconds, one.memory.peak) for name, one in found.baselines.items()} == {
        name: (one.seconds, one.memory.peak) for name, one in whole.baselines.items()
    }
    assert found.searched_assignment is not None and len(found.searched_assignment.strategies) == len(graph().ops)


@pytest.mark.parametrize("better", [True, False])
def test_a_plan_is_scheduled_at_full_depth_only_where_it_may_be_the_best(better: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until then what shorter graphs tell is enough of plans written by hand, and of those that trail for good."""
    exact: list[ScheduledPlan] = []
    before = SearchState.schedule_at_full_depth

    def noted(search: SearchState, plan: ScheduledPlan) -> ScheduledPlan:
        exact.append(plan)
        return before(search, plan)

    monkeypatch.setattr(rounds.Search, "schedule_at_full_depth", noted)
    monkeypatch.setattr(folded, "SHORT_DEPTHS", (5, 6))
    monkeypatch.setattr(folded, "DEEP_LAYERS", FEWEST_REPEATS + 1)
    model = folded.tie_model(build_model(Space(folding().graph, machine("dp=4"), "adamw", Pins())), folding())
    assert model is not None
    search = rounds.Search(model, request(2**36, work=60.0, gap=0.0, baselines=True), False)
    plans = ScheduledBaselines()
    plans.schedule(search, model.space, Pins(), may_recompute=False)
    first = search.best
    assert first is not None and first.estimated and not exact
    search.best = replace(first, seconds=first.seconds / 2) if better else first
    plans.schedule_at_full_depth(search)
    assert bool(exact) is not better
    assert any(not plan.estimated for plan in plans.rivals.values()) is not better
