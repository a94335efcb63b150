"""``autopar.diagonal``: the entries along a diagonal, the matrix of them with zeros beside, and a matrix with others in their place.

Entry ``i`` lies in row ``row + i`` and column ``column + i`` of what a rank has of both dims; one that lies outside belongs to another
rank: it is read as zero and written nowhere. In captured graphs all lie inside.
"""

from __future__ import annotations

import torch
from torch import Tensor

from autopar.dialect.library import define


def _within(x: Tensor, length: int, row: int, column: int, dim1: int, dim2: int) -> tuple[Tensor, int, int]:
    """A view of those entries that ``x`` has, last, and the numbers of the first of them and of the one behind them."""
    begin = max(0, -row, -column)
    end = min(length, x.shape[dim1] - row, x.shape[dim2] - column)
    if begin >= end:
        return x.diagonal(0, dim1, dim2)[..., :0], 0, 0
    block = x.narrow(dim1, row + begin, end - begin).narrow(dim2, column + begin, end - begin)
    return block.diagonal(0, dim1, dim2), begin, end


def _diagonal(x: Tensor, length: int, row: int, column: int, dim1: int, dim2: int) -> Tensor:
    found, begin, end = _within(x, length, row, column, dim1, dim2)
    if (begin, end) == (0, length):
        return found.clone(memory_format=torch.contiguous_format)
    result = x.new_zeros([*found.shape[:-1], length])
    result[..., begin:end] = found
    return result


def _diagonal_shapes(x: Tensor, length: int, row: int, column: int, dim1: int, dim2: int) -> Tensor:
    return x.new_empty([*(extent for dim, extent in enumerate(x.shape) if dim not in (dim1, dim2)), length])


def _along_diagonal(values: Tensor, rows: int, columns: int, row: int, column: int, dim1: int, dim2: int) -> Tensor:
    result = torch.zeros_like(_along_diagonal_shapes(values, rows, columns, row, column, dim1, dim2))
    place, begin, end = _within(result, values.shape[-1], row, column, dim1, dim2)
    place.copy_(values[..., begin:end])
    return result


def _along_diagonal_shapes(values: Tensor, rows: int, columns: int, row: int, column: int, dim1: int, dim2: int) -> Tensor:
    shape = list(values.shape[:-1])
    for dim, extent in sorted(((dim1, rows), (dim2, columns))):
        shape.insert(dim, extent)
    return values.new_empty(shape)


def _on_diagonal(x: Tensor, values: Tensor, row: int, column: int, dim1: int, dim2: int) -> Tensor:
    result = x.clone(memory_format=torch.contiguous_format)
    place, begin, end = _within(result, values.shape[-1], row, column, dim1, dim2)
    place.copy_(values[..., begin:end])
    return result


def _on_diagonal_shapes(x: Tensor, values: Tensor, row: int, column: int, dim1: int, dim2: int) -> Tensor:
    return x.new_empty(x.shape)


define("diagonal(Tensor x, int length, int row, int column, int dim1, int dim2) -> Tensor", _diagonal, _diagonal_shapes)
define(
    "along_diagonal(Tensor values, int rows, int columns, int row, int column, int dim1, int dim2) -> Tensor",
    _along_diagonal, _along_diagonal_shapes,
)  # fmt: skip
define("on_diagonal(Tensor x, Tensor values, int row, int column, int dim1, int dim2) -> Tensor", _on_diagonal, _on_diagonal_shapes)
