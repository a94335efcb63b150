"""Entries picked along a dim, and where they are: the largest and smallest, by one operator of ours, which a split dim needs not be
gathered for, and those of a certain rank, of which the gradient needs not be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from autopar.dialect.extreme import put_back


def extreme(largest: bool) -> Callable[..., tuple[Tensor, Tensor]]:
    """``aten.max.dim`` and ``aten.min.dim``."""

    def replacement(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
        plain = torch.ops.aten.max.dim if largest else torch.ops.aten.min.dim
        if x.dim() == 0:
            return plain(x, dim, keepdim)
        return torch.ops.autopar.extreme.default(x, dim % x.dim(), keepdim, largest, 0)

    return replacement


def place(largest: bool) -> Callable[..., Tensor]:
    """``aten.argmax`` and ``aten.argmin``; without a dim, of all entries in order."""

    def replacement(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
        plain: Any = torch.ops.aten.argmax.default if largest else torch.ops.aten.argmin.default
        if x.dim() == 0 or dim is None:
            return plain(x, dim, keepdim)
        return torch.ops.autopar.extreme.default(x.detach(), dim % x.dim(), keepdim, largest, 0)[1]

    return replacement


def aminmax(x: Tensor, *, dim: int | None = None, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """``aten.aminmax``: both extremes, each by itself."""
    dims = [] if dim is None else [dim]
    return torch.ops.aten.amin.default(x, dims, keepdim), torch.ops.aten.amax.default(x, dims, keepdim)


def ranked(plain: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    """``aten.median.dim`` and others that pick an entry by its rank."""

    def replacement(x: Tensor, dim: int = -1, keepdim: bool = False) -> tuple[Tensor, Tensor]:
        return _Picked.apply(x, lambda x: plain(x, dim, keepdim), dim, keepdim)

    return replacement


def kth_value(x: Tensor, k: int, dim: int = -1, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """``aten.kthvalue``."""
    return _Picked.apply(x, lambda x: torch.ops.aten.kthvalue.default(x, k, dim, keepdim), dim, keepdim)


class _Picked(torch.autograd.Function):
    """Picking needs the whole dim, putting the gradient back where the entry was does not."""

    @staticmethod
    def forward(
        context: Any, x: Tensor, pick: Callable[[Tensor], tuple[Tensor, Tensor]], dim: int, keepdim: bool
    ) -> tuple[Tensor, Tensor]:
        values, places = pick(x)
        context.shape, context.dim, context.keepdim = x.shape, dim, keepdim
        context.mark_non_differentiable(places)
        context.save_for_backward(places)
        return values, places

    @staticmethod
    def backward(context: Any, gradient: Tensor, _: Any) -> tuple[Tensor, None, None, None]:
        (places,) = context.saved_tensors
        found = gradient if not context.shape else put_back(gradient, places, context.shape[context.dim], context.dim, context.keepdim, 0)
        return found, None, None, None
