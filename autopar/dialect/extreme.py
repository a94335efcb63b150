"""``autopar.extreme``: the largest or smallest value along a dim, and its first place.

Of a part of the dim it needs ``offset``, the place of the part's first entry; ``offset`` is 0 in captured graphs. Ranks that hold a
part each agree on the value first, then on the first place that has it: a row of statistics in place of the whole dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopar.dialect.library import define


def _extreme(x: Tensor, dim: int, keepdim: bool, largest: bool, offset: int) -> tuple[Tensor, Tensor]:
    values, places = x.max(dim, keepdim) if largest else x.min(dim, keepdim)
    return values, places + offset


def _extreme_shapes(x: Tensor, dim: int, keepdim: bool, largest: bool, offset: int) -> tuple[Tensor, Tensor]:
    shape = [size if at != dim % x.dim() else 1 for at, size in enumerate(x.shape) if keepdim or at != dim % x.dim()]
    return x.new_empty(shape), x.new_empty(shape, dtype=torch.int64)


def _save(context: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, context.dim, context.keepdim, _, context.offset = inputs
    context.size = x.shape[context.dim]
    context.mark_non_differentiable(output[1])
    context.save_for_backward(output[1])


def _gradient(context: Any, gradient: Tensor, _: Any) -> tuple[Tensor, None, None, None, None]:
    (places,) = context.saved_tensors
    return put_back(gradient, places, context.size, context.dim, context.keepdim, context.offset), None, None, None, None


def put_back(gradient: Tensor, places: Tensor, size: int, dim: int, keepdim: bool, offset: int) -> Tensor:
    """The gradient where the value was found along a dim of so many entries, as that of a picked class."""
    if keepdim:
        gradient, places = gradient.squeeze(dim), places.squeeze(dim)
    return torch.ops.autopar.nll_loss_backward.default(-gradient, places, size, -1, offset).movedim(-1, dim)


define(
    "extreme(Tensor x, int dim, bool keepdim, bool largest, int offset) -> (Tensor, Tensor)",
    _extreme, _extreme_shapes, _gradient, _save,
)  # fmt: skip
