"""All-reduces in place: nobody else reads what is summed, and neither copies nor memory of their own are planned, held or made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch

from autopar.check import check
from autopar.errors import ScheduleError
from autopar.graph import Accumulation, Graph, GraphInput, GraphOutput, Op, Ref, Tensor
from autopar.plan import Plan
from autopar.recording import replay
from autopar.rules import find_rule, strategies
from autopar.runtime.steps.simulation import simulate
from autopar.schedule import Assignment, Collective, Layout, Limits, Schedule, make_schedule, memory
from autopar.schedule.legality import check_legal
from autopar.sharding import ShardingSpec, Strategy
from tests.graphs import machine, plan_of, random_graph, random_schedule, two_layers
from tests.schedule.cases import CASES, Case

WHOLE = ShardingSpec.parse("R R")


def strategy(graph: Graph, op: Op, specs: Mapping[str, str]) -> Strategy:
    """The one in which every tensor lies as it is said, whole where nothing is."""
    names = (*op.inputs, *op.outputs)
    whole = {name: ShardingSpec.replicated(len(graph.tensors[name].shape)) for name in names}
    wanted = [ShardingSpec.parse(specs[name]) if name in specs else whole[name] for name in names]
    offered = strategies(find_rule(op, graph.tensors), [graph.tensors[name] for name in names], (2,))
    return next(item for item in offered if [*item.inputs, *item.outputs] == wanted)


def columns_and_rows() -> Schedule:
    """Two layers on 2 ranks, the first split by columns and the second by rows, whose sum is reduced."""
    graph = two_layers()
    specs = {"w0": "S0 R", "h": "R S0", "w1": "R S0", "y": "R R +P0", "gw1": "R S0", "gh": "R S0", "gw0": "S0 R"}
    chosen = {op.name: strategy(graph, op, {} if op.name == "loss" else specs) for op in graph.ops}
    layouts, reads = (Layout("y@whole", "y", "y", WHOLE, "forward", "loss"),), {("loss", 0): "y@whole"}
    inputs = {"w0": ShardingSpec.parse("S0 R"), "w1": ShardingSpec.parse("R S0"), "x": WHOLE}
    return make_schedule(graph, Assignment(inputs, chosen, layouts, reads), machine("dp=2"), Limits(0, 0, 0))


def reduction(schedule: Schedule) -> Collective:
    (call,) = (call for call in schedule.calls if call.kind == "all_reduce")
    return call


def test_what_one_call_reads_is_reduced_where_it_lies() -> None:
    schedule = columns_and_rows()
    call = reduction(schedule)
    start, wait = (next(item for item in schedule.instructions if item.kind == kind and item.of == call.id) for kind in ("start", "wait"))
    assert call.in_place and start.over == "y" and (start.bytes, wait.seconds, call.copied_bytes, call.staging_bytes) == (0, 0.0, 0, 0)
    assert schedule.storage["y@whole"] == schedule.storage["y"] == "y"
    plan = Plan.from_json(plan_of(schedule).to_json(), "the plan")
    assert not check(plan) and replay(plan, schedule.graph).collectives == schedule.collectives
    chance = torch.Generator().manual_seed(0)
    x, w0, w1 = (torch.randn(size, generator=chance) for size in ((16, 8), (32, 8), (8, 32)))
    found = simulate(schedule, {"x": x, "w0": w0, "w1": w1})
    assert torch.allclose(found.outputs[0], (x @ w0.T @ w1.T).sum(), rtol=1e-4)


def test_it_takes_less_memory_and_time_than_a_copy() -> None:
    schedule = columns_and_rows()
    call = reduction(schedule)
    copied = replace(call, in_place=False)
    assert copied.packs and copied.taken_bytes == copied.target_bytes and copied.copied_bytes == copied.source_bytes
    assert call.taken_bytes == 0 and call.held_bytes == copied.held_bytes == call.source_bytes
    items = tuple(
        item._replace(over=None, bytes=copied.target_bytes) if item.kind == "start" and item.of == call.id else item
        for item in schedule.instructions
    )
    other = replace(schedule, instructions=items, collectives={**schedule.collectives, call.id: copied})
    assert memory(schedule, "sgd").activations <= memory(other, "sgd").activations


@pytest.mark.parametrize("case", CASES, ids=str)
def test_nobody_else_reads_what_is_reduced_in_place(case: Case) -> None:
    """In the list with everything in its place."""
    schedule = dict(case.stages())["free"]
    leaving = {value for _, value in schedule.outputs}
    for index, item in enumerate(schedule.instructions):
        if item.kind != "start":
            continue
        call = schedule.collectives[item.of]
        assert call.in_place == (item.over is not None)
        if call.in_place:
            (source,) = item.reads
            storage = schedule.storage[source]
            made = {value for other in schedule.instructions[:index] for value in other.writes if schedule.storage[value] == storage}
            later = {value for other in schedule.instructions[index + 1 :] if other.kind != "free" for value in other.reads}
            assert call.kind == "all_reduce" and len(call.parts) == 1 and source not in leaving
            assert source not in later and not (storage not in schedule.collectives and (made - {source}) & later)


def test_some_of_the_cases_have_such_calls() -> None:
    found = [call.in_place for case in CASES for call in dict(case.stages())["free"].calls if call.kind == "all_reduce"]
    assert any(found) and not all(found)


@pytest.mark.parametrize("alike", [True, False])
def test_a_sum_that_is_reduced_twice_is_copied(alike: bool) -> None:
    """Equal reshards are one. Where another reader wants less of it, a list that reduces it in place is refused: by the passes' own rules,
    and by the check of the file."""
    shapes = {"x": (4, 8), "w": (8, 8), "y": (4, 8), "a": (4, 8), "b": (4, 8)}
    tensors = {name: Tensor(name, shape, "float32") for name, shape in shapes.items()}
    contraction = Op("y", "autopar.contract.default", ("x", "w"), ("y",), (Ref(0), Ref(1), "b k, n k -> b n"))
    ops = (contraction, *(Op(name, f"aten.{target}.default", ("y",), (name,), (Ref(0),)) for name, target in (("a", "sin"), ("b", "cos"))))
    inputs = (GraphInput("x", "input", "x"), GraphInput("w", "parameter", "w"))
    leaving = tuple(GraphOutput(name, "output", name) for name in ("a", "b"))
    graph = Graph("inference", tensors, inputs, ops, leaving)
    rows = "R R" if alike else "S0 R"
    chosen = {
        "y": strategy(graph, contraction, {"x": "R S0", "w": "R S0", "y": "R R +P0"}), "a": strategy(graph, ops[1], {}),
        "b": strategy(graph, ops[2], {"y": rows, "b": rows}),
    }  # fmt: skip
    layouts = (Layout("y@a", "y", "y", WHOLE, "forward", "a"), Layout("y@b", "y", "y", ShardingSpec.parse(rows), "forward", "b"))
    placed = dict.fromkeys(("x", "w"), ShardingSpec.parse("R S0"))
    assignment = Assignment(placed, chosen, layouts, {("a", 0): "y@a", ("b", 0): "y@b"})
    schedule = make_schedule(graph, assignment, machine("dp=2"), Limits(0, 0, 0))
    call = reduction(schedule)
    assert call.in_place == alike
    if not alike:
        begins = {item.id for item in schedule.instructions if item.kind == "start" and item.of == call.id}
        items = (item._replace(over="y", bytes=0) if item.id in begins else item for item in schedule.instructions)
        calls = {**schedule.collectives, call.id: replace(call, in_place=True)}
        wrong = replace(schedule, instructions=tuple(items), collectives=calls)
        with pytest.raises(ScheduleError, match=r"reads y, which instruction [0-9]+ has written over"):
            check_legal(wrong, "a test")
        assert any("still reads" in difference.what for difference in check(plan_of(wrong)))


def test_sums_over_microbatches_are_reduced_in_copies() -> None:
    """They are there until the step ends; what is reduced in every microbatch is reduced in place."""
    graph = two_layers()
    cut = tuple(item.tensor for item in graph.of_kind("input"))
    several, where, kinds = replace(graph, accumulation=Accumulation(3, cut)), machine("x=2,y=2"), Counter[tuple[bool, bool]]()
    for seed in range(40):
        schedule = random_schedule(several, where, seed)
        assert not check(plan_of(schedule))
        for item in schedule.instructions:
            if item.kind == "start" and schedule.collectives[item.of].kind == "all_reduce":
                call = schedule.collectives[item.of]
                summed = bool({schedule.storage[value] for value in item.reads} & set(schedule.sums))
                assert not (summed and call.in_place) and call.in_place == (item.over is not None)
                kinds[summed, call.in_place] += 1
    assert kinds[True, False] and kinds[False, True]


@pytest.mark.parametrize("seed", [10, 14, 26])
def test_a_view_is_not_reduced_in_place(seed: int) -> None:
    """What it is a view of may be read later; the check of the file says so of a list that has it otherwise."""
    schedule = random_schedule(random_graph(seed % 20), machine("dp=2,tp=2"), seed, Limits(0, 0, 0))
    made = {value: item for item in schedule.instructions if item.kind == "run" for value in item.writes}
    views = {value for value, item in made.items() if item.over is None and schedule.storage[value] != value}
    sums = {call.id for call in schedule.calls if call.kind == "all_reduce"}
    (start, *_) = (item for item in schedule.instructions if item.kind == "start" and item.of in sums and item.reads[0] in views)
    call = schedule.collectives[start.of]
    assert not call.in_place
    items = tuple(item._replace(over=start.reads[0], bytes=0) if item.id == start.id else item for item in schedule.instructions)
    wrong = replace(schedule, instructions=items, collectives={**schedule.collectives, call.id: replace(call, in_place=True)})
    assert any("may not be written over" in difference.what for difference in check(plan_of(wrong)))
