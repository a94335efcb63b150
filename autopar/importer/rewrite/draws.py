"""Operators that draw random numbers, as arithmetic on the dialect's ``uniform``, ``normal`` and ``dropout``."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.dialect.noise import ALPHA

aten = torch.ops.aten


def draws(next_seed: Callable[[], int]) -> dict[Any, Callable[..., Any]]:
    """The rows of the replacement table; ``next_seed`` numbers the draws of one graph."""

    def uniform(like: Tensor) -> Tensor:
        return torch.ops.autopar.uniform.default(like.detach(), next_seed())

    def normal(like: Tensor) -> Tensor:
        return torch.ops.autopar.normal.default(like.detach(), next_seed())

    def empty(size: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(size, dtype=dtype, device="cpu")

    def dropout(x: Tensor, p: float, train: bool) -> Tensor:
        return torch.ops.autopar.dropout.default(x, p, next_seed())[0] if train and p > 0 else x

    def kept(shape: Sequence[int], like: Tensor, p: float) -> Tensor:
        """1 where an element is kept, 0 where not."""
        return torch.ops.autopar.dropout.default(torch.ones(shape, dtype=like.dtype, device="cpu"), p, next_seed())[1].to(like.dtype)

    def feature_dropout(x: Tensor, p: float, train: bool) -> Tensor:
        if not train or p == 0:
            return x
        return x * (kept(_channels(x), x, p) * (0.0 if p >= 1 else 1 / (1 - p)))

    def alpha(shape_of: Callable[[Tensor], Sequence[int]]) -> Callable[..., Tensor]:
        def alpha_dropout(x: Tensor, p: float, train: bool) -> Tensor:
            if not train or p == 0:
                return x
            if p >= 1:
                return x * 0.0
            scale = 1 / math.sqrt((ALPHA * ALPHA * p + 1) * (1 - p))
            noise = kept(shape_of(x), x, p)
            return x * (noise * scale) + (noise - 1) * (ALPHA * scale) + ALPHA * scale * p

        return alpha_dropout

    def whole_numbers(low: int, high: int, size: Sequence[int], dtype: torch.dtype | None) -> Tensor:
        return (uniform(empty(size, torch.float64)) * (high - low)).floor().to(dtype or torch.int64) + low

    functional: dict[Any, Callable[..., Any]] = {
        aten.dropout.default: dropout,
        aten.feature_dropout.default: feature_dropout,
        aten.alpha_dropout.default: alpha(lambda x: x.shape),
        aten.feature_alpha_dropout.default: alpha(_channels),
        aten.bernoulli.default: lambda p, **_: (uniform(p) < p).to(p.dtype),
        aten.bernoulli.p: lambda x, p, **_: (uniform(x) < p).to(x.dtype),
        aten.randn_like.default: lambda x, dtype=None, **_: normal(_as(x, dtype)),
        aten.rand_like.default: lambda x, dtype=None, **_: uniform(_as(x, dtype)),
        aten.randn.default: lambda size, dtype=None, **_: normal(empty(size, dtype)),
        aten.rand.default: lambda size, dtype=None, **_: uniform(empty(size, dtype)),
        # torch takes the gradients of torch.normal by its mean and deviation as zero
        aten.normal.float_float: lambda mean, std, size, dtype=None, **_: normal(empty(size, dtype)) * std + mean,
        aten.normal.Tensor_float: lambda mean, std=1.0, **_: normal(mean) * std + mean.detach(),
        aten.normal.float_Tensor: lambda mean, std, **_: normal(std) * std.detach() + mean,
        aten.normal.Tensor_Tensor: lambda mean, std, **_: normal(mean + std) * std.detach() + mean.detach(),
        aten.randint.default: lambda high, size, dtype=None, **_: whole_numbers(0, high, size, dtype),
        aten.randint.low: lambda low, high, size, dtype=None, **_: whole_numbers(low, high, size, dtype),
        aten.randperm.default: lambda n, **_: torch.sort(uniform(empty([n])), stable=True)[1],
    }
    written = {
        aten.dropout_.default: dropout,
        aten.feature_dropout_.default: functional[aten.feature_dropout.default],
        aten.alpha_dropout_.default: functional[aten.alpha_dropout.default],
        aten.feature_alpha_dropout_.default: functional[aten.feature_alpha_dropout.default],
        aten.normal_.default: lambda x, mean=0.0, std=1.0, **_: normal(x) * std + mean,
        aten.uniform_.default: lambda x, low=0.0, high=1.0, **_: uniform(x) * (high - low) + low,
        aten.bernoulli_.float: lambda x, p=0.5, **_: (uniform(_floating(x)) < p).to(x.dtype),
        aten.bernoulli_.Tensor: lambda x, p, **_: (uniform(p.expand(x.shape)) < p).to(x.dtype),
        aten.exponential_.default: lambda x, rate=1.0, **_: -torch.log1p(-uniform(x)) / rate,
    }
    return functional | {target: _in_place(function) for target, function in written.items()}


def _in_place(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The function's result written into its first argument."""

    def written(x: Tensor, *arguments: Any, **keywords: Any) -> Tensor:
        return x.copy_(function(x, *arguments, **keywords))

    return written


def _channels(x: Tensor) -> tuple[int, ...]:
    """The shape of a number for each sample and channel."""
    return (*x.shape[:2], *(1,) * (x.dim() - 2))


def _as(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    return x if dtype in (None, x.dtype) else torch.empty_like(x, dtype=dtype)


def _floating(x: Tensor) -> Tensor:
    return x if x.is_floating_point() else torch.empty_like(x, dtype=torch.float32)
