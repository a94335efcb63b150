"""The same inputs, seed and effort give the same plan, and the record of its search says how it was found."""

from __future__ import annotations

import json
from typing import Any

import pytest

import autopar
from tests.graphs import two_layers


def without_times(plan: autopar.Plan) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(plan.to_json())
    del data["objective"]["solve_seconds"]
    for phase in data["search"]["phases"]:
        del phase["cpu_seconds"]
    return data


@pytest.mark.parametrize("options", [{"mesh": "dp=2,tp=2"}, {"devices": 4}, {"mesh": "dp=2,tp=2", "effort": "low"}], ids=str)
def test_the_same_options_give_the_same_plan_and_work(options: Any) -> None:
    first, second = (autopar.plan(two_layers(), hardware="h100-sxm", time_limit=600.0, **options) for _ in range(2))
    assert without_times(first) == without_times(second)
    assert first.search is not None and not first.search.cut and first.search.effort == options.get("effort", "normal")
    assert first.search.found_by in {phase.name for phase in first.search.phases}


def test_a_plan_says_that_the_limit_cut_its_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autopar.effort.Meter.expired", property(lambda meter: setattr(meter, "cut", meter.has_plan) or meter.cut))
    plan = autopar.plan(two_layers(), mesh="dp=2,tp=2", hardware="h100-sxm", time_limit=600.0)
    assert plan.search is not None and plan.search.cut
    assert "the time limit cut it" in str(plan)
