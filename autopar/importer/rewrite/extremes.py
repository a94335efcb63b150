"""The largest and smallest along a dim, and where they are: one operator of ours, which a split dim needs not be gathered for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def extreme(largest: bool) -> Callable[..., tuple[Tensor, Tensor]]:
    """``aten.max.dim`` and ``aten.min.dim``."""

    def replacement(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
        plain = torch.ops.aten.max.dim if largest else torch.ops.aten.min.dim
        if x.dim() == 0:
            return plain(x, dim, keepdim)  # type: ignore[no-any-return]
        return torch.ops.autopar.extreme.default(x, dim % x.dim(), keepdim, largest, 0)  # type: ignore[no-any-return]

    return replacement


def place(largest: bool) -> Callable[..., Tensor]:
    """``aten.argmax`` and ``aten.argmin``; without a dim, of all entries in order."""

    def replacement(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
        plain: Any = torch.ops.aten.argmax.default if largest else torch.ops.aten.argmin.default
        if x.dim() == 0 or dim is None:
            return plain(x, dim, keepdim)  # type: ignore[no-any-return]
        return torch.ops.autopar.extreme.default(x.detach(), dim % x.dim(), keepdim, largest, 0)[1]  # type: ignore[no-any-return]

    return replacement


def aminmax(x: Tensor, *, dim: int | None = None, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """``aten.aminmax``: both extremes, each by itself."""
    dims = [] if dim is None else [dim]
    return torch.ops.aten.amin.default(x, dims, keepdim), torch.ops.aten.amax.default(x, dims, keepdim)
