"""Means as sums over counts, and products whose gradient is made of products: what can be split along what it reduces.

A mean of parts is not a part of the mean. Means are taken apart below autograd, so that none is left whole, whichever operator or
gradient it is inside of; products where the model calls them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def mean(x: Tensor, dim: list[int] | int | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    """``sum / count`` with the whole count; half precision sums in float32, as ``aten.mean`` does."""
    dims = list(range(x.dim())) if dim is None or dim == [] else [dim] if isinstance(dim, int) else list(dim)
    result = dtype or x.dtype
    wide = torch.float32 if result in (torch.float16, torch.bfloat16) else result
    count = math.prod(x.shape[d] for d in dims)
    return (aten.sum.dim_IntList(x, dims, keepdim, dtype=wide) / count).to(result)


DECOMPOSITIONS: Mapping[Any, Callable[..., Tensor]] = {aten.mean.default: mean, aten.mean.dim: mean}
"""By operator, for ``torch_compat.trace_joint``."""


def product(x: Tensor, dim: int | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    """``aten.prod``, of all entries without a dim."""
    return _Product.apply(x if dtype is None else x.to(dtype), dim, keepdim)


class _Product(torch.autograd.Function):
    """torch goes backward by two cumulative products, which the whole dim is needed for. Here the factors beside one that is not 0 are the
    product over it, those beside the only 0 are the product without it, and beside one of several zeros there is another."""

    @staticmethod
    def forward(context: Any, x: Tensor, dim: int | None, keepdim: bool) -> Tensor:
        context.dim, context.keepdim = dim, keepdim
        context.save_for_backward(x)
        return _prod(x, dim, keepdim)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (x,), dim = context.saved_tensors, context.dim
        if dim is not None and not context.keepdim and x.dim():
            gradient = gradient.unsqueeze(dim)
        zero = x == 0
        others = torch.where(zero, 1, x)
        zeros = aten.sum.dim_IntList(zero, [] if dim is None else [dim], dim is not None, dtype=torch.int32)
        beside = torch.where(zero, zeros == 1, (zeros == 0) / others)
        return gradient * (_prod(others, dim, dim is not None) * beside).conj(), None, None


def _prod(x: Tensor, dim: int | None, keepdim: bool) -> Tensor:
    return aten.prod.default(x) if dim is None else aten.prod.dim_int(x, dim, keepdim)
