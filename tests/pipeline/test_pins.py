"""Pins in pipelines: each holds in the stage that has what it names, and equal stages that differ in one do not share a plan."""

from __future__ import annotations

import pytest

from autopar.check.pipelines import check_pipeline
from autopar.errors import UsageError
from autopar.pipeline.crossing import stage_pins
from autopar.pipeline.cutting import cut_graph
from autopar.pipeline.equal_stages import structure_of
from autopar.pipeline.planning import plan_pipeline
from autopar.pipeline.request import PipelineRequest
from autopar.recording.pipelines import record_pipeline
from tests.pipeline.models import capture, machine

CUT = ("layers.1", "layers.2", "layers.3")
WEIGHT = "layers.2.attn.wq.weight"


def test_a_pin_on_a_weight_goes_to_the_stage_that_holds_it() -> None:
    _, _, graph = capture("llama", 4)
    asked = PipelineRequest(machine("pp=4,dp=2,tp=2", stress=True), 1 << 40, cut=CUT, effort="low", pins={WEIGHT: "S(tp) R"})
    plan = record_pipeline(graph, asked, plan_pipeline(graph, asked), target="pinned", pins=asked.pins, solve_seconds=0.0)
    held = [stage.plan.parameters.get(WEIGHT) for stage in plan.stages]
    assert [row is None for row in held] == [True, True, False, True]
    assert held[2] is not None and held[2].spec == "S1 R"
    assert plan.pins == {WEIGHT: "S(tp) R"} and not check_pipeline(plan, graph)


def test_globs_and_modules_are_those_of_the_whole_model() -> None:
    _, _, graph = capture("llama", 4)
    stages, mesh = cut_graph(graph, CUT), machine("dp=2,tp=2").mesh
    every = [stage_pins(stage, graph, mesh, {"layers.*.attn.wq.weight": "S0 R", "module:layers.2": "R R R"}) for stage in stages.graphs]
    assert [sum(name.endswith("wq.weight") for name in one) for one in every] == [1, 1, 1, 1]
    assert [any(name.startswith("op:") for name in one) for one in every] == [False, False, True, False]


def test_equal_stages_with_other_pins_have_other_structures() -> None:
    _, _, graph = capture("llama", 4)
    stages, mesh = cut_graph(graph, CUT), machine("dp=2,tp=2").mesh
    for pins in ({WEIGHT: "S0 R"}, {"module:layers.2": "R R R"}):
        first, second = (structure_of(one, stage_pins(one, graph, mesh, pins)) for one in stages.graphs[1:3])
        assert first != second
    assert structure_of(stages.graphs[1], {}) == structure_of(stages.graphs[2], {})


def test_a_pin_that_names_nothing_is_refused() -> None:
    _, _, graph = capture("llama", 4)
    with pytest.raises(UsageError, match="names no parameter"):
        plan_pipeline(graph, PipelineRequest(machine("pp=2,dp=2"), 1 << 40, effort="low", pins={"nothing.weight": "R R"}))
