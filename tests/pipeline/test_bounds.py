"""Bounds of pipelines: what each unit takes at least, wherever the model is cut."""

from __future__ import annotations

import itertools
import random
from functools import cache

import pytest

import autopar
from autopar import zoo
from autopar.graph import Graph
from autopar.pipeline import cut_graph
from autopar.pipeline.cutting import find_units, place_finely
from autopar.pipeline.layer_tables import least_modes, measure_layers
from autopar.pipeline.planning import plan_pipeline
from autopar.pipeline.request import PipelineRequest
from autopar.pipeline_plan import OrderName
from autopar.search import find_plan
from autopar.search.choices.pins import Pins
from autopar.search.choices.space import CONTRACTION, Space
from tests.pipeline.models import capture, machine

MODELS = ("gpt tied", "gpt untied", "llama", "moe", "encoder-decoder", "masked", "drawn", "relative bias")


@cache
def graph_of(model: str) -> Graph:
    return capture(model, 4)[2]


def least_of(graph: Graph, mesh: str) -> dict[str, float]:
    """Seconds of each operator in its fastest strategy."""
    space = Space(graph, machine(mesh, stress=True), "adamw", Pins())
    return {op.name: float(space.op_choices(op).seconds.min()) for op in graph.ops}


@pytest.mark.parametrize("model", MODELS)
def test_an_operator_is_in_the_stage_of_its_unit_in_every_cut(model: str) -> None:
    graph, chance = graph_of(model), random.Random(model)
    units, seconds = list(find_units(graph)), dict.fromkeys((op.name for op in graph.ops), 1.0)
    modes, placed = least_modes(graph, seconds), place_finely(graph)
    assert sum(mode.forward + mode.backward for mode in modes) > 0.5 * len(placed), "most operators are counted"
    for _ in range(8):
        cut = sorted(chance.sample(range(1, len(units)), chance.randint(1, min(3, len(units) - 1))))
        stages = cut_graph(graph, [units[begin] for begin in cut])
        for begin, end, stage in zip((0, *cut), (*cut, len(units)), stages.graphs, strict=True):
            mine = [sum(op.phase == phase for op in stage.ops) for phase in ("forward", "backward")]
            assert sum(mode.forward for mode in modes[begin:end]) <= mine[0]
            assert sum(mode.backward for mode in modes[begin:end]) <= mine[1]


def test_under_autocast_each_layer_has_its_backward_and_its_parameters() -> None:
    """The conversions of all parameters stand before the first layer. They are in the layers that read them."""
    target = zoo.build("gpt2", layers=4, batch=8, seq=8, width=16, heads=2, vocab=32)
    graph = autopar.capture(target.model, target.args, loss_args=target.loss_args, microbatches=4, compute_dtype="bfloat16")
    units = list(find_units(graph))
    layers = [number for number, name in enumerate(units) if name.startswith("layers.")]
    modes = least_modes(graph, dict.fromkeys((op.name for op in graph.ops), 1.0))
    assert len({modes[layer] for layer in layers[:-1]}) == 1 and all(modes[layer].backward > modes[layer].forward for layer in layers)
    found = find_plan(graph, machine("dp=2", stress=True), effort="low", baselines=False)
    tables = measure_layers(found.schedule, "adamw")
    rest = [tables.modes[layer][0].rest for layer in layers]
    assert min(rest) > 0.5 * max(rest), "parameters, gradients and states of equal layers"


def test_an_operator_is_not_counted_before_its_strategies_are_known() -> None:
    graph = graph_of("llama")
    space = Space(graph, machine("dp=2", stress=True), "adamw", Pins())
    op = next(op for op in graph.ops if op.target == CONTRACTION)
    assert space.least_seconds(op, graph) == 0
    assert space.op_choices(op).seconds.min() == space.least_seconds(op, graph) > 0


@pytest.mark.parametrize(
    ("model", "order", "chunks"),
    [
        ("gpt tied", "zero-bubble", 1), ("llama", "whole", 1), ("moe", "zero-bubble", 1), ("encoder-decoder", "whole", 1),
        ("gpt tied", "interleaved", 2),
    ],
)  # fmt: skip
def test_stages_take_what_their_units_take_at_least(model: str, order: OrderName, chunks: int) -> None:
    graph = graph_of(model)
    asked = PipelineRequest(machine("pp=2,dp=2", stress=True), 1 << 40, order=order, chunks=chunks, effort="low")
    made, units = plan_pipeline(graph, asked), list(find_units(graph))
    modes = least_modes(graph, least_of(graph, "dp=2"))
    starts = [0, *(units.index(name) for name in made.cut), len(units)]
    for (begin, end), cost in zip(itertools.pairwise(starts), made.costs, strict=True):
        assert sum(mode.forward for mode in modes[begin:end]) <= cost.forward * (1 + 1e-9)
        assert sum(mode.backward for mode in modes[begin:end]) <= (cost.backward + cost.weights) * (1 + 1e-9)
    assert 0 < made.bound_seconds <= made.times.step
