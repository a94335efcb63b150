"""Steps of pipelines on simulated ranks, in float64, against one device."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.cost_models import Machine, Mesh
from autopar.errors import MismatchError
from autopar.options import resolve_hardware
from autopar.pipeline import Action, Stages, cut_graph
from autopar.pipeline.crossing import crossing_specs
from autopar.pipeline.planning import plan_pipeline
from autopar.pipeline.request import PipelineRequest
from autopar.pipeline.timetable import LETTERS, Part, problems_of, read_order, write_order
from autopar.runtime.pipelines.step import simulate_pipeline
from autopar.search import find_plan
from tests.pipeline.models import capture, machine, run_on_one, values_of


def gpipe(stages: int, microbatches: int) -> list[Action]:
    """All of forward, then all of backward."""
    return [
        *(Action(stage, "forward", number) for number in range(microbatches) for stage in range(stages)),
        *(Action(stage, "backward", number) for number in range(microbatches) for stage in reversed(range(stages))),
    ]


BEFORE: dict[str, Part] = {"backward": "forward", "weights": "backward"}
"""The part of a stage that must be over before another."""


def random_order(stages: Stages, microbatches: int, seed: int, *, split: bool = False) -> list[Action]:
    """A legal total order, drawn; ``split``: with gradients of weights apart."""
    random_, order = random.Random(seed), list[Action]()
    parts = [part for part in LETTERS if split or part != "weights"]
    left: dict[tuple[int, str], int] = {(stage, part): 0 for stage in range(len(stages.graphs)) for part in parts}
    while any(number < microbatches for number in left.values()):
        able = []
        for stage in range(len(stages.graphs)):
            for part in parts:
                number = left[stage, part]
                made = all(left[one.source, one.half] > number for one in stages.received(stage, part))
                if number < microbatches and made and (part == "forward" or left[stage, BEFORE[part]] > number):
                    able.append(Action(stage, part, number))
        order.append(random_.choice(able))
        left[order[-1].stage, order[-1].part] += 1
    return order


MESHES = {
    "gpt tied": "pp=4,dp=2", "gpt untied": "pp=2,dp=1,tp=2", "llama": "pp=2,dp=2", "moe": "pp=2,tp=2",
    "encoder-decoder": "pp=2,dp=2,tp=2", "masked": "pp=4,dp=2",
    "drawn": "pp=4,dp=2", "relative bias": "pp=2,dp=2",
}  # fmt: skip


@pytest.mark.parametrize(("name", "mesh"), MESHES.items())
def test_outputs_and_gradients_are_those_of_one_device(name: str, mesh: str) -> None:
    """With prices at which every split pays."""
    model, args, graph = capture(name, 4)
    values = values_of(graph, model, args)
    made = plan_pipeline(graph, PipelineRequest(machine(mesh, stress=True), 1 << 40, effort="low"))
    assert len(made.schedules) == made.stages.boundaries[-1].source + 1
    order, wanteds = list(made.order), run_on_one(graph, values)
    assert not list(problems_of(order, made.stages, 4))
    assert 0 < made.bound_seconds <= made.times.step
    for one in (order, gpipe(len(made.schedules), 4), random_order(made.stages, 4, 1)):
        found = simulate_pipeline(made.stages, made.schedules, one, values).outputs
        for key, wanted in wanteds.items():
            if key[1] != "microbatch.divisor":
                torch.testing.assert_close(found[key], wanted, rtol=1e-9, atol=1e-11)
    model(*args).backward()
    for parameter_name, parameter in model.named_parameters():
        torch.testing.assert_close(found["gradient", parameter_name], parameter.grad, rtol=1e-8, atol=1e-10)


class Denoising(nn.Module):
    """The layers pass on the noise that the loss is compared with, which is then nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.up, self.down = nn.Linear(256, 256), nn.Linear(256, 256), nn.Linear(256, 4096), nn.Linear(4096, 256)

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.randn_like(x)
        h = x + noise
        h = h + 0 * self.second(self.first(h))
        h = h + 0 * self.down(self.up(h).relu())
        return ((h - x - noise) ** 2).mean()


def test_stages_in_other_layouts_read_one_draw() -> None:
    model, x = Denoising().double(), torch.randn(64, 256).double()
    graph = autopar.capture(model, (x,), microbatches=4)
    where = Machine(Mesh.parse("pp=2,dp=2"), resolve_hardware("cpu-cluster"))
    pins = {**dict.fromkeys(("first.weight", "second.weight", "up.weight", "down.weight"), "R R"), "op:relu": "S0 R"}
    made = plan_pipeline(graph, PipelineRequest(where, 1 << 40, effort="low", cut=("up",), pins=pins))
    found = simulate_pipeline(made.stages, made.schedules, made.order, values_of(graph, model, (x,))).outputs
    assert found["output", "loss"].item() < 1e-20


@pytest.mark.parametrize("name", ["llama", "masked"])
def test_a_pipeline_on_one_rank_a_stage_is_the_plan_without_it_bit_by_bit(name: str) -> None:
    model, args, graph = capture(name, 4)
    values = values_of(graph, model, args)
    made = plan_pipeline(graph, PipelineRequest(machine("pp=2"), 1 << 40))
    found = simulate_pipeline(made.stages, made.schedules, made.order, values).outputs
    for key, wanted in run_on_one(graph, values).items():
        assert key[1] == "microbatch.divisor" or torch.equal(found[key], wanted), key


@pytest.mark.parametrize("microbatches", [1, 2])
def test_microbatches_fewer_than_stages(microbatches: int) -> None:
    model, args, graph = capture("llama", microbatches)
    values = values_of(graph, model, args)
    made = plan_pipeline(graph, PipelineRequest(machine("pp=4"), 1 << 40))
    found = simulate_pipeline(made.stages, made.schedules, made.order, values).outputs
    for key, wanted in run_on_one(graph, values).items():
        assert key[1] == "microbatch.divisor" or torch.equal(found[key], wanted), key


@pytest.mark.parametrize("split", [False, True])
def test_mutated_timetables_are_illegal(split: bool) -> None:
    """An action is dropped, stands twice, or is moved before one that it needs."""
    _, _, graph = capture("encoder-decoder", 4)
    stages = cut_graph(graph, ("encoder.1", "decoder.1"))
    random_ = random.Random(0)
    for seed in range(100):
        order = random_order(stages, 4, seed, split=split)
        assert not list(problems_of(order, stages, 4))
        at = random_.randrange(len(order))
        action = order.pop(at)
        assert list(problems_of(order, stages, 4))
        needed = [Action(one.source, one.half, action.microbatch) for one in stages.received(action.stage, action.part)]
        needed += [action._replace(part=BEFORE[action.part])] if action.part in BEFORE else []
        if needed:
            order.insert(min(map(order.index, needed)), action)
            assert list(problems_of(order, stages, 4))


def test_orders_of_the_stages_make_one_total_order() -> None:
    _, _, graph = capture("llama", 4)
    stages = cut_graph(graph, ("layers.1", "layers.2"))
    for seed in range(20):
        lines = [write_order(random_order(stages, 4, seed, split=seed % 2 == 1), stage) for stage in range(3)]
        merged = read_order(lines)
        assert [write_order(merged, stage) for stage in range(3)] == lines
        assert not list(problems_of(merged, stages, 4))
    with pytest.raises(MismatchError, match="stage 0 waits for ever before B0"):
        read_order(["B0 F0", "F0 B0"])


def test_values_cross_in_a_layout_of_the_whole_plan() -> None:
    _, _, graph = capture("llama", 4)
    stages = cut_graph(graph, ("layers.2",))
    whole = find_plan(graph, machine("dp=2,tp=2", stress=True), baselines=False).schedule
    specs = crossing_specs(stages, graph, whole.machine.mesh.sizes, {name: one.strategy for name, one in whole.operations.items()})
    assert set(specs) == {one.tensor for one in stages.boundaries}
    assert all(not spec.partial and spec.is_even(graph.tensors[name].shape, (2, 2)) for name, spec in specs.items())
    assert any(not spec.is_replicated for spec in specs.values())


def test_a_stage_may_begin_within_a_layer() -> None:
    model, args, graph = capture("gpt untied", 4)
    values = values_of(graph, model, args)
    made = plan_pipeline(graph, PipelineRequest(machine("pp=2"), 1 << 40, cut=("layers.2.up",), effort="low"))
    found = simulate_pipeline(made.stages, made.schedules, made.order, values).outputs
    for key, wanted in run_on_one(graph, values).items():
        assert key[1] == "microbatch.divisor" or torch.equal(found[key], wanted), key
