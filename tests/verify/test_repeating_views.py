"""Expansions, means and sums where every split pays: memory is as predicted, and values are reduced before they are expanded."""

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


def _squares(result: Tensor) -> Tensor:
    return result.square().mean()


def _plus(function: Callable[[Tensor], Tensor]) -> Function:
    """The product of input and parameter, with something made of it added."""

    def run(x: Tensor, p: Tensor) -> Tensor:
        product = x * p
        return product + function(product)

    return run


def _normed(x: Tensor, p: Tensor) -> Tensor:
    made = x * p
    return ((made - made.mean()) / (made.var() + 1).sqrt()).sin()


def _rows(made: Tensor) -> Tensor:
    """The mean of all rows in place of each."""
    return made.mean(0, keepdim=True).expand(made.shape)


def _both_ways(x: Tensor, expanded: Tensor) -> Tensor:
    """Three readers of an expansion, whole along one dim, along another, and along none."""
    return x * expanded + expanded.cumsum(0) + expanded.cumsum(1)


CASES: dict[str, tuple[tuple[int, ...], Function]] = {
    "mean": ((8,), _plus(torch.mean)),
    "sum": ((8,), _plus(lambda made: made.sum() * 1e-3)),
    "largest": ((8,), _plus(lambda made: -made.amax())),
    "root of squares": ((8,), lambda x, p: ((x * p) / (x * p).square().mean().sqrt()).sin()),
    "mean and variance": ((8,), _normed),
    "mean of two dims": ((8,), _plus(lambda made: made.mean((0, 2), keepdim=True))),
    "mean of rows": ((8,), _plus(lambda made: made.mean(0))),
    "mean of columns": ((8,), _plus(lambda made: made.mean(1, keepdim=True))),
    "mean of the last dim": ((8,), _plus(lambda made: made.mean(-1, keepdim=True))),
    "softmax by hand": ((8,), lambda x, p: (x * p).exp() / (x * p).exp().sum(-1, keepdim=True)),
    "turned": ((8,), lambda x, p: (x * p).transpose(0, 1) + (x * p).mean((1, 2), keepdim=True)),
    "expanded parameter": ((64, 1, 8), lambda x, p: x * p.expand(64, 64, 8)),
    "expanded matrix": ((1, 8, 8), lambda x, p: x @ p.expand(64, 8, 8)),
    "expanded rows beside": ((1, 4, 8), lambda x, p: torch.cat([x, p.expand(64, 4, 8)], 1)),
    "broadcast": ((8,), lambda x, p: torch.broadcast_to(p, (64, 64, 8)).cumsum(1) * x),
    "repeated": ((8, 8), lambda x, p: x * p.repeat(8, 1)),
    "repeated one by one": ((8, 8), lambda x, p: x * p.repeat_interleave(8, 0)),
    "grouped": ((8,), lambda x, p: ((x[:, :16] * p)[:, :, None].expand(64, 16, 4, 8).reshape(64, 64, 8) * x)),
    "product of a mean": ((8, 8), lambda x, p: (x @ p).mean(0, keepdim=True).expand(64, 64, 8) @ p * x),
    "windows": ((16, 4), lambda x, p: x.sin().unfold(1, 16, 8) @ p),
    "read along two dims": ((64, 1, 8), lambda x, p: _both_ways(x, p.expand(64, 64, 8))),
    "a scalar read along two dims": ((8,), lambda x, p: x + _both_ways(x, (x * p).mean().expand(64, 64, 8))),
    "two products": ((1, 8, 8), lambda x, p: x @ p.expand(64, 8, 8) + (x.transpose(0, 1) @ p.expand(64, 8, 8)).softmax(-1)),
    "group norm": ((8,), lambda x, p: nn.functional.group_norm(_rows(x * p), 4) * x),
    "instance norm": ((8,), lambda x, p: nn.functional.instance_norm(_rows(x * p)) * x),
    "batch norm": ((8,), lambda x, p: nn.functional.batch_norm(_rows(x * p), None, None, training=True) * x),
    "layer norm": ((8,), lambda x, p: nn.functional.layer_norm(_rows(x * p), (8,)) * x),
    "root-mean-square norm": ((8,), lambda x, p: nn.functional.rms_norm(_rows(x * p), (8,)) * x),
    "attention": ((8,), lambda x, p: nn.functional.scaled_dot_product_attention(*(made[:, None] for made in (x, _rows(x * p), x * p)))),
    "convolution": ((8, 64, 1), lambda x, p: nn.functional.conv1d(_rows(x.sin()), p) * x[:, :8]),
    "sorted": ((8,), lambda x, p: _rows(x * p).sort(1).values * x),
    "chosen": ((8,), lambda x, p: _rows(x * p)[torch.arange(63, -1, -1)] * x),
    "gathered": ((8,), lambda x, p: _rows(x * p).gather(1, torch.arange(64).remainder(7).view(1, 64, 1).expand(64, 64, 8)) * x),
    "chosen by element": ((8,), lambda x, p: torch.where(x > 0, (x * p).mean(), x)),
    "logarithm of a sum": ((8,), lambda x, p: x * p - torch.logsumexp(x * p, (0, 1, 2))),
    "expanded result": ((8,), lambda x, p: (x * p).mean(0, keepdim=True).expand(64, 64, 8)),
}
SCALARS = (
    "mean", "sum", "largest", "root of squares", "mean and variance",
    "a scalar read along two dims", "chosen by element", "logarithm of a sum",
)  # fmt: skip
"""The cases that reduce to scalars alone."""


class Module(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        shape, self.function = CASES[name]
        self.p = nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(0)))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.p)


def _target(name: str) -> Target:
    return Target(Module(name), (torch.randn(64, 64, 8, generator=torch.Generator().manual_seed(1)),), loss=_squares)


@pytest.mark.filterwarnings("ignore:no machine is like stress")
@pytest.mark.parametrize("name", CASES)
def test_memory_is_as_predicted_where_every_split_pays(name: str) -> None:
    target = _target(name)
    plan = autopar.plan(target.model, target.args, loss=target.loss, mesh="dp=2,tp=2", hardware=stressed())
    found = verify(plan, target, backend="simulate", steps=1)
    assert found.passed, found.problems
    assert found.measured_bytes == found.predicted_bytes
    assert check(plan) == ()
    if name in SCALARS:
        sizes = [part.bytes for row in plan.collectives for part in (row.parts or (row,))]
        assert sizes
        assert max(sizes) <= 8, "scalars: a sum, or in int64 how many are the largest"


@pytest.mark.filterwarnings("ignore:no machine is like stress")
def test_the_gradient_of_a_sum_takes_what_was_predicted_on_real_ranks() -> None:
    """Optimizers write into gradients: one that is a view of a scalar leaves as a copy."""

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.p, self.q = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(256, 256))

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.p).mean() + self.q.sum()

    model, x = Sum(), torch.randn(8, 8)
    plan = autopar.plan(model, (x,), mesh="2", hardware=stressed())
    found = verify(plan, (model, (x,)), backend="gloo", steps=1)
    assert found.passed, found.problems
    assert found.measured_bytes == found.predicted_bytes
