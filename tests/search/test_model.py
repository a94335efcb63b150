"""The integer problem against the schedules it stands for."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace

import numpy as np
import pytest

from autopar import zoo
from autopar.cost_models import Machine, Mesh, load_hardware
from autopar.graph import Accumulation, Graph
from autopar.importer import capture_graph
from autopar.schedule import OUTPUT, Collective, Instruction, Limits, Schedule, make_schedule, memory, ordered, step_seconds
from autopar.schedule.instructions import BEFORE_ALL
from autopar.schedule.ordering import order
from autopar.search import find_plan
from autopar.search.choices.pins import Pins
from autopar.search.choices.space import Space
from autopar.search.ilp.build import build_model
from autopar.search.ilp.decode import decode_assignment
from autopar.solvers import INFINITE, Problem, evaluate, solve
from tests.graphs import random_schedule

LEAN = Limits(0, 0, 0)
"""Nothing is joined, gathered ahead or set aside."""
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


def turned_seconds(schedule: Schedule, call: Collective, expanded: Container[str]) -> float:
    """Seconds of a call's copy of a source that lies turned or with gaps: that follows from other choices than those of its reshard.

    Args:
        expanded: the tensors whose copies the problem knows of.
    """
    source = schedule.values[call.parts[0].source]
    if source.order.repeats and source.tensor in expanded:
        return 0.0
    plain = replace(call, parts=tuple(part._replace(copied=False) for part in call.parts))
    return sum(
        schedule.machine.copy_seconds(size, call.dtype) * sign for size, sign in ((call.copied_bytes, 1), (plain.copied_bytes, -1))
    )


def in_sequence(schedule: Schedule, optimizer: str) -> float:
    """Seconds of a microbatch's instructions one after another, with its share of what is done once."""
    kinds = {f"{OUTPUT}{index}": output.kind for index, output in enumerate(schedule.graph.outputs)}

    def is_once(item: Instruction) -> bool:
        call = schedule.collectives.get(item.of) if item.kind in ("start", "wait") else None
        return item.microbatch == BEFORE_ALL or (call is not None and kinds.get(call.parts[0].layout.before) == "gradient")

    times = schedule.graph.microbatches
    seconds = sum(item.seconds / times if is_once(item) else item.seconds for item in schedule.instructions)
    return seconds + schedule.optimizer_seconds(optimizer) / times


@pytest.mark.parametrize(
    ("name", "mesh", "microbatches"), [*((name, mesh, 1) for name in MODELS for mesh in ("x=2", "x=2,y=2")), ("mlp", "x=2,y=2", 4)]
)
def test_price_of_choices_is_price_of_schedule(name: str, mesh: str, microbatches: int) -> None:
    """Any finite choices: the problem's cost is that of the instructions in program order, and its peak is never above a schedule's.

    Where calls may share buckets, those that run once before all microbatches cost no latency in the problem. Here none do.
    """
    graph, machine = graph_of(name), machine_of(mesh)
    if microbatches > 1:
        graph = graph.accumulated(Accumulation(microbatches, tuple(item.tensor for item in graph.of_kind("input"))))
        machine = Machine(machine.mesh, machine.hardware, "communication")
    model = build_model(Space(graph, machine, "adamw" if graph.mode == "train" else "none", Pins()))
    problem, unit = model.problem(None)
    rng = np.random.default_rng(0)
    for _ in range(3):
        noise = rng.integers(0, 2**40, len(problem.costs))
        costs = np.split(np.where(problem.costs >= INFINITE, problem.costs, noise), problem.node_ptr[1:-1])
        tables = [
            (edge.source, edge.target, np.where(np.isfinite(edge.seconds), rng.integers(0, 2**36, edge.seconds.shape), INFINITE))
            for edge in model.edges
        ]
        choices = solve(Problem.build(costs, tables), time_limit=600.0, gap=0.5).choices
        assert choices is not None
        cost, peak, feasible = evaluate(problem, choices)
        assert feasible
        assignment = decode_assignment(model, choices)
        assert any(layout.once for layout in assignment.layouts) is (microbatches > 1)
        apart = order(graph, assignment, machine, LEAN)
        again = {call.id for call in apart.calls if call.kind == "all_reduce" and not (call.in_place or call.filled)}
        again -= {call.id for call in apart.calls if apart.values[call.parts[0].source].order.repeats}  # a copy that the problem knows of
        copied = sum(item.seconds for item in apart.instructions if item.kind == "wait" and item.of in again)  # of sums read more than once
        copied += sum(turned_seconds(apart, call, model.space.repeated) for call in apart.calls if call.id not in again)
        assert cost * unit == pytest.approx(in_sequence(apart, model.space.optimizer) - copied, rel=1e-6)
        shared = in_sequence(ordered(graph, assignment, machine), model.space.optimizer)
        assert shared <= (cost * unit + copied) * (1 + 1e-6), "sharing saves"
        for limits in (LEAN, Limits()):
            assert peak <= memory(make_schedule(graph, assignment, machine, limits), model.space.optimizer).peak


@pytest.mark.parametrize("name", ["mlp", "gpt2"])
def test_no_random_plan_beats_the_bound(name: str) -> None:
    graph, machine = graph_of(name), machine_of("x=2,y=2")
    found = find_plan(graph, machine, optimizer="adamw")
    assert found.bound_seconds <= found.seconds
    for seed in range(10):
        assert step_seconds(random_schedule(graph, machine, seed), "adamw") >= found.bound_seconds * (1 - 1e-9)
    for rival in found.baselines.values():
        if rival.feasible:
            assert rival.seconds >= found.seconds * (1 - 1e-9)
    assert {"ddp", "fsdp", "megatron"} <= set(found.baselines)
