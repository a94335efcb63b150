"""Buffers of which a call changes a part are changed where they lie, unless somebody still needs what was there."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.check import check
from autopar.errors import ScheduleError
from autopar.plan import Plan
from autopar.recording import replay
from autopar.runtime.steps.simulation import simulate
from autopar.schedule.legality import check_legal

X, AT = torch.arange(8.0).view(2, 4), torch.tensor([1, 3])
Forward = Callable[["Model", Tensor, Tensor], Any]


class Model(nn.Module):
    """A buffer ``held`` of 6 x 4, its second half ones."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.register_buffer("held", torch.cat([torch.zeros(3, 4), torch.ones(3, 4)]))
        self.run = forward

    def forward(self, x: Tensor, at: Tensor) -> Any:
        return self.run(self, x, at)


def copied(model: Model, x: Tensor, at: Tensor) -> Tensor:
    model.held.index_copy_(0, at, x)
    return model.held.sum(0)


def put(model: Model, x: Tensor, at: Tensor) -> Tensor:
    model.held[at] = x
    return model.held.sum(0)


def twice(model: Model, x: Tensor, at: Tensor) -> Tensor:
    before = model.held.sum(0)
    model.held.index_copy_(0, at, x)
    model.held[:, 1:][at] = x[:, 1:]
    model.held.index_copy_(0, at + 1, x)
    return before + model.held.sum(0)


def read_first(model: Model, x: Tensor, at: Tensor) -> Tensor:
    before = model.held[1:].square()
    model.held.index_copy_(0, at, x)
    return before.sum(0) + model.held.sum(0)


def read_afterwards(model: Model, x: Tensor, at: Tensor) -> Tensor:
    new = model.held.index_copy(0, at, x)
    result = new.sum(0) - model.held.sum(0)
    model.held.copy_(new)
    return result


def view_read_afterwards(model: Model, x: Tensor, at: Tensor) -> Tensor:
    new, view = model.held.index_copy(0, at, x), model.held[1:]
    result = new.sum(0) - view.exp().sum(0)
    model.held.copy_(new)
    return result


def given_out(model: Model, x: Tensor, at: Tensor) -> Tensor:
    model.held.index_copy_(0, at, x)
    return model.held


def moved_within(model: Model, x: Tensor, at: Tensor) -> Tensor:
    model.held.copy_(model.held.index_copy(0, at, model.held[3:5]))
    return model.held.sum(0) + x.sum(0)


def added(model: Model, x: Tensor, at: Tensor) -> Tensor:
    model.held.index_put_((at,), x, accumulate=True)
    return model.held.sum(0)


def left_as_it_is(model: Model, x: Tensor, at: Tensor) -> Tensor:
    return model.held.index_copy(0, at, x).sum(0)


def changes(forward: Forward, mode: Any = "inference") -> list[str]:
    graph = autopar.capture(Model(forward), (X, AT), mode=mode)
    return [op.target for op in graph.ops if op.target in ("aten.index_copy_.default", "aten.index_put_.default")]


@pytest.mark.parametrize(("forward", "count"), [(copied, 1), (put, 1), (read_first, 1)])
def test_a_change_of_a_part_is_made_in_the_buffer(forward: Forward, count: int) -> None:
    assert len(changes(forward)) == count


@pytest.mark.parametrize("forward", [read_afterwards, view_read_afterwards, given_out, moved_within, added, left_as_it_is])
def test_what_is_needed_later_is_kept(forward: Forward) -> None:
    assert not changes(forward)


def test_of_training_nothing_is_changed() -> None:
    def learned(model: Model, x: Tensor, at: Tensor) -> Tensor:
        return copied(model, x.detach(), at).sum() * x.sum()

    model = Model(learned)
    graph = autopar.capture(model, (X.clone().requires_grad_(), AT), mode="train")
    assert not [op for op in graph.ops if op.target.endswith("_.default")]


def planned(forward: Forward, pins: dict[str, str] | None = None) -> Plan:
    return autopar.plan(Model(forward), (X, AT), mesh="dp=2", mode="inference", hardware="cpu-cluster", constraints=pins, time_limit=600.0)


@pytest.mark.parametrize("pin", ["R R", "R S0", "S0 R"])
@pytest.mark.parametrize("forward", [copied, put, twice, read_first, read_afterwards, given_out, moved_within, added])
def test_two_calls_give_what_the_model_gives(forward: Forward, pin: str) -> None:
    """However the buffer lies, that of the operator or another."""
    plan = planned(forward, {"held": pin})
    assert check(plan) == ()
    model, held = Model(forward), Model(forward).held
    graph = autopar.capture(model, (X, AT), mode="inference")
    names = {item.name: item.tensor for item in graph.inputs}
    for shift in (0, 1):
        schedule = replay(plan, graph)
        given = {names["x"]: X + shift, names["at"]: AT + shift, names["held"]: held}
        outputs = simulate(schedule, given).outputs
        found = {(output.kind, output.name): tensor for (output, _), tensor in zip(schedule.outputs, outputs, strict=True)}
        assert torch.equal(found["output", "0"], model(X + shift, AT + shift))
        held = found["buffer", "held"]
        assert torch.equal(held, model.held)


@pytest.mark.parametrize("execute", ["eager", "graph"])
def test_the_module_changes_its_buffer(execute: Any, one_rank: None) -> None:
    model, alone = Model(copied), Model(copied)
    plan = autopar.plan(model, (X, AT), mesh="dp=1", mode="inference")
    module = autopar.compile(model, plan, execute=execute)
    with torch.no_grad():
        for shift in (0, 1):
            assert torch.equal(module(X + shift, AT + shift), alone(X + shift, AT + shift))
            assert torch.equal(dict(module.named_buffers())["held"].to_local(), alone.held)


def test_it_takes_no_memory_of_its_own_and_moves_what_changes() -> None:
    """24 floats of the buffer, 8 of the change: read and written."""
    plan = planned(copied, {"held": "R R", "input:x": "R R"})
    again = planned(read_afterwards, {"held": "R R", "input:x": "R R"})
    spare = 4 * 24
    assert again.predicted.memory.activations - plan.predicted.memory.activations >= spare
    row = next(row for row in plan.schedule if row.of.startswith("index_copy") and row.kind == "run")
    assert row.bytes == 0 and row.over is None


def edited(change: Callable[[Any], None]) -> Plan:
    data = json.loads(planned(read_first, {"held": "R R"}).to_json())
    change(data)
    return Plan.from_json(json.dumps(data))


def later(data: Any) -> None:
    """What reads the buffer as it was comes after the change."""
    rows = data["schedule"]
    change = next(row for row in rows if row["kind"] == "run" and row["of"].startswith("index_copy"))
    first = next(row for row in rows if row["kind"] == "run" and "held" in row["reads"])
    assert rows.index(first) < rows.index(change)
    rows.remove(change)
    rows.insert(rows.index(first), change)


def test_a_file_that_reads_what_is_gone_is_refused() -> None:
    assert check(edited(lambda data: None)) == ()
    assert "is written over held, which instruction" in "\n".join(map(str, check(edited(later))))


def test_a_schedule_that_reads_what_is_gone_is_refused() -> None:
    plan = planned(read_first, {"held": "R R"})
    schedule = replay(plan, autopar.capture(Model(read_first), (X, AT), mode="inference"))
    rows = list(schedule.instructions)
    change = next(row for row in rows if row.kind == "run" and row.of.startswith("index_copy"))
    first = next(row for row in rows if row.kind == "run" and "held" in row.reads)
    rows.remove(change)
    rows.insert(rows.index(first), change)
    check_legal(schedule, "a test")
    with pytest.raises(ScheduleError, match=r"reads held, which instruction .* has written over"):
        check_legal(dataclasses.replace(schedule, instructions=tuple(rows)), "a test")
    kept = dataclasses.replace(schedule.graph, outputs=tuple(item for item in schedule.graph.outputs if item.kind != "buffer"))
    with pytest.raises(ScheduleError, match="changes held, which no new value replaces"):
        check_legal(dataclasses.replace(schedule, graph=kept), "a test")
