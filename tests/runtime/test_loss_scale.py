"""Scaled losses of several microbatches in float16: the step runs again where the scale is another one than backward began with."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import UsageError
from autopar.plan import Plan
from tests.runtime.test_training import on_ranks

X, Y = torch.randn(8, 8), torch.randn(8, 8)


def faint(outputs: Tensor, wanted: Tensor) -> Tensor:
    """Its gradients vanish in float16 unless they are scaled from the start."""
    return 1e-8 * (outputs - wanted).square().mean()


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))


@lru_cache
def plan_of(mesh: str) -> Plan:
    pins = {"input:input": "S0 R"} if mesh == "2" else None
    return autopar.plan(
        net(), (X,), loss=faint, loss_args=(Y,), mesh=mesh, hardware="cpu-cluster",
        compute_dtype="float16", microbatches=2, constraints=pins,
    )  # fmt: skip


def said(call: Callable[[], Any]) -> str:
    try:
        call()
    except (RuntimeError, UsageError) as error:
        return str(error)
    return ""


def off(module: Any, scale: float) -> float:
    """The largest distance of a gradient from the plain model's, by the largest number of that."""
    plain = net()
    faint(plain(X), Y).backward()
    pairs = [(one.grad.full_tensor() / scale, other.grad) for one, other in zip(module.parameters(), plain.parameters(), strict=True)]
    return max(((found - wanted).abs().max() / wanted.abs().max()).item() for found, wanted in pairs)


@pytest.mark.parametrize("scales", [(2.0**16, 2.0**15), (2.0**16, 1.0), (2.0**16, float("nan"))])
def test_ranks_that_scale_differently_are_refused(scales: tuple[float, ...]) -> None:
    """A rank that ran the step again waited for one that did not."""

    def run(rank: int) -> tuple[str, float]:
        module = autopar.compile(net(), plan_of("2"))
        words = said(lambda: (module(X, Y) * scales[rank]).backward())
        (module(X, Y) * 2.0**16).backward()
        return words, off(module, 2.0**16)

    for rank, (words, gap) in enumerate(on_ranks(run, 2)):
        assert words.startswith(f"rank {1 - rank} scales the loss by {scales[1 - rank]}, this rank by {scales[rank]}: gradients in float16")
        assert gap < 0.02


def test_no_number_is_the_same_scale_on_all_ranks() -> None:
    def run(rank: int) -> tuple[bool, float]:
        module = autopar.compile(net(), plan_of("2"))
        for _ in range(2):
            (module(X, Y) * float("nan")).backward()
        nothing = all(bool(parameter.grad.to_local().isnan().all()) for parameter in module.parameters())
        module.zero_grad()
        (module(X, Y) * 2.0**16).backward()
        return nothing, off(module, 2.0**16)

    assert all(nothing and gap < 0.02 for nothing, gap in on_ranks(run, 2))


CHANGES: dict[str, Callable[[Any, Tensor, Tensor], Any]] = {
    "input": lambda module, x, y: x.mul_(3),
    "wanted": lambda module, x, y: y.zero_(),
    "nothing": lambda module, x, y: None,
    "2.bias": lambda module, x, y: module.get_parameter("2.bias").mul_(5),
}


@pytest.mark.parametrize("name", ["input", "wanted", "2.bias"])
def test_what_the_step_reads_may_change_only_where_it_does_not_run_again(name: str) -> None:
    """One rank alone changes it, and all are told."""

    def run(rank: int) -> tuple[float, str]:
        module, (x, y) = autopar.compile(net(), plan_of("2")), (X.clone(), Y.clone())
        start, words = copy.deepcopy(module.state_dict()), list[str]()
        (module(x, y) * 2.0**16).backward()
        module.zero_grad()
        for scale in (2.0**16, 2.0**15):
            loss = module(x, y)
            with torch.no_grad():
                CHANGES[name if rank == 1 else "nothing"](module, x, y)
            words.append(said(lambda loss=loss, scale=scale: (loss * scale).backward()))
            x.copy_(X), y.copy_(Y), module.load_state_dict(start)
        return off(module, 2.0**16), "".join(words)

    for gap, words in on_ranks(run, 2):
        assert gap < 0.02 and words == f"{name} was changed in place between the forward and the backward pass of this step"


def test_inputs_made_in_inference_mode_are_taken(one_rank: None) -> None:
    module = autopar.compile(net(), plan_of("1"))
    with torch.inference_mode():
        x, y = X.clone(), Y.clone()
    (module(x, y) * 2.0**16).backward()
    assert off(module, 2.0**16) < 0.02
