"""Values that lie turned or with gaps where every split pays: memory is as predicted, also where collectives copy them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.check import check
from autopar.target import Target
from autopar.verify import verify
from benchmarks.models import stressed

Function = Callable[[Tensor, Tensor], Tensor]


class Joined(nn.Module):
    """A layer of a hidden layer beside inputs: the gradient of ``cat`` is a slice of columns, which is scattered."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 32), nn.Linear(35, 16)

    def forward(self, x: Tensor, beside: Tensor) -> Tensor:
        return self.second(torch.cat([self.first(x).relu(), beside], -1))


def _squares(result: Tensor) -> Tensor:
    return result.square().mean()


def _verify(target: Target) -> None:
    plan = autopar.plan(target.model, target.args, loss=target.loss, mesh="dp=2,tp=2", hardware=stressed())
    found = verify(plan, target, backend="simulate", steps=1)
    assert found.passed, found.problems
    assert found.measured_bytes == found.predicted_bytes
    assert check(plan) == ()


@pytest.mark.filterwarnings("ignore:no machine is like stress")
def test_a_slice_of_columns_is_copied_to_be_scattered() -> None:
    _verify(Target(Joined(), (torch.randn(8, 64, 8), torch.randn(8, 64, 3)), loss=_squares))


class Attention(nn.Module):
    """The kernel leaves its result turned, so that heads become one dim without a copy."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found = nn.functional.scaled_dot_product_attention(q, k, v)
        return found.transpose(1, 2).reshape(found.shape[0], found.shape[2], -1).sum(-1)


@pytest.mark.filterwarnings("ignore:no machine is like stress")
def test_a_view_of_what_was_gathered_in_order_is_a_copy() -> None:
    """Nothing else is as large as the gathered result and the copy of it."""
    target = Target(Attention(), tuple(torch.randn(8, 4, 32, 16) for _ in range(3)))
    pins = {**dict.fromkeys(("input:q", "input:k", "input:v"), "S0 R R R"), "op:attention": "R R R R", "op:view": "R R R"}
    plan = autopar.plan(target.model, target.args, mode="inference", mesh="2", hardware=stressed(), constraints=pins)
    assert [row.tensor for row in plan.reshards][:1] == ["attention"]
    found = verify(plan, target, backend="simulate", steps=1)
    assert found.passed and found.measured_bytes == found.predicted_bytes and check(plan) == ()


def _heads(x: Tensor, w: Tensor) -> Tensor:
    rows, length, width = x.shape
    q, k, v = (part.view(rows, length, 4, width // 4).transpose(1, 2) for part in (x @ w).split(width, -1))
    return nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape) * x


def _turned_products(x: Tensor, w: Tensor) -> Tensor:
    return ((x @ w).transpose(0, 1).sin() + (x * 2).transpose(0, 1)).cumsum(1).transpose(0, 1) * x


def _pairs(x: Tensor, w: Tensor) -> Tensor:
    made = x @ w
    return torch.stack([made[..., 0::2] * x[..., 1::2], made[..., 1::2]], -1).flatten(-2)


CASES: dict[str, tuple[tuple[int, ...], Function]] = {
    "halves": ((16, 32), lambda x, w: (lambda one, other: one * other.sigmoid())(*(x @ w).chunk(2, -1))),
    "heads": ((16, 48), _heads),
    "pairs": ((16, 16), _pairs),
    "turned results": ((16, 16), _turned_products),
    "one of two": ((16, 32), lambda x, w: (x @ w).view(64, 32, 16, 2).unbind(-1)[0].cumsum(0) * x),
    "some columns": ((16, 32), lambda x, w: (x @ w)[..., 4:20].softmax(1) * x),
    "pixels": ((16, 16), lambda x, w: nn.functional.pixel_shuffle((x @ w).transpose(1, 2).unflatten(-1, (4, 8)), 2)),
}


class Module(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        shape, self.function = CASES[name]
        self.w = nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.w)


@pytest.mark.filterwarnings("ignore:no machine is like stress")
@pytest.mark.parametrize("name", CASES)
def test_memory_is_as_predicted(name: str) -> None:
    _verify(Target(Module(name), (torch.randn(64, 32, 16, generator=torch.Generator().manual_seed(1)),), loss=_squares))
