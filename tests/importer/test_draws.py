"""Everything that draws has a seed in the graph, or is refused; what is drawn has torch's distribution."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar import torch_compat
from autopar.dialect.noise import draws, seeded_source
from autopar.errors import CaptureError
from autopar.importer import capture


class Drawing(nn.Module):
    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.draw = nn.Linear(6, 6), draw

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x) * self.draw(x)).mean()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.LSTM(6, 6, 2, dropout=0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)[0]


SEEDED: dict[str, Callable[[Tensor], Tensor]] = {
    "randint_like": lambda x: torch.randint_like(x, 9),
    "randint_like between": lambda x: torch.randint_like(x, 2, 9),
    "multinomial": lambda x: torch.multinomial(x.abs() + 1, 2).sum(-1, keepdim=True),
    "multinomial again": lambda x: torch.multinomial(x.abs() + 1, 8, replacement=True).sum(-1, keepdim=True),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "random": lambda x: torch.empty_like(x).random_(9),
    "random between": lambda x: torch.empty_like(x).random_(2, 9),
    "random between, by name": lambda x: torch.empty_like(x).random_(2, to=9),
    "of no generator": lambda x: torch.randn(x.shape, generator=None),
    "integers of no generator": lambda x: torch.randint(0, 9, x.shape, generator=None),
    "an order of no generator": lambda x: torch.randperm(6, generator=None),
    "of torch's own generator": lambda x: torch.rand(6, generator=torch.default_generator),
    "log normal": lambda x: torch.empty_like(x).log_normal_(),
    "geometric": lambda x: torch.empty_like(x).geometric_(0.5),
    "cauchy": lambda x: torch.empty_like(x).cauchy_(),
    "native dropout": lambda x: torch.native_dropout(x, 0.5, True)[0],
    "recurrent dropout": Recurrent(),
    "gumbel": lambda x: F.gumbel_softmax(x, hard=True),
    "fractional pool": lambda x: F.fractional_max_pool2d(x.expand(1, 1, 4, 6), 2, (2, 2)).sum(),
}


@pytest.mark.parametrize("draw", SEEDED.values(), ids=SEEDED)
def test_what_draws_has_a_seed(draw: Callable[[Tensor], Tensor]) -> None:
    graph = capture(Drawing(draw), (torch.randn(4, 6),)).graph
    seeds = [op.args[-1] for op in graph.ops if op.target.startswith(("autopar.uniform", "autopar.normal", "autopar.dropout"))]
    assert seeds and len(set(seeds)) == len(seeds)


@pytest.mark.parametrize("draw", [torch.poisson, torch._standard_gamma], ids=["poisson", "gamma"])
def test_what_draws_without_a_seed_is_refused_at_its_line(draw: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(CaptureError, match=r"test_draws.py:\d+: aten\.\w+\.default draws random numbers from no seed"):
        capture(Drawing(lambda x: draw(x.abs())), (torch.randn(4, 6),))


P = torch.tensor([0.1, 0.2, 0.3, 0.4]).expand(4000, 4)
DISTRIBUTIONS: dict[str, tuple[str, Callable[[], tuple[object, ...]], Callable[[Tensor], float], float]] = {
    "chosen": ("multinomial.default", lambda: (P, 1), lambda x: (x == 3).double().mean().item(), 0.4),
    "second choice": ("multinomial.default", lambda: (P, 2), lambda x: (x[:, 1] == 3).double().mean().item(), 0.2937),
    "chosen again": ("multinomial.default", lambda: (P, 5, True), lambda x: (x == 0).double().mean().item(), 0.1),
    "tries": ("geometric.default", lambda: (torch.empty(20000), 0.25), lambda x: x.mean().item(), 4.0),
    "log normal": ("log_normal.default", lambda: (torch.empty(20000), 0.0, 0.5), lambda x: x.mean().item(), 1.1331),
    "cauchy": ("cauchy.default", lambda: (torch.empty(20000), 1.0, 2.0), lambda x: x.median().item(), 1.0),
    "whole numbers": ("randint_like.low_dtype", lambda: (torch.empty(20000), 2, 9), lambda x: x.mean().item(), 5.0),
    "slopes": ("rrelu.default", lambda: (-torch.ones(20000), 0.1, 0.3, True), lambda x: x.mean().item(), -0.2),
}
"""An operator, its arguments, a statistic of what it draws, and that statistic's expectation."""


@pytest.mark.parametrize(("name", "arguments", "statistic", "expected"), DISTRIBUTIONS.values(), ids=DISTRIBUTIONS)
def test_draws_have_torchs_distribution(
    name: str, arguments: Callable[[], tuple[object, ...]], statistic: Callable[[Tensor], float], expected: float
) -> None:
    packet, overload = name.split(".")
    operator = getattr(getattr(torch.ops.aten, packet), overload)
    assert torch_compat.draws(operator)
    torch.manual_seed(0)
    for function in (draws(seeded_source(lambda: 1))[operator], operator):
        assert statistic(function(*arguments())) == pytest.approx(expected, abs=0.1 * abs(expected))
