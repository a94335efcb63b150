"""Which waits of forward are late: nobody but who reads the loss needs what they bring."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.graph import Graph, Op, Ref
from autopar.rules import find_rule, strategies
from autopar.schedule import Assignment, Layout, Limits, Schedule, make_schedule, step_seconds
from autopar.schedule.deferred_loss import deferred_values, may_be_deferred, most_deferred_bytes
from autopar.sharding import ShardingSpec, Strategy
from tests.graphs import machine, two_layers

WHERE = machine("dp=2,tp=2")
SPLIT, WHOLE = ShardingSpec.parse("S01 R"), ShardingSpec.parse("R R")


def graph(batch: int = 16, **changes: object) -> Graph:
    """loss = 2 sum(x w0' w1'): the sum and its double lead to the loss alone."""
    made = two_layers(batch=batch)
    double = Op("twice", "aten.mul.Tensor", ("loss",), ("twice",), (Ref(0), 2.0), phase="forward")
    place = next(index for index, op in enumerate(made.ops) if op.name == "loss") + 1
    outputs = tuple(replace(output, tensor="twice") if output.name == "loss" else output for output in made.outputs)
    tensors = {**made.tensors, "twice": replace(made.tensors["loss"], name="twice")}
    made = replace(made, ops=(*made.ops[:place], double, *made.ops[place:]), outputs=outputs, tensors=tensors)
    return replace(made, **changes)  # type: ignore[arg-type]


def strategy(made: Graph, name: str, inputs: str) -> Strategy:
    op = made.op[name]
    offered = strategies(find_rule(op, made.tensors), [made.tensors[tensor] for tensor in (*op.inputs, *op.outputs)], WHERE.mesh.sizes)
    wanted = tuple(ShardingSpec.parse(text) for text in inputs.split(", "))
    return next(item for item in offered if item.inputs == wanted and not any(spec.partial for spec in item.inputs))


def gathered(made: Graph) -> Assignment:
    """The batch is split; for the sum all that was made is gathered."""
    chosen = {
        "h": "S01 R, R R", "y": "S01 R, R R", "loss": "R R", "twice": "", "gw1": "S01 R, S01 R", "gh": "S01 R, R R", "gw0": "S01 R, S01 R",
    }  # fmt: skip
    picked = {name: strategy(made, name, specs) for name, specs in chosen.items()}
    picked["gy"] = Strategy((), (SPLIT,), 4)
    layouts = [Layout("y@whole", "y", "y", WHOLE, "forward", "loss")]
    reads = {("loss", 0): "y@whole"}
    for index, (gradient, weight) in enumerate((("gw0", "w0"), ("gw1", "w1")), 1):
        layouts.append(Layout(f"{gradient}@whole", gradient, gradient, WHOLE, "backward", f"output:{index}"))
        reads[f"output:{index}", 0] = f"{gradient}@whole"
        assert weight in made.tensors
    return Assignment({"w0": WHOLE, "w1": WHOLE, "x": SPLIT}, picked, tuple(layouts), reads)


def late_calls(schedule: Schedule) -> list[str]:
    return [item.of for item in schedule.instructions if item.late]


def test_what_the_loss_alone_is_made_of_is_late() -> None:
    made = graph()
    assert [op.name for op in made.tail] == ["twice", "loss", "y"]
    assert may_be_deferred(made) == {"twice", "loss", "output:0"}, "y reads a weight, which an optimizer may change before the loss is read"
    schedule = make_schedule(made, gathered(made), WHERE)
    assert late_calls(schedule) == ["y@whole"]


def test_the_step_is_shorter_by_the_wait() -> None:
    made = graph()
    schedule = make_schedule(made, gathered(made), WHERE, Limits(0, 0, 0))
    waiting = replace(schedule, instructions=tuple(item._replace(late=None) for item in schedule.instructions))
    call = next(item.seconds for item in schedule.instructions if item.kind == "start" and item.of == "y@whole")
    assert 0.3 * call < step_seconds(waiting, "none") - step_seconds(schedule, "none") <= call


def test_not_where_another_output_or_backward_reads_it() -> None:
    made = graph()
    gradient = next(index for index, output in enumerate(made.outputs) if output.kind == "gradient")
    more = replace(made, outputs=(*made.outputs, replace(made.outputs[gradient], tensor="loss", kind="output", name="sum")))
    assert may_be_deferred(more) == {"twice", "output:0"}
    assert deferred_values(more, gathered(more), WHERE) == frozenset()
    last = replace(made.op["gh"], inputs=("gy", "w1", "y"))
    read = replace(made, ops=tuple(last if op.name == "gh" else op for op in made.ops))
    assert [op.name for op in read.tail] == ["twice", "loss"]


def test_not_where_a_call_follows() -> None:
    """The order of calls would differ from rank to rank."""
    made = graph()
    plan = gathered(made)
    followed = replace(plan, layouts=(*plan.layouts, Layout("loss@again", "loss", "loss", ShardingSpec(()), "forward", "twice")))
    assert deferred_values(made, followed, WHERE) == frozenset({"loss@again"})


@pytest.mark.parametrize(("batch", "late"), [(16, True), (32, False)])
def test_not_where_much_is_kept(batch: int, late: bool) -> None:
    """What is late outlives forward: 1 KiB, here, and with y there are two numbers."""
    made = graph(batch=batch)
    assert most_deferred_bytes(made) == 1024
    assert bool(deferred_values(made, gathered(made), WHERE)) == late


def test_not_what_may_run_once_alone_or_in_inference_or_in_sequence() -> None:
    made = graph()
    drawn = replace(made.op["twice"], target="my::own")
    assert may_be_deferred(replace(made, ops=tuple(drawn if op.name == "twice" else op for op in made.ops))) == {"output:0"}
    assert may_be_deferred(replace(made, mode="inference")) == frozenset()
    assert deferred_values(made, gathered(made), replace(WHERE, cost_model="communication")) == frozenset()
