"""The integer problem against the program it stands for."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from autopar import zoo
from autopar.graph import DTYPE_BYTES, Graph
from autopar.importer import capture_graph
from autopar.program import OUTPUT, Assignment, Layout, build_program
from autopar.reshard import find_reshard
from autopar.search import find_plan, total_seconds
from autopar.search.extract import extract
from autopar.search.model import build_model
from autopar.search.pins import Pins
from autopar.search.space import Space
from autopar.sharding import ShardingSpec, splits
from cost_models import Machine, Mesh, load_hardware
from solvers import INFINITE, Problem, evaluate, solve

MODELS = {
    "mlp": {"mode": "train"},
    "gpt2": {"mode": "train", "layers": 1},
    "moe": {"mode": "inference", "layers": 1},
}


def graph_of(name: str) -> Graph:
    keys = dict(MODELS[name])
    mode = keys.pop("mode")
    target = zoo.build(name, mode=mode, **keys)
    return capture_graph(target.model, target.args, target.kwargs, mode=mode, loss=target.loss, loss_args=target.loss_args)


def machine_of(mesh: str) -> Machine:
    return Machine(Mesh.parse(mesh), load_hardware("h100-sxm"), "roofline")


@pytest.mark.parametrize("mesh", ["x=2", "x=2,y=2"])
@pytest.mark.parametrize("name", MODELS)
def test_price_of_choices_is_price_of_program(name: str, mesh: str) -> None:
    """Any finite choices: the problem's cost is the program's seconds, and its peak is never above the program's."""
    torch.manual_seed(0)
    graph, machine = graph_of(name), machine_of(mesh)
    model = build_model(Space(graph, machine, "adamw" if graph.mode == "train" else "none", Pins()))
    problem, unit = model.problem(None)
    rng = np.random.default_rng(0)
    for _ in range(3):
        noise = rng.integers(0, 2**40, len(problem.costs))
        costs = np.split(np.where(problem.costs >= INFINITE, problem.costs, noise), problem.node_ptr[1:-1])
        tables = [(u, v, np.where(np.isfinite(t), rng.integers(0, 2**36, t.shape), INFINITE)) for u, v, t in model.edges]
        choices = solve(Problem.build(costs, tables), time_limit=5.0, gap=0.5).choices
        assert choices is not None
        cost, peak, feasible = evaluate(problem, choices)
        assert feasible
        program = build_program(graph, extract(model, choices), machine)
        assert cost * unit == pytest.approx(total_seconds(program, model.space.optimizer), rel=1e-6)
        memory = program.memory(model.space.optimizer).peak
        assert peak <= memory


def random_assignment(graph: Graph, machine: Machine, seed: int) -> Assignment:
    """Any legal strategy for each operator; every read that needs it reshards for itself."""
    rng = random.Random(seed)
    space = Space(graph, machine, "adamw", Pins())
    sizes = machine.mesh.sizes
    inputs = {item.tensor: rng.choice(list(splits(graph.tensors[item.tensor].shape, sizes))) for item in graph.inputs}
    specs: dict[str, ShardingSpec] = dict(inputs)
    strategies, layouts, reads = {}, [], {}

    def read(reader: str, position: int, tensor: str, spec: ShardingSpec, phase: str) -> None:
        if specs[tensor] != spec:
            layouts.append(Layout(f"{tensor}@{reader}:{position}", tensor, tensor, spec, phase, reader))
            reads[reader, position] = layouts[-1].value

    def reachable(tensor: str, spec: ShardingSpec) -> bool:
        shape = graph.tensors[tensor]
        return specs[tensor] == spec or find_reshard(shape.shape, DTYPE_BYTES[shape.dtype], specs[tensor], spec, machine) is not None

    for op in graph.ops:
        offered = [s for s in space.op_choices(op).strategies if all(map(reachable, op.inputs, s.inputs))]
        strategies[op.name] = strategy = rng.choice(offered)
        for position, (tensor, spec) in enumerate(zip(op.inputs, strategy.inputs, strict=True)):
            read(op.name, position, tensor, spec, op.phase)
        specs.update(zip(op.outputs, strategy.outputs, strict=True))
    named = {item.name: item.tensor for item in graph.inputs}
    for index, output in enumerate(graph.outputs):
        spec = inputs[named[output.name]] if output.kind != "output" else ShardingSpec(specs[output.tensor].dims)
        producer = graph.producer.get(output.tensor)
        phase = "backward" if output.kind == "gradient" else (producer.phase if producer else "forward")
        read(f"{OUTPUT}{index}", 0, output.tensor, spec, phase)
    return Assignment(inputs, strategies, tuple(layouts), reads)


@pytest.mark.parametrize("name", ["mlp", "gpt2"])
def test_no_random_plan_beats_the_bound(name: str) -> None:
    graph, machine = graph_of(name), machine_of("x=2,y=2")
    found = find_plan(graph, machine, optimizer="adamw")
    assert found.status == "optimal"
    for seed in range(10):
        program = build_program(graph, random_assignment(graph, machine, seed), machine)
        assert total_seconds(program, "adamw") >= found.bound_seconds * (1 - 1e-9)
    for rival in found.baselines.values():
        if rival.feasible:
            assert rival.seconds >= found.bound_seconds * (1 - 1e-9)
    assert {"ddp", "fsdp", "megatron"} <= set(found.baselines)
