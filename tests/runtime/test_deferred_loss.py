"""The loss that is waited for when it is read: it is a loss like any other, and nobody waits before."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from autopar.runtime import compile_schedule
from autopar.runtime.execution.loss_tail import loss_tail
from autopar.runtime.steps.deferred_loss import Arrival, LateTensor
from autopar.schedule import Schedule
from autopar.search import find_plan
from autopar.verify.launch import run_ranks
from tests.graphs import machine
from tests.runtime.test_module import X, Y, loss, net


def split_batch(errors: str = "S0 R") -> Schedule:
    """The batch split over two ranks: the loss is a sum over them, or of all errors, which each rank gathers then."""
    pins = {"input:x": "S0 R", "input:wanted": "S0 R", "op:tanh": "S0 R", "op:pow": errors, "op:mul_1": "S0 R"}
    return find_plan(net().captured.graph, machine("dp=2"), constraints=pins, baselines=False).schedule


def torch_saved(value: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save(value.detach(), file)
    return torch.load(io.BytesIO(file.getvalue()))


def all_reduced(value: Tensor) -> Tensor:
    copied = value.detach().clone()
    dist.all_reduce(copied)
    return copied / 2


def divided(value: Tensor) -> Tensor:
    value = value.detach()
    value /= 2
    return value * 2


USES: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda value: value.item(),
    "float": lambda value: float(value.detach()),
    "format": lambda value: float(f"{value:.17g}"),
    "repr": lambda value: float(repr(value.detach()).removeprefix("tensor(").split(",")[0].rstrip(")")),
    "numpy": lambda value: value.detach().numpy(),
    "tolist": lambda value: value.tolist(),
    "compare": lambda value: value.item() if value < math.inf and not value.isnan() else math.nan,
    "times": lambda value: (value * 3 / 3).item(),
    "stack": lambda value: torch.stack([value.detach(), value.detach()])[1],
    "deepcopy": lambda value: copy.deepcopy(value.detach()),
    "save": torch_saved,
    "to": lambda value: value.to(torch.float64).cpu(),
    "divided in place": divided,
    "all_reduce": all_reduced,
    "function": lambda value: torch.nan_to_num(value),
}


@pytest.mark.parametrize("errors", ["S0 R", "R R"])
def test_a_late_loss_is_a_loss(errors: str) -> None:
    schedule = split_batch(errors)
    wanted = loss(net().model(X), Y).item()

    def run(_: int) -> dict[str, Any]:
        module = compile_schedule(net().model, schedule, net().captured.constants)
        found = {}
        for name, use in USES.items():
            value = module(X, Y)
            assert isinstance(value, LateTensor) and value.requires_grad and value.shape == () and value.dtype == torch.float64
            used = use(value)
            found[name] = used.item() if isinstance(used, Tensor) else float(used)
            module.zero_grad()
            value.backward()
        return found

    for found in run_ranks(run, 2):
        assert found == pytest.approx(dict.fromkeys(USES, wanted), rel=1e-4)
        assert {name: value for name, value in found.items() if name != "repr"} == pytest.approx(
            dict.fromkeys(USES.keys() - {"repr"}, wanted), rel=1e-12
        )


def test_backward_and_its_history_need_no_value() -> None:
    """Only what reads the value asks for it."""
    asked = []

    def wait() -> Tensor:
        asked.append(1)
        return torch.tensor(3.0)

    class Made(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return LateTensor(Arrival(wait), torch.empty(()))

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            assert type(gradient) is Tensor
            return gradient * 2

    x = torch.ones((), requires_grad=True)
    value = Made.apply(x)
    kept = value.detach()
    value.backward()
    assert x.grad == 2 and not asked and not kept.requires_grad
    assert kept == 3 and value == 3 and len(asked) == 1
    x.grad = None
    (Made.apply(x) * 5).backward()
    assert x.grad == 10


def test_what_only_the_loss_asks_for_is_the_tail() -> None:
    """Not what reads a tensor of the user's, which may be another one by then."""
    schedule = split_batch("R R")
    late = [schedule.instructions[place] for place in loss_tail(schedule).places]
    assert [item.kind if item.kind == "wait" else item.of for item in late] == ["wait", "sum", "div"]
    place = next(index for index, item in enumerate(schedule.instructions) if item.of == "div")
    instructions = list(schedule.instructions)
    instructions[place] = instructions[place]._replace(reads=("sum", "up.bias"))
    assert not loss_tail(replace(schedule, instructions=tuple(instructions))).places


@pytest.mark.parametrize("errors", ["S0 R", "R R"])
def test_a_rank_goes_on_to_backward_before_the_others_have_a_loss(errors: str) -> None:
    """The second rank begins when it hears that the first one's forward has ended: nobody waits for the loss. Inputs were compared in the
    two calls before, and are not in the third."""
    schedule, word = split_batch(errors), torch.zeros(1)

    def run(rank: int) -> float:
        module = compile_schedule(net().model, schedule, net().captured.constants)
        for _ in range(2):
            module(X, Y).item()
        if rank:
            dist.recv(word, 0)
        value = module(X, Y)
        if not rank:
            dist.send(word, 1)
        value.backward()
        return value.item()

    assert run_ranks(run, 2) == pytest.approx([loss(net().model(X), Y).item()] * 2)
