"""The last microbatch: what it sends does not wait for what a step does once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.check.pipelines import check_pipeline
from autopar.pipeline import Boundary
from autopar.pipeline.clock import recorded_costs, time_pipeline
from autopar.pipeline.planning import plan_pipeline
from autopar.pipeline.request import PipelineRequest
from autopar.pipeline.result import PipelineResult
from autopar.pipeline.timetable import Action
from autopar.pipeline_plan import PipelinePlan
from autopar.recording.pipelines import record_pipeline
from autopar.runtime.pipelines import step
from autopar.runtime.pipelines.step import simulate_pipeline
from autopar.runtime.ranks.collectives import Observed
from autopar.schedule.splitting import defer_once, find_once_part
from tests.pipeline.models import capture, machine, values_of


@pytest.fixture(scope="module")
def found() -> tuple[PipelineRequest, PipelineResult]:
    """Of three stages whose gradients are reduced over ``dp``, once a step."""
    pins = {"input:x": "S0 R R", "layers.*.weight": "R R", "layers.*.bias": "R", "head.weight": "R R", "head.bias": "R"}
    asked = PipelineRequest(machine("pp=3,dp=2", stress=True), 1 << 40, effort="low", order="whole", pins=pins)
    return asked, plan_pipeline(capture("masked", 4)[2], asked)


def _file(found: tuple[PipelineRequest, PipelineResult]) -> PipelinePlan:
    plan = record_pipeline(capture("masked", 4)[2], *found, target="last", pins={}, solve_seconds=0.0)
    return PipelinePlan.from_json(plan.to_json())


def test_reductions_stand_behind_what_is_sent(found: tuple[PipelineRequest, PipelineResult]) -> None:
    made = found[1]
    assert find_once_part(made.schedules[1]) < len(made.schedules[1].instructions)
    assert [cost.last_sent < cost.last_backward for cost in made.costs] == [False, True, True]
    assert all(cost.last_sent == cost.backward for cost in made.costs[1:])
    assert defer_once(made.schedules[0]) is made.schedules[0], "the first stage sends nothing"


def test_the_stage_before_begins_earlier(found: tuple[PipelineRequest, PipelineResult]) -> None:
    made = found[1]
    waiting = [replace(cost, last_sent=cost.last_backward) for cost in made.costs]
    later = time_pipeline(made.stages, waiting, made.order, made.transfer_seconds)
    last = made.order.index(Action(0, "backward", 3))
    once = sum(cost.last_backward - cost.last_sent for cost in made.costs)
    assert later.begins[last] - made.times.begins[last] == pytest.approx(once) and later.step > made.times.step
    assert later.busy == made.times.busy and later.peaks == made.times.peaks


def test_the_file_says_when_it_is_sent(found: tuple[PipelineRequest, PipelineResult]) -> None:
    plan = _file(found)
    assert not check_pipeline(plan)
    assert recorded_costs(plan) == list(found[1].costs)
    for stage in (1, 2):
        rows = [row.model_copy(update={"last_sent_seconds": None}) if n == stage else row for n, row in enumerate(plan.stages)]
        wrong = {item.where for item in check_pipeline(plan.model_copy(update={"stages": tuple(rows)}))}
        assert wrong == {f"stages[{stage}].last_sent_seconds", "objective.seconds"}


def test_it_is_sent_before_gradients_are_reduced(
    found: tuple[PipelineRequest, PipelineResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each stage the collectives that have run when a gradient is sent: in the last microbatch as many as in each before it."""
    model, args, graph = capture("masked", 4)
    made, counts = found[1], dict[tuple[int, int], int]()
    runs: list[tuple[int, list[Observed]]] = []
    start, send = step.StageRun.__init__, step.InProcessMail.send

    def noted(self: step.StageRun, *rest: object, **named: object) -> None:
        start(self, *rest, **named)  # type: ignore[arg-type]
        observed = named["observed"]
        assert isinstance(observed, list)
        runs.append((self.stage, observed))

    def counted(self: step.InProcessMail, boundary: Boundary, microbatch: int, parts: object) -> None:
        if boundary.half == "backward":
            (observed,) = [one for stage, one in runs if stage == boundary.source]
            counts[boundary.source, microbatch] = sum(one.phase == "backward" for one in observed)
        send(self, boundary, microbatch, parts)  # type: ignore[arg-type]

    monkeypatch.setattr(step.StageRun, "__init__", noted)
    monkeypatch.setattr(step.InProcessMail, "send", counted)
    simulate_pipeline(made.stages, made.schedules, made.order, values_of(graph, model, args))
    for stage in (1, 2):
        assert counts[stage, 3] - counts[stage, 2] == counts[stage, 1] - counts[stage, 0]
        (observed,) = [one for number, one in runs if number == stage]
        assert sum(one.phase == "backward" for one in observed) > counts[stage, 3], "nothing is reduced behind what is sent"
