"""Diagonals by the place of their first entry, so that a rank that has some of the rows finds its own; identities by comparison.

Taken apart below autograd, where writing to a view has become a new value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
autopar = torch.ops.autopar


def _place(shape: Sequence[int], offset: int, dim1: int, dim2: int) -> tuple[int, tuple[int, int, int, int]]:
    """How many entries, and (row, column, dim of rows, dim of columns), the dim with as many rows as entries before one with more."""
    row, column, dim1, dim2 = max(0, -offset), max(0, offset), dim1 % len(shape), dim2 % len(shape)
    length = max(0, min(shape[dim1] - row, shape[dim2] - column))
    if length == shape[dim2] != shape[dim1]:
        row, column, dim1, dim2 = column, row, dim2, dim1
    return length, (row, column, dim1, dim2)


def _diagonal(x: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    length, place = _place(x.shape, offset, dim1, dim2)
    return autopar.diagonal.default(x, length, *place)


def _backward(gradient: Tensor, input_sizes: Sequence[int], offset: int, dim1: int, dim2: int) -> Tensor:
    _, place = _place(input_sizes, offset, dim1, dim2)
    rows, columns = (input_sizes[dim] for dim in place[2:])
    return autopar.along_diagonal.default(gradient, rows, columns, *place)


def _embedded(x: Tensor, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Tensor:
    extent, dims = x.shape[-1] + abs(offset), x.dim() + 1
    shape = list(x.shape[:-1])
    for dim in sorted((dim1 % dims, dim2 % dims)):
        shape.insert(dim, extent)
    return _backward(x, shape, offset, dim1, dim2)


def _scattered(x: Tensor, source: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    _, place = _place(x.shape, offset, dim1, dim2)
    return autopar.on_diagonal.default(x, source, *place)


def _eye(rows: int, columns: int | None = None, *, dtype: torch.dtype | None = None, device: Any = None, **_: Any) -> Tensor:
    """One where the numbers of row and column are the same: rows and columns are then as free as those of any comparison."""
    first, second = (torch.arange(extent, device=device) for extent in (rows, rows if columns is None else columns))
    return (first.unsqueeze(-1) == second).to(torch.get_default_dtype() if dtype is None else dtype)


def trace(x: Tensor) -> Tensor:
    """``aten.trace``, whose own gradient is written by number of storage place."""
    return x.diagonal().sum()


DIAGONALS: Mapping[Any, Callable[..., Tensor]] = {
    aten.diagonal.default: _diagonal,
    aten.diagonal_copy.default: _diagonal,
    aten.diagonal_backward.default: _backward,
    aten.diagonal_scatter.default: _scattered,
    aten.diag_embed.default: _embedded,
    aten.eye.default: _eye,
    aten.eye.m: _eye,
}
