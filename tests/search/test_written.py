"""Plans written by hand, as searches schedule them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from autopar.schedule import Assignment
from autopar.schedule.scheduled_plan import ScheduledPlan
from autopar.search.baselines.scheduled import ScheduledBaselines
from autopar.search.choices.pins import Pins
from autopar.search.choices.space import Space
from autopar.search.driver import find_plan as finding
from autopar.search.driver import phase_table as rounds
from autopar.search.driver.phase_table import Search
from autopar.search.folding.tied_model import TiedModel, tie_model
from autopar.search.ilp.build import build_model
from autopar.search.ilp.model import Model
from tests.search.requests import asked as request
from tests.search.test_folding import EXTRAPOLATED, folding, graph, machine

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
    whole = finding.find_plan(graph(), machine(), skip={"folding"})
    assert {name: (one.seconds, one.memory.peak) for name, one in found.baselines.items()} == {
        name: (one.seconds, one.memory.peak) for name, one in whole.baselines.items()
    }
    assert found.searched_assignment is not None and len(found.searched_assignment.strategies) == len(graph().ops)


class CountingSearch(Search):
    """Counts the schedules at full depth."""

    count = 0

    def schedule_at_full_depth(self, found: ScheduledPlan) -> ScheduledPlan:
        self.count += 1
        return super().schedule_at_full_depth(found)


@pytest.mark.parametrize("better", [True, False])
def test_baselines_are_scheduled_at_full_depth_only_if_they_may_be_the_best(better: bool) -> None:
    """Until then extrapolation is enough, and of baselines that trail it stays so."""
    model = tie_model(build_model(Space(folding().graph, machine("dp=4"), "adamw", Pins())), folding(), EXTRAPOLATED)
    assert model is not None
    search = CountingSearch(model, request(2**36, work=60.0, gap=0.0, baselines=True), False)
    plans = ScheduledBaselines()
    plans.schedule(search, model.space, Pins(), may_recompute=False)
    first = search.best
    assert first is not None and first.estimated and not search.count
    search.incumbent.plan = replace(first, seconds=first.seconds / 2) if better else first
    plans.schedule_at_full_depth(search)
    assert bool(search.count) is not better
    assert any(not plan.estimated for plan in plans.rivals.values()) is not better
