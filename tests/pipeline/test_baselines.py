"""Pipelines by hand: the cut and the order that people write, steps of one device, and a plan that is never behind one."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from autopar.check.pipelines import check_pipeline
from autopar.graph import Graph
from autopar.pipeline import planning
from autopar.pipeline.baselines import PipelineBaseline, PipelineBaselines, count_evenly
from autopar.pipeline.planning import plan_pipeline
from autopar.pipeline.request import PipelineRequest
from autopar.pipeline.timetable import problems_of
from autopar.pipeline_plan import PipelinePlan
from autopar.recording.pipelines import record_pipeline
from autopar.report import pipeline_summary
from autopar.runtime.pipelines.step import simulate_pipeline
from autopar.schedule.legality import check_legal
from tests.pipeline.models import capture, machine, run_on_one, values_of

PLENTY = 1 << 40


def by_hand(graph: Graph, mesh: str, limit: int = PLENTY, **asked: Any) -> PipelineBaselines:
    return PipelineBaselines(graph, PipelineRequest(machine(mesh, stress=True), limit, **asked))


@pytest.mark.parametrize(("stages", "cut"), [(2, ("layers.2",)), (3, ("layers.1", "layers.3")), (4, ("layers.1", "layers.3", "layers.4"))])
def test_the_embedding_and_the_head_count_as_a_layer_each(stages: int, cut: tuple[str, ...]) -> None:
    """Four layers are six: three and three; two each; two, two, one and one, which leaves the last stage the head alone."""
    _, _, graph = capture("llama", 4)
    assert count_evenly(graph, stages) == (cut if stages < 4 else None)


@pytest.mark.parametrize(("name", "mesh"), [("gpt tied", "pp=2,dp=2,tp=2"), ("llama", "pp=3,dp=2,tp=2"), ("moe", "pp=2,tp=2")])
def test_steps_by_hand_are_those_of_one_device(name: str, mesh: str) -> None:
    model, args, graph = capture(name, 4)
    values = values_of(graph, model, args)
    found = by_hand(graph, mesh).find()
    axes = mesh.count("=") - 1
    assert set(found) == {"ddp", "fsdp", "megatron", "megatron_sp", *(("torchtitan",) if axes > 1 else ())}
    wanteds = run_on_one(graph, values)
    for label, made in found.items():
        assert not list(problems_of(made.order, made.stages, 4)) and made.fits
        for schedule in made.schedules:
            check_legal(schedule, label)
        outputs = simulate_pipeline(made.stages, made.schedules, made.order, values).outputs
        for key, wanted in wanteds.items():
            if key[1] != "microbatch.divisor":
                torch.testing.assert_close(outputs[key], wanted, rtol=1e-9, atol=1e-11, msg=f"{label}: {key}")


def test_parameters_by_hand_lie_as_their_authors_say() -> None:
    _, _, graph = capture("llama", 4)
    found = by_hand(graph, "pp=2,dp=2,tp=2").find()

    def specs(name: str) -> set[str]:
        schedule = found[name].schedules[0]
        weights = [item.tensor for item in schedule.graph.of_kind("parameter") if len(schedule.graph.tensors[item.tensor].shape) == 2]
        return {str(schedule.specs[weight]) for weight in weights}

    assert specs("ddp") == {"R R"} and specs("fsdp") <= {"S10 R", "R S10"}
    assert {"S1 R", "R S1"} <= specs("megatron")
    assert {"S10 R", "S0 S1"} <= specs("torchtitan"), "split over tp as megatron's, and over dp beside"
    kept = {name: found[name].plans[0].memory.resting for name in ("ddp", "fsdp", "megatron", "torchtitan")}
    assert kept["fsdp"] < kept["ddp"] and kept["torchtitan"] < kept["megatron"]


def test_where_memory_is_short_all_stages_recompute() -> None:
    _, _, graph = capture("llama", 4)
    free = by_hand(graph, "pp=2,dp=2").find()
    limit = max(free["ddp"].peaks) - 1
    found = by_hand(graph, "pp=2,dp=2", limit).find()
    assert not found["ddp"].fits and "ddp+selective" in found
    last = found.get("ddp+full", found["ddp+selective"])
    assert max(last.peaks) < max(found["ddp"].peaks)
    assert "ddp+selective" not in by_hand(graph, "pp=2,dp=2", limit, recompute=False).find()


def test_nothing_is_written_when_time_is_over() -> None:
    _, _, graph = capture("llama", 4)
    assert by_hand(graph, "pp=2,dp=2", deadline=-math.inf).find() == {}


def test_what_a_pin_lays_otherwise_is_resharded() -> None:
    model, args, graph = capture("llama", 4)
    values = values_of(graph, model, args)
    found, wanteds = by_hand(graph, "pp=2,dp=2,tp=2", pins={"head.weight": "S0 R"}).find(), run_on_one(graph, values)
    assert {"ddp", "torchtitan"} <= set(found)
    for label in ("ddp", "torchtitan"):
        made = found[label]
        assert str(made.schedules[-1].specs["head.weight"]) == "S0 R", label
        outputs = simulate_pipeline(made.stages, made.schedules, made.order, values).outputs
        for key, wanted in wanteds.items():
            if key[1] != "microbatch.divisor":
                torch.testing.assert_close(outputs[key], wanted, rtol=1e-9, atol=1e-11, msg=f"{label}: {key}")


@pytest.mark.parametrize("cut", [None, ("layers.1",)])
def test_a_plan_is_never_behind_one_by_hand(cut: tuple[str, ...] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the search's own plan is slower, the one by hand is the plan, unless another cut was asked for."""
    _, _, graph = capture("llama", 4)
    find = PipelineBaselines.find

    def faster(self: PipelineBaselines) -> dict[str, PipelineBaseline]:
        found = find(self)
        return {name: replace(one, times=replace(one.times, step=1e-12)) if name == "ddp" else one for name, one in found.items()}

    monkeypatch.setattr(planning.PipelineBaselines, "find", faster)
    asked = PipelineRequest(machine("pp=2,dp=2", stress=True), PLENTY, effort="low", cut=cut)
    found = plan_pipeline(graph, asked)
    assert (found.times.step == 1e-12) is (cut is None)
    plan = record_pipeline(graph, asked, found, target="by hand", pins={}, solve_seconds=0.0)
    assert {item.where for item in check_pipeline(plan, graph)} <= {"objective.seconds", "objective.bound_seconds", "baselines.ddp"}


def test_pipelines_by_hand_stand_in_the_plan_and_in_its_table() -> None:
    _, _, graph = capture("llama", 4)
    asked = PipelineRequest(machine("pp=2,dp=2", stress=True), PLENTY, effort="low")
    found = plan_pipeline(graph, asked)
    plan = record_pipeline(graph, asked, found, target="by hand", pins={}, solve_seconds=0.0)
    assert PipelinePlan.from_json(plan.to_json()) == plan and not check_pipeline(plan, graph)
    assert set(plan.baselines) == {"ddp", "fsdp", "megatron", "megatron_sp"}
    assert all(row.objective_seconds >= plan.objective.seconds for row in plan.baselines.values() if row.objective_seconds)
    shown = pipeline_summary(plan)
    assert "megatron_sp" in shown and f"{plan.baselines['ddp'].objective_seconds / plan.objective.seconds:.2f}x" in shown
    wrong = plan.model_copy(update={"baselines": {"ddp": plan.baselines["ddp"].model_copy(update={"feasible": False})}})
    assert [item.where for item in check_pipeline(wrong)] == ["baselines.ddp"]
