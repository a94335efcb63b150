"""Gradients are where autograd puts them, and as often, whatever is asked of the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autopar
from autopar.verify.launch import run_ranks
from benchmarks.host import counted_kernels

X, Y = torch.rand(4, 6, dtype=torch.float64), torch.rand(4, 6, dtype=torch.float64)
Found = list[Tensor | None]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)).double()


def mse(out: Tensor, wanted: Tensor) -> Tensor:
    return (out - wanted).square().mean()


def held(model: nn.Module) -> Found:
    return [parameter.grad for parameter in model.parameters()]


def once(model: nn.Module, loss: Callable[[], Tensor]) -> Found:
    loss().backward()
    return held(model)


def twice(model: nn.Module, loss: Callable[[], Tensor]) -> Found:
    loss().backward()
    first = [one.clone() for one in held(model) if one is not None]
    loss().backward()
    return [*first, *held(model)]


def kept(model: nn.Module, loss: Callable[[], Tensor]) -> Found:
    value = loss()
    value.backward(retain_graph=True)
    value.backward()
    return held(model)


def two_calls(model: nn.Module, loss: Callable[[], Tensor]) -> Found:
    (loss() + 2 * loss()).backward()
    return held(model)


def asked(model: nn.Module, loss: Callable[[], Tensor]) -> Found:
    """None of them is stored."""
    return [*torch.autograd.grad(loss(), list(model.parameters())), *held(model)]


def inputs(model: nn.Module, loss: Callable[[], Tensor]) -> Found:
    loss().backward(inputs=list(model.parameters())[:2])
    return held(model)


def hooked(model: nn.Module, loss: Callable[[], Tensor]) -> Found:
    for parameter in list(model.parameters())[:2]:
        parameter.register_hook(lambda gradient: 3 * gradient)
    return once(model, loss)


def hooked_after(model: nn.Module, loss: Callable[[], Tensor]) -> Found:
    seen: Found = []

    def take(parameter: Tensor) -> None:
        seen.append(parameter.grad)
        parameter.grad = None

    for parameter in list(model.parameters())[:2]:
        parameter.register_post_accumulate_grad_hook(take)
    found = once(model, loss)
    return [*sorted(seen, key=lambda one: -1 if one is None else one.dim()), *found]


def hooked_where_it_is_added(model: nn.Module, loss: Callable[[], Tensor]) -> Found:
    """What DistributedDataParallel does, and optimizers within backward."""
    seen: dict[int, Tensor | None] = {}
    parameters = list(model.parameters())
    nodes = [torch.autograd.graph.get_gradient_edge(one).node for one in parameters]
    for number, node in enumerate(nodes):
        node.register_hook(lambda *_, number=number: seen.update({number: parameters[number].grad}))
    once(model, loss)
    return [seen[number] for number in range(len(nodes))]


def frozen(model: nn.Module, loss: Callable[[], Tensor]) -> Found:
    next(model.parameters()).requires_grad_(False)
    return once(model, loss)


def frozen_between(model: nn.Module, loss: Callable[[], Tensor]) -> Found:
    value = loss()
    next(model.parameters()).requires_grad_(False)
    value.backward()
    return held(model)


WAYS = (once, twice, kept, two_calls, asked, inputs, hooked, hooked_after, hooked_where_it_is_added, frozen, frozen_between)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_gradients_are_those_of_the_plain_model(way: Callable[[nn.Module, Callable[[], Tensor]], Found]) -> None:
    plain = net()
    wanted = way(plain, lambda: mse(plain(X), Y))
    plan = autopar.plan(net(), (X,), loss=mse, loss_args=(Y,), mesh="1", hardware="cpu-cluster")

    def run(rank: int) -> list[Any]:
        module = autopar.compile(net(), plan)
        return [one.full_tensor() if isinstance(one, DTensor) else one for one in way(module, lambda: module(X, Y))]

    (found,) = run_ranks(run, 1)
    assert [one is None for one in found] == [one is None for one in wanted]
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


def test_autograd_detaches_gradients_with_hooks_alone() -> None:
    """Of a step after ``zero_grad`` on a CPU none."""
    plan = autopar.plan(net(), (X,), loss=mse, loss_args=(Y,), mesh="1", hardware="cpu-cluster")

    def run(rank: int) -> list[int]:
        module, count = autopar.compile(net(), plan), 0
        handlers = DTensor._op_dispatcher._custom_op_handlers
        plain = handlers[torch.ops.aten.detach.default]

        def detach(*given: Any) -> Any:
            nonlocal count
            count += 1
            return plain(*given)

        handlers[torch.ops.aten.detach.default] = detach
        counts = []
        for way in (once, hooked):
            module.zero_grad()
            count = 0
            way(module, lambda: module(X, Y))
            counts.append(count)
        return counts

    assert run_ranks(run, 1) == [[0, 2]]


class Sloped(nn.Module):
    """The gradient of ``alone`` is that of the loss, and the gradient of ``row`` is a view of it."""

    def __init__(self) -> None:
        super().__init__()
        self.alone, self.row = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": self.alone + self.row.sum() + x.sum()}


@pytest.mark.parametrize("number", [1.0, 0.5])
def test_a_gradient_that_backward_is_given_stays_the_caller_s(number: float) -> None:
    x = torch.ones(2)
    plan = autopar.plan(Sloped(), (x,), mesh="1", hardware="cpu-cluster")

    def run(rank: int) -> tuple[float, list[Tensor]]:
        module, given = autopar.compile(Sloped(), plan), torch.tensor(number)
        module(x)["loss"].backward(gradient=given)
        found = [parameter.grad.full_tensor().clone() for parameter in module.parameters()]
        for parameter in module.parameters():
            parameter.grad.zero_()
        return given.item(), found

    ((given, (alone, row)),) = run_ranks(run, 1)
    assert (given, alone.item(), row.tolist()) == (number, number, [number] * 3)


def test_backward_begins_with_the_given_gradient_as_it_is() -> None:
    """No kernel makes a one and multiplies it."""
    plan = autopar.plan(net(), (X,), loss=mse, loss_args=(Y,), mesh="1", hardware="cpu-cluster")

    def run(rank: int) -> set[str]:
        module = autopar.compile(net(), plan)
        loss, given = module(X, Y), torch.ones((), dtype=torch.float64)
        with counted_kernels() as found:
            loss.backward(gradient=given)
        return {name for name in found if name.startswith(("full", "ones", "_to_copy"))}

    assert run_ranks(run, 1) == [set()]
