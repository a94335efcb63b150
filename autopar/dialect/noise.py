"""Random draws: ``autopar.uniform`` and ``autopar.normal``, and torch's own random operators as arithmetic on these and on dropout.

The numbers are a function of a seed in the graph and of the step. So replicas agree and shards differ, whatever the states of the ranks'
own generators. A random operator that is not in the table is refused when the graph is made.

A new random operator is defined here, with ``still``, the constant that it gives while runs are compared. It has a row with a ``seed`` in
``autopar.rules.table``. All else follows from these two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.dialect.dropout import generator, keep_all
from autopar.dialect.library import define

ALPHA = 1.7580993408473766
"""SELU's scale times its alpha: alpha dropout puts minus this in place of a dropped element."""
STILL_UNIFORM = 0.25
"""Every uniform number while runs are compared."""
STILL_NORMAL = 0.5
"""Every normal number while runs are compared."""


def _uniform(like: Tensor, seed: int) -> Tensor:
    """Numbers in [0, 1), of the tensor's shape and dtype."""
    return torch.rand(like.shape, dtype=like.dtype, device=like.device, generator=generator(like.device, seed))


def _normal(like: Tensor, seed: int) -> Tensor:
    """Numbers of mean 0 and variance 1, of the tensor's shape and dtype."""
    return torch.randn(like.shape, dtype=like.dtype, device=like.device, generator=generator(like.device, seed))


def _shapes(like: Tensor, seed: int) -> Tensor:
    return like.new_empty(like.shape)


def _still_uniform(like: Tensor, seed: int = 0) -> Tensor:
    return torch.full_like(like, STILL_UNIFORM)


def _still_normal(like: Tensor, seed: int = 0) -> Tensor:
    return torch.full_like(like, STILL_NORMAL)


define("uniform(Tensor like, int seed) -> Tensor", _uniform, _shapes, still=_still_uniform)
define("normal(Tensor like, int seed) -> Tensor", _normal, _shapes, still=_still_normal)


# --- torch's own operators ------------------------------------------------------------------------------------------------

aten = torch.ops.aten


@dataclass(frozen=True)
class Source:
    """Where random numbers come from.

    Args:
        uniform, normal: to a tensor, numbers of its shape and dtype.
        dropout: to a tensor and a probability, the tensor with elements dropped, and the mask of those kept.
    """

    uniform: Callable[[Tensor], Tensor]
    normal: Callable[[Tensor], Tensor]
    dropout: Callable[[Tensor, float], tuple[Tensor, Tensor]]


STILL_SOURCE = Source(_still_uniform, _still_normal, keep_all)
"""Constants."""


def seeded_source(next_seed: Callable[[], int]) -> Source:
    """Operators of the dialect; ``next_seed`` numbers the draws of one graph."""
    ours = torch.ops.autopar
    return Source(
        lambda like: ours.uniform.default(like.detach(), next_seed()),
        lambda like: ours.normal.default(like.detach(), next_seed()),
        lambda x, p: ours.dropout.default(x, p, next_seed()),
    )


def draws(source: Source) -> dict[Any, Callable[..., Any]]:
    """Each of torch's operators that draw, as a function of the same arguments, with numbers from the source."""

    uniform, normal = source.uniform, source.normal

    def empty(size: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(size, dtype=dtype, device="cpu")

    def dropout(x: Tensor, p: float, train: bool) -> Tensor:
        return source.dropout(x, p)[0] if train and p > 0 else x

    def kept(shape: Sequence[int], like: Tensor, p: float) -> Tensor:
        """1 where an element is kept, 0 where not."""
        return source.dropout(torch.ones(shape, dtype=like.dtype, device="cpu"), p)[1].to(like.dtype)

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

    def dropped(x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
        if train is False or p == 0:
            return x.clone(), torch.ones_like(x, dtype=torch.bool)
        return source.dropout(x, p)

    def multinomial(p: Tensor, count: int, replacement: bool = False, **_: Any) -> Tensor:
        if not replacement:
            return _chosen(p, count, uniform(p))
        return _chosen_again(p, uniform(empty([*p.shape[:-1], count], p.dtype)))

    def slopes(x: Tensor, lower: float, upper: float, train: bool) -> Tensor | float:
        return uniform(x) * (upper - lower) + lower if train else (lower + upper) / 2

    def rrelu(x: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, train: bool = False, **_: Any) -> Tensor:
        return torch.where(x > 0, x, x * slopes(x, lower, upper, train))

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
        aten.randint_like.default: lambda x, high, dtype=None, **_: whole_numbers(0, high, x.shape, dtype or x.dtype),
        aten.randint_like.low_dtype: lambda x, low, high, dtype=None, **_: whole_numbers(low, high, x.shape, dtype or x.dtype),
        aten.multinomial.default: multinomial,
        aten.rrelu.default: rrelu,
        aten.native_dropout.default: dropped,
        aten.randperm.default: lambda n, dtype=None, **_: torch.sort(uniform(empty([n])), stable=True)[1].to(dtype or torch.int64),
    }
    fills: dict[Any, Callable[..., Any]] = {
        (aten.normal_.default, aten.normal_functional.default): lambda x, mean=0.0, std=1.0, **_: normal(x) * std + mean,
        (aten.log_normal_.default, aten.log_normal.default): lambda x, mean=1.0, std=2.0, **_: (normal(x) * std + mean).exp(),
        (aten.uniform_.default, aten.uniform.default): lambda x, low=0.0, high=1.0, **_: uniform(x) * (high - low) + low,
        (aten.bernoulli_.float, None): lambda x, p=0.5, **_: (uniform(_floating(x)) < p).to(x.dtype),
        (aten.bernoulli_.Tensor, aten.bernoulli.Tensor): lambda x, p, **_: (uniform(p.expand(x.shape)) < p).to(x.dtype),
        (aten.exponential_.default, aten.exponential.default): lambda x, rate=1.0, **_: -torch.log1p(-uniform(x)) / rate,
        (aten.geometric_.default, aten.geometric.default): lambda x, p, **_: _tries(uniform(_floating(x)), p).to(x.dtype),
        (aten.cauchy_.default, aten.cauchy.default): lambda x, median=0.0, sigma=1.0, **_: _cauchy(uniform(x), median, sigma),
        (aten.random_.to, aten.random.to): lambda x, high, **_: whole_numbers(0, high, x.shape, x.dtype),
    }
    twins = ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout", "rrelu")
    written = {getattr(aten, f"{name}_").default: functional[getattr(aten, name).default] for name in twins}
    written |= {target: function for (target, _), function in fills.items()}
    functional |= {target: function for (_, target), function in fills.items() if target is not None}
    return functional | {target: _in_place(function) for target, function in written.items()}


def _chosen(p: Tensor, count: int, uniform: Tensor) -> Tensor:
    """``count`` indices into the last dim, none twice: the largest of the weights over exponential draws."""
    return (p / -torch.log1p(-uniform)).topk(count, -1)[1]


def _chosen_again(p: Tensor, uniform: Tensor) -> Tensor:
    """An index into the last dim of ``p`` for each draw, by where it falls among the summed weights."""
    sums = p.cumsum(-1)
    below = sums.unsqueeze(-2) <= (uniform * sums[..., -1:]).unsqueeze(-1)
    return below.sum(-1).clamp(max=p.shape[-1] - 1)


def _tries(uniform: Tensor, p: float) -> Tensor:
    """Tosses until the first success."""
    return (torch.log1p(-uniform) / math.log1p(-p)).ceil().clamp(min=1)


def _cauchy(uniform: Tensor, median: float, sigma: float) -> Tensor:
    return (math.pi * (uniform - 0.5)).tan() * sigma + median


def _in_place(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The function's result written into its first argument."""

    def written(x: Tensor, *arguments: Any, **keywords: Any) -> Tensor:
        with torch.set_grad_enabled(torch.is_grad_enabled() and not (x.is_leaf and x.requires_grad)):  # a module made in forward
            return x.copy_(function(x, *arguments, **keywords))

    return written


def _channels(x: Tensor) -> tuple[int, ...]:
    """The shape of a number for each sample and channel."""
    return (*x.shape[:2], *(1,) * (x.dim() - 2))


def _as(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    return x if dtype in (None, x.dtype) else torch.empty_like(x, dtype=dtype)


def _floating(x: Tensor) -> Tensor:
    return x if x.is_floating_point() else torch.empty_like(x, dtype=torch.float32)
