"""Plans written by hand, as searches schedule them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from autopar.schedule import Assignment
from autopar.search import finding, rounds, written
from autopar.search.folded import FoldedModel
from autopar.search.model import Model
from autopar.search.pins import Pins
from autopar.search.space import Space
from tests.search.test_folding import graph, machine

Assignments = tuple[dict[str, Assignment], dict[str, str]]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Model]:
    """The models for which plans were written."""
    found: list[Model] = []
    before = written._assignments

    def noted(model: Model, space: Space, pins: Pins) -> Assignments:
        found.append(model)
        return before(model, space, pins)

    monkeypatch.setattr(written, "_assignments", noted)
    return found


def test_a_search_left_for_the_whole_graph_hands_over_what_it_scheduled(asked: list[Model], monkeypatch: pytest.MonkeyPatch) -> None:
    """They are the same plans, with the same schedules."""
    searched: list[Model] = []

    def left(search: rounds.Search, begin: Callable[[], None]) -> bool:
        begin()
        searched.append(search.model)
        return not search.folded

    monkeypatch.setattr(rounds.Search, "run", left)
    found = finding.find_plan(graph(), machine())
    assert [type(model) for model in searched] == [FoldedModel, Model]
    assert [type(model) for model in asked] == [FoldedModel]
    monkeypatch.setattr(finding, "fold", lambda graph: None)
    whole = finding.find_plan(graph(), machine())
    assert {name: (one.seconds, one.memory.peak) for name, one in found.baselines.items()} == {
        name: (one.seconds, one.memory.peak) for name, one in whole.baselines.items()
    }
    assert found.plan is not None and len(found.plan.strategies) == len(graph().ops)
