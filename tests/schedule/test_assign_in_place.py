"""assign_in_place: what is written over is dead, of its half of the step, and as large; memory is less by it, and values are the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from autopar.check import check
from autopar.errors import ScheduleError
from autopar.graph import Graph, GraphInput, GraphOutput, Op, Ref, Tensor
from autopar.importer import capture_graph
from autopar.plan import Plan
from autopar.rules import find_rule, may_write_over, strategies
from autopar.rules.table import ROWS
from autopar.runtime.instructions.operators import registered
from autopar.runtime.steps.simulation import simulate
from autopar.schedule import Assignment, Schedule, make_schedule, memory, run_passes
from autopar.schedule.freeing import free
from autopar.schedule.legality import check_legal
from autopar.search import find_plan
from autopar.sharding import ShardingSpec
from tests.graphs import machine, plan_of


class Residual(nn.Module):
    """Sums in forward and in backward: some of what is added is needed again, some came in."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 2.0
        z = y + self.down(torch.nn.functional.gelu(self.up(y)))
        z = z + y.mean(-1, keepdim=True)
        return (z + x).tanh().sum()


SIZE = {"smaller": (4,)}


def op(target: str, reads: tuple[str, ...], result: str, phase: Any = "forward") -> Op:
    more = (0, 1) if target == "aten.transpose.int" else ()
    return Op(result, target, reads, (result,), (*map(Ref, range(len(reads))), *more), phase=phase)


MAKE = op("aten.mul.Tensor", ("a", "b"), "t")


@pytest.mark.parametrize(
    ("ops", "leaves", "expected"),
    [
        pytest.param((op("aten.add.Tensor", ("t", "c"), "out"),), "out", {"out": "t"}, id="first"),
        pytest.param((op("aten.add.Tensor", ("c", "t"), "out"),), "out", {"out": "t"}, id="second"),
        pytest.param((op("aten.add.Tensor", ("t", "t"), "out"),), "out", {"out": "t"}, id="twice at once"),
        pytest.param((op("aten.gelu_backward.default", ("t", "c"), "out"),), "out", {"out": "t"}, id="gelu_backward"),
        pytest.param((op("aten.gelu_backward.default", ("c", "t"), "out"),), "out", {}, id="only the gradient"),
        pytest.param((op("aten.maximum.default", ("c", "t"), "out"),), "out", {}, id="no row in the table"),
        pytest.param((op("aten.add.Tensor", ("a", "c"), "out"),), "out", {}, id="an input of the graph"),
        pytest.param((op("aten.add.Tensor", ("t", "c"), "y"), op("aten.mul.Tensor", ("t", "y"), "out")), "out", {"out": "t"}, id="later"),
        pytest.param((op("aten.add.Tensor", ("t", "c"), "y"), op("aten.mul.Tensor", ("y", "b"), "out")), "out", {"y": "t", "out": "y"},
                     id="one after another"),
        pytest.param((op("aten.add.Tensor", ("t", "c"), "out"),), "t", {}, id="leaves"),
        pytest.param((op("aten.add.Tensor", ("t", "c"), "out", "backward"),), "out", {}, id="made in the other half"),
        pytest.param((op("aten.add.Tensor", ("smaller", "t"), "out"),), "out", {"out": "t"}, id="not the smaller one"),
        pytest.param((op("aten.transpose.int", ("t",), "v"), op("aten.add.Tensor", ("v", "c"), "out")), "out", {}, id="a view"),
        pytest.param((op("aten.alias.default", ("t",), "v"), op("aten.add.Tensor", ("t", "c"), "y"),
                      op("aten.mul.Tensor", ("v", "y"), "out")), "out", {"out": "y"}, id="a view is read later"),
        pytest.param((op("aten.transpose.int", ("t",), "v"), op("aten.add.Tensor", ("t", "c"), "y"),
                      op("aten.mul.Tensor", ("v", "y"), "out")), "out", {}, id="a result lies turned, as its first operand"),
        pytest.param((op("aten.transpose.int", ("t",), "v"), op("aten.sub.Tensor", ("t", "v"), "out")), "out", {}, id="a view beside it"),
    ],
)  # fmt: skip
def test_what_is_written_over(ops: tuple[Op, ...], leaves: str, expected: dict[str, str]) -> None:
    """Of ``t = a * b`` and operators after it, all values ``[4, 4]`` but for ``SIZE``."""
    names = dict.fromkeys(name for item in (MAKE, *ops) for name in (*item.inputs, *item.outputs))
    tensors = {name: Tensor(name, SIZE.get(name, (4, 4)), "float32") for name in names}
    entering = [name for name in names if not any(name in item.outputs for item in (MAKE, *ops))]
    outputs = tuple(GraphOutput(name, "output", name) for name in dict.fromkeys(("out", leaves)))
    inputs = tuple(GraphInput(name, "input", name) for name in entering)
    graph = Graph("train", tensors, inputs, (MAKE, *ops), outputs, {"args": (), "kwargs": {}, "loss_args": (), "outputs": {}})
    whole = {name: ShardingSpec.replicated(len(tensors[name].shape)) for name in entering}
    chosen = {
        item.name: strategies(find_rule(item, tensors), [tensors[name] for name in (*item.inputs, *item.outputs)], (1,))[0]
        for item in graph.ops
    }
    assert over(make_schedule(graph, Assignment(whole, chosen), machine("1"))) == expected


@pytest.mark.parametrize(("columns", "expected"), [(4, {"out": "t"}), (3, {})])
def test_what_is_as_large_on_the_first_rank_alone_is_not_written_over(columns: int, expected: dict[str, str]) -> None:
    """A column is as large as each rank's part of 4 columns on 4 ranks; of 3 columns the last rank has none."""
    ops = (MAKE, op("aten.add.Tensor", ("t", "wide"), "out"))
    shapes = {"a": (4, 1), "b": (4, 1), "t": (4, 1), "wide": (4, columns), "out": (4, columns)}
    tensors = {name: Tensor(name, shape, "float32") for name, shape in shapes.items()}
    specs = {"a": "R R", "b": "R R", "t": "R R", "wide": "R S0", "out": "R S0"}
    inputs = tuple(GraphInput(name, "input", name) for name in ("a", "b", "wide"))
    leaving = (GraphOutput("out", "output", "out"),)
    graph = Graph("train", tensors, inputs, ops, leaving, {"args": (), "kwargs": {}, "loss_args": (), "outputs": {}})
    chosen = {
        item.name: next(
            strategy for strategy in strategies(find_rule(item, tensors), [tensors[name] for name in (*item.inputs, *item.outputs)], (4,))
            if [str(spec) for spec in (*strategy.inputs, *strategy.outputs)] == [specs[name] for name in (*item.inputs, *item.outputs)]
        )
        for item in ops
    }  # fmt: skip
    placed = {name: ShardingSpec.parse(specs[name]) for name in ("a", "b", "wide")}
    assert over(make_schedule(graph, Assignment(placed, chosen), machine("4"))) == expected


def schedule_of(mesh: str = "dp=2") -> Schedule:
    graph = capture_graph(Residual(), (torch.zeros(4, 8),), {})
    return find_plan(graph, machine(mesh), baselines=False).schedule


def over(schedule: Schedule) -> dict[str, str]:
    return {item.of: item.over for item in schedule.instructions if item.kind == "run" and item.over}


def test_operators_that_write_over_an_argument_have_an_overload_that_writes_there() -> None:
    found = [row for row in ROWS if row.over is not None]
    assert len(found) == 9
    for row in found:
        assert row.over is not None
        schema = registered(f"{row.name}.{row.over.out}")._schema
        (place,) = [item.name for item in schema.arguments if item.is_out]
        assert place == row.over.out, row.name
        assert max(row.over.places) < len([item for item in schema.arguments if str(item.type) == "Tensor" and not item.is_out])


def test_only_what_is_dead_is_written_over() -> None:
    schedule = schedule_of()
    found, items = over(schedule), schedule.instructions
    assert found, "sums of gradients at least"
    for index, item in enumerate(items):
        if item.kind != "run" or item.over is None:
            continue
        storage = schedule.storage[item.over]
        before = {value for other in items[:index] for value in other.writes if schedule.storage[value] == storage}
        later = {value for other in items[index + 1 :] if other.kind != "free" for value in other.reads}
        assert not before & later and not {item.over} & {value for _, value in schedule.outputs}
        assert schedule.operations[item.of].op.inputs[may_write_over(schedule.operations[item.of].op)[0]]


def test_memory_is_less_and_the_file_agrees() -> None:
    schedule = schedule_of()
    placed = run_passes(schedule, ())
    plain = free(replace(schedule, instructions=tuple(item._replace(over=None) for item in placed.instructions if item.kind != "free")))
    assert memory(schedule, "adamw").peak <= memory(plain, "adamw").peak
    assert sum(item.bytes for item in schedule.instructions if item.kind == "run") < sum(
        item.bytes or sum(plain.values[value].bytes for value in item.writes) for item in plain.instructions if item.kind == "run"
    )
    plan = plan_of(schedule)
    assert not check(Plan.from_json(plan.to_json(), "the plan"))
    assert {row.of: row.over for row in plan.schedule if row.kind == "run" and row.over} == over(schedule)


class Turned(nn.Module):
    """Sums of what was made and of views of it: entries of these lie elsewhere in it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, z, w = x.sin(), x.cos(), x.exp()
        return torch.stack([y - y.t(), z[0] + z, w * w])


def test_what_is_read_as_a_view_too_is_not_written_over() -> None:
    """Of a row of it torch does not see that the sum writes over what it reads. By the passes' own rules, and by the check of the file."""
    x = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    graph = capture_graph(Turned(), (x,), {}, mode="inference")
    schedule = find_plan(graph, machine("dp=1"), baselines=False).schedule
    assert over(schedule) == {"mul": "exp"}
    assert torch.equal(simulate(schedule, {"x": x}).outputs[0], Turned()(x))
    for made, read in (("sub", "sin"), ("add", "cos")):
        written = spoilt(schedule, made, read)
        with pytest.raises(ScheduleError, match=f"writes over {read}"):
            check_legal(written, "a test")
        (difference,) = check(plan_of(written))
        assert "which it reads itself" in difference.what


def spoilt(schedule: Schedule, of: str, value: str | None) -> Schedule:
    items = (item._replace(over=value) if item.kind == "run" and item.of == of else item for item in schedule.instructions)
    return replace(schedule, instructions=tuple(items))


@pytest.mark.parametrize("what", ["came in", "is read later", "of another shape", "by an operator that cannot"])
def test_what_may_not_be_written_over_is_refused(what: str) -> None:
    """By the passes' own rules, and by the check of the file."""
    schedule = schedule_of()
    runs = [item for item in schedule.instructions if item.kind == "run"]
    entering = {item.tensor for item in schedule.graph.inputs}
    last = {value: item.id for item in schedule.instructions if item.kind != "free" for value in item.reads}
    for item in runs:
        places = may_write_over(schedule.operations[item.of].op)
        for place, value in enumerate(item.reads):
            local = schedule.specs[value].local_shape(schedule.graph.tensors[schedule.values[value].tensor].shape, (2,))
            mine = schedule.specs[item.writes[0]].local_shape(schedule.graph.tensors[schedule.values[item.writes[0]].tensor].shape, (2,))
            fits = {
                "came in": place in places and value in entering and local == mine,
                "is read later": place in places and value not in entering and last[value] > item.id and local == mine,
                "of another shape": place in places and value not in entering and last[value] == item.id and local != mine,
                "by an operator that cannot": not places and value not in entering and last[value] == item.id and local == mine,
            }
            if fits[what]:
                with pytest.raises(ScheduleError, match=f"instruction {item.id} |written over"):
                    check_legal(spoilt(schedule, item.of, value), "a test")
                plan = plan_of(schedule)
                rows = tuple(row.model_copy(update={"over": value}) if row.id == item.id else row for row in plan.schedule)
                said = "is written over" if what == "is read later" else "may not be written over"
                found = check(plan.model_copy(update={"schedule": rows}))
                assert any(said in difference.what for difference in found), (item, value, found)
                return
    raise AssertionError(f"no instruction to write over what {what}")


def test_the_sum_of_what_forward_left_takes_its_own_memory() -> None:
    """A backward pass may run twice on it."""
    schedule = schedule_of()
    made = {value: item.half for item in schedule.instructions for value in item.writes}
    assert all(made[item.over] == item.half for item in schedule.instructions if item.over)
