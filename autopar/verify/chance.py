"""Chance left out: what a model draws is a constant on one device, as it is on the ranks (``runtime.still``).

Dropout is off in the sense that it drops nothing: every element is kept and still scaled by ``1 / (1 - p)``. The captured backward
has that scale baked in, and so the plan's graph, and its hash, stay what they are. What else a model draws is a constant.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from autopar.dialect.noise import ALPHA
from autopar.importer.rewrite.draws import chosen, chosen_again
from autopar.runtime.still import STILL_NORMAL, STILL_UNIFORM
from autopar.torch_compat import autocast_on_cpu, replaced_on_cpu, replaced_operators


@contextmanager
def without_chance() -> Iterator[None]:
    """Within it, torch's random operators draw on the CPU what ``still.STILL`` draws on the ranks, and autocast is the CPU's."""
    kept = {"dropout": _keep_all, "feature_dropout": _keep_all, "alpha_dropout": _keep_all_alpha, "feature_alpha_dropout": _keep_all_alpha}
    with ExitStack() as stack:
        for name, function in kept.items():
            stack.enter_context(replaced_on_cpu(name, function))
            stack.enter_context(replaced_on_cpu(f"{name}_", lambda x, p, train, function=function: x.copy_(function(x, p, train))))
        stack.enter_context(replaced_operators(STILL_DRAWS))
        stack.enter_context(autocast_on_cpu())
        yield


def _keep_all(x: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """Dropout that drops nothing."""
    return x * (0.0 if p >= 1 else 1 / (1 - p)) if train and p > 0 else x


def _keep_all_alpha(x: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """Alpha dropout that drops nothing."""
    if not train or p == 0:
        return x
    scale = 0.0 if p >= 1 else 1 / math.sqrt((ALPHA * ALPHA * p + 1) * (1 - p))
    return x * scale + ALPHA * scale * p


def _whole(low: int, high: int, size: Sequence[int], dtype: torch.dtype | None) -> torch.Tensor:
    return torch.full(size, low + math.floor(STILL_UNIFORM * (high - low)), dtype=dtype or torch.int64)


def _drawn(p: torch.Tensor, count: int, replacement: bool) -> torch.Tensor:
    if not replacement:
        return chosen(p, count, torch.full_like(p, STILL_UNIFORM))
    return chosen_again(p, torch.full([*p.shape[:-1], count], STILL_UNIFORM, dtype=p.dtype))


def _leaky(x: torch.Tensor, noise: torch.Tensor, lower: float = 1 / 8, upper: float = 1 / 3, train: bool = False) -> torch.Tensor:
    """RReLU with one slope for all; ``noise`` keeps the slopes for its backward."""
    slope = STILL_UNIFORM * (upper - lower) + lower if train else (lower + upper) / 2
    noise.copy_(torch.where(x > 0, 1.0, slope))
    return x * noise


aten = torch.ops.aten
STILL_DRAWS: Mapping[Any, Callable[..., Any]] = {
    aten.randn_like.default: lambda x, dtype=None, **_: torch.full_like(x, STILL_NORMAL, dtype=dtype),
    aten.rand_like.default: lambda x, dtype=None, **_: torch.full_like(x, STILL_UNIFORM, dtype=dtype),
    aten.randn.default: lambda size, dtype=None, **_: torch.full(size, STILL_NORMAL, dtype=dtype),
    aten.rand.default: lambda size, dtype=None, **_: torch.full(size, STILL_UNIFORM, dtype=dtype),
    aten.bernoulli.default: lambda p, **_: (p > STILL_UNIFORM).to(p.dtype),
    aten.bernoulli.p: lambda x, p, **_: torch.full_like(x, float(p > STILL_UNIFORM)),
    aten.bernoulli_.float: lambda x, p=0.5, **_: x.fill_(float(p > STILL_UNIFORM)),
    aten.bernoulli_.Tensor: lambda x, p, **_: x.copy_(p > STILL_UNIFORM),
    aten.normal_.default: lambda x, mean=0.0, std=1.0, **_: x.fill_(STILL_NORMAL * std + mean),
    aten.uniform_.default: lambda x, low=0.0, high=1.0, **_: x.fill_(STILL_UNIFORM * (high - low) + low),
    aten.exponential_.default: lambda x, rate=1.0, **_: x.fill_(-math.log1p(-STILL_UNIFORM) / rate),
    aten.normal.float_float: lambda mean, std, size, dtype=None, **_: torch.full(size, STILL_NORMAL * std + mean, dtype=dtype),
    aten.normal.Tensor_float: lambda mean, std=1.0, **_: mean + STILL_NORMAL * std,
    aten.normal.float_Tensor: lambda mean, std, **_: std * STILL_NORMAL + mean,
    aten.normal.Tensor_Tensor: lambda mean, std, **_: mean + STILL_NORMAL * std,
    aten.randint.default: lambda high, size, dtype=None, **_: _whole(0, high, size, dtype),
    aten.randint.low: lambda low, high, size, dtype=None, **_: _whole(low, high, size, dtype),
    aten.randint_like.default: lambda x, high, dtype=None, **_: _whole(0, high, x.shape, dtype or x.dtype),
    aten.randint_like.low_dtype: lambda x, low, high, dtype=None, **_: _whole(low, high, x.shape, dtype or x.dtype),
    aten.random_.to: lambda x, high, **_: x.copy_(_whole(0, high, x.shape, x.dtype)),
    aten.log_normal_.default: lambda x, mean=1.0, std=2.0, **_: x.fill_(math.exp(STILL_NORMAL * std + mean)),
    aten.geometric_.default: lambda x, p, **_: x.fill_(max(1, math.ceil(math.log1p(-STILL_UNIFORM) / math.log1p(-p)))),
    aten.cauchy_.default: lambda x, median=0.0, sigma=1.0, **_: x.fill_(median + sigma * math.tan(math.pi * (STILL_UNIFORM - 0.5))),
    aten.native_dropout.default: lambda x, p, train: (_keep_all(x, p, train is not False), torch.ones_like(x, dtype=torch.bool)),
    aten.multinomial.default: lambda p, count, replacement=False, **_: _drawn(p, count, replacement),
    aten.rrelu_with_noise.default: lambda x, noise, *settings, **_: _leaky(x, noise, *settings),
    aten.rrelu_with_noise_.default: lambda x, noise, *settings, **_: x.copy_(_leaky(x, noise, *settings)),
    aten.randperm.default: lambda n, dtype=None, **_: torch.arange(n, dtype=dtype or torch.int64),
}
"""torch's own operators that draw, with the constants in place of the draws."""
