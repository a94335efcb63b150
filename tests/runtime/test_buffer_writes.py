"""Counters and running statistics are written where they lie, when nobody reads the old ones any more."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.importer import capture
from autopar.runtime.instructions.buffer_writes import find_buffer_writes, find_counters
from autopar.verify import verify
from autopar.verify.launch import run_ranks
from benchmarks.host import count_kernels
from tests.graphs import machine, random_schedule
from tests.runtime.recorders import on_cpus


class Normed(nn.Module):
    """A batch norm, and a factor: made of its running mean before, or after it."""

    def __init__(self, reads: str = "") -> None:
        super().__init__()
        self.reads = reads
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        old = self.norm.running_mean + 1 if self.reads == "old" else 1
        out = self.norm(self.linear(x)) * old
        return (out * self.norm.running_mean if self.reads == "new" else out).square().sum()


X = torch.arange(32.0).view(8, 4).sin()
ALL = {"num_batches_tracked", "running_mean", "running_var"}


@pytest.mark.parametrize(
    ("reads", "late", "written"),
    [("", False, ALL), ("new", False, {"num_batches_tracked"}), ("old", False, ALL), ("old", True, {"num_batches_tracked"})],
)
def test_what_nobody_reads_later_is_written_where_it_lies(reads: str, late: bool, written: set[str]) -> None:
    """torch's kernel writes both statistics, or none. ``late``: the reader of the old mean runs after batch norm. Backward reads the new
    one, which the next call would write over."""
    torch.manual_seed(0)
    schedule = random_schedule(capture(Normed(reads), (X,), mode="train").graph, machine("1"), 0)
    names = {item.tensor: item.name.removeprefix("norm.") for item in schedule.graph.of_kind("buffer")}
    if late:
        items = list(schedule.instructions)
        reader = next(item for item in items if item.kind == "run" and any(names.get(value) == "running_mean" for value in item.reads))
        items.remove(reader)
        place = next(index for index, item in enumerate(items) if item.of.startswith("batch_norm"))
        schedule = replace(schedule, instructions=(*items[: place + 1], reader, *items[place + 1 :]))
    assert {names[buffer] for writes in find_buffer_writes(schedule).values() for buffer in writes.values()} == written


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reads", ["", "new", "old"])
def test_buffers_are_as_the_plain_models(reads: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, x = Normed(reads).to(dtype), X.to(dtype)
    plan = autopar.plan(model, (x,), mesh={"dp": 1}, hardware="h100-sxm")

    def rank_main(rank: int) -> list[tuple[str, Tensor]]:
        module = autopar.compile(copy.deepcopy(model), plan)
        for _ in range(3):
            module(x).backward()
        return [(name, buffer.to_local().clone()) for name, buffer in module.named_buffers()]

    (found,) = run_ranks(rank_main, 1)
    for _ in range(3):
        model(x).backward()
    wanted = dict(model.named_buffers())
    for name, buffer in found:
        torch.testing.assert_close(buffer, wanted[name])


def test_batch_norm_runs_the_kernels_of_the_plain_model_and_counts_batches_in_one() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.BatchNorm1d(4) for _ in range(3)))
    plan = autopar.plan(model, (X,), mesh={"dp": 1}, hardware="h100-sxm")

    def rank_main(rank: int) -> list[int]:
        compiled = (autopar.compile(copy.deepcopy(model), plan, execute=form) for form in ("eager", "graph"))
        return [sum(count_kernels(lambda form=form: form(X)).values()) for form in (copy.deepcopy(model), *compiled)]

    ((plain, eager, graph),) = run_ranks(rank_main, 1)
    assert eager == plain - 2
    assert graph == eager + 1, "a graph writes into no buffer: one call copies all"


class Counting(nn.Module):
    """Two counters. The second steps by another number, or somebody reads it: an operator, or the caller."""

    one: Tensor
    other: Tensor

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.register_buffer("one", torch.tensor(3.0))
        self.register_buffer("other", torch.tensor(5.0))

    def forward(self, x: Tensor) -> Tensor:
        self.one += 1
        self.other += 2 if self.way == "by two" else 1
        return x * self.other if self.way == "read" else x + 1


@pytest.mark.parametrize("execute", ["eager", "graph"])
@pytest.mark.parametrize(("way", "groups"), [("alike", 1), ("by two", 0), ("read", 0)])
def test_counters_that_step_alike_and_are_not_read_step_together(way: str, groups: int, execute: Any) -> None:
    model = Counting(way)
    plan = autopar.plan(model, (X,), mesh={"dp": 1}, hardware="h100-sxm", mode="inference")
    wanted = model(X)

    def rank_main(rank: int) -> tuple[int, list[float], bool]:
        module = autopar.compile(Counting(way), plan, execute=execute)
        schedule = module.schedule
        found = module(X)
        counted = [buffer.full_tensor().item() for buffer in module.buffers()]
        return len(find_counters(schedule, find_buffer_writes(schedule))), counted, torch.equal(found, wanted)

    ((count, counted, same),) = run_ranks(rank_main, 1)
    assert (count, counted, same) == (groups, [model.one.item(), model.other.item()], True)


class Remembering(nn.Module):
    """Two buffers, in either order, and a forward that gives them new values. ``new`` is one of a call."""

    last: Tensor
    before: Tensor

    def __init__(self, change: Change, order: tuple[str, str] = ("before", "last")) -> None:
        super().__init__()
        self.change, self.linear = change, nn.Linear(4, 4)
        for number, name in enumerate(order):
            self.register_buffer(name, torch.arange(4.0) + 8 * number)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        given = self.change(self, x.detach().mean(0))
        return {"loss": (self.linear(x) - self.before).square().mean(), "given": given}


Change = Callable[[Remembering, Tensor], Tensor]


def shifted(model: Remembering, new: Tensor) -> Tensor:
    model.before = model.last
    model.last = new
    return new * 2


def shifted_in_place(model: Remembering, new: Tensor) -> Tensor:
    model.before.copy_(model.last)
    model.last.add_(new)
    return new * 2


def swapped(model: Remembering, new: Tensor) -> Tensor:
    model.before, model.last = model.last, model.before
    model.last.add_(new)
    return new * 2


def given_as_it_was(model: Remembering, new: Tensor) -> Tensor:
    old = model.last
    model.last = new
    return old


def given_in_part(model: Remembering, new: Tensor) -> Tensor:
    old = model.last[1:3]
    model.last = model.last * 0.5 + new
    return old


def copied_and_given(model: Remembering, new: Tensor) -> Tensor:
    old = model.last.clone()
    model.last.add_(1)
    return old


def changed_and_given(model: Remembering, new: Tensor) -> Tensor:
    model.last.add_(1)
    return model.last.clone()


def changed_and_given_in_part(model: Remembering, new: Tensor) -> Tensor:
    model.last.mul_(0.5).add_(1)
    return model.last[1:3].clone()


CHANGES = [
    shifted, shifted_in_place, swapped, given_as_it_was, given_in_part, copied_and_given, changed_and_given, changed_and_given_in_part,
]  # fmt: skip


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what torch itself has deprecated
@pytest.mark.parametrize("order", [("before", "last"), ("last", "before")])
@pytest.mark.parametrize("execute", ["eager", "graph", "cuda_graph", pytest.param("compiled", marks=pytest.mark.slow)])
@pytest.mark.parametrize("change", CHANGES)
def test_buffers_become_one_another_and_leave_as_they_were(change: Change, execute: Any, order: tuple[str, str], one_rank: None) -> None:
    torch.manual_seed(0)
    alone = Remembering(change, order)
    plan = autopar.plan(alone, (X,), mesh="dp=1", hardware="cpu-cluster")
    with on_cpus():
        module, results = autopar.compile(copy.deepcopy(alone), plan, execute=execute), []
        for shift in range(3):
            found, wanted = module(X + shift), alone(X + shift)
            found["loss"].backward()
            results.append((found["given"], wanted["given"].clone()))
            torch.testing.assert_close(found["loss"], wanted["loss"])
            for name, buffer in module.named_buffers():
                torch.testing.assert_close(buffer.to_local(), dict(alone.named_buffers())[name])
    for given, as_it_was in results:  # later calls leave it so
        torch.testing.assert_close(given, as_it_was)


@pytest.mark.parametrize("pin", ["S0", "R"])
@pytest.mark.parametrize("change", CHANGES)
def test_buffers_on_several_ranks_become_one_another(change: Change, pin: str) -> None:
    torch.manual_seed(0)
    made = Remembering(change), (X,)
    plan = autopar.plan(*made, mesh="dp=2", hardware="cpu-cluster", constraints={"last": pin, "before": "S0"})
    assert autopar.check(plan) == ()
    found = verify(plan, made, backend="simulate", steps=3)
    assert found.passed, found.problems


class Following(nn.Module):
    """A scale that evaluation changes, and a sum of what training saw; both are read by backward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.out = nn.Linear(4, 4), nn.Parameter(torch.eye(4))
        self.register_buffer("scale", torch.full((4,), 2.0))
        self.register_buffer("mean", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = self.mean + x.detach().mean(0)
        else:
            self.scale.mul_(3)
        return (self.linear(x) * self.scale * self.mean @ self.out.view(4, 4).t()).square().mean()


def evaluate(model: nn.Module) -> None:
    model.eval()
    with torch.no_grad():
        model(X)
    model.train()


def write(name: str) -> Callable[[nn.Module], None]:
    @torch.no_grad()
    def run(model: nn.Module) -> None:
        model.get_parameter(name).mul_(2) if name == "out" else model.get_buffer(name).mul_(2)

    return run


BETWEEN: dict[str, Callable[[nn.Module], Any]] = {
    "another call": lambda model: model(-X), "evaluation": evaluate, "scale": write("scale"), "mean": write("mean"), "out": write("out"),
}  # fmt: skip


@pytest.mark.parametrize("execute", ["eager", "graph"])
def test_what_is_written_between_forward_and_backward_is_told_or_not_read(execute: Any) -> None:
    """What torch refuses is refused too, unless backward has a copy of its own: then gradients are right."""
    torch.manual_seed(0)
    model = Following()
    plan = autopar.plan(model, (X,), mesh={"dp": 1}, hardware="h100-sxm")
    reference = copy.deepcopy(model)
    reference(X).backward()
    wanted = reference.linear.weight.grad

    def rank_main(rank: int) -> dict[str, str]:
        said = {}
        for name, change in BETWEEN.items():
            module = autopar.compile(copy.deepcopy(model), plan, execute=execute)
            loss = module(X)
            change(module)
            try:
                loss.backward()
                said[name] = "right" if torch.allclose(module.linear.weight.grad.to_local(), wanted) else "wrong"
            except RuntimeError as error:
                said[name] = str(error)
        return said

    (said,) = run_ranks(rank_main, 1)
    assert said.pop("another call") == said.pop("mean") == "right"
    changed = {"evaluation": "scale", "scale": "scale", "out": "out"}
    assert said == {name: f"{changed[name]} was changed in place between the forward and the backward pass of this step" for name in said}
