"""``autopar.embedding`` and ``autopar.nll_loss``: tables read by index, and their gradients.

All four take an ``offset``: the operand holds only rows (or classes) ``offset ... offset + its size`` of the whole table. Rows outside
contribute zero, so a split table gives a partial sum. ``offset`` is 0 in captured graphs. A rank with the whole table gives ``WHOLE``.
Then torch's own kernels run, which fail where an index is out of range.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import nll_loss

from autopar.dialect.library import WHOLE, define

OFFSETS: Mapping[str, int] = {
    "autopar.embedding.default": 2, "autopar.embedding_backward.default": 3,
    "autopar.nll_loss.default": 3, "autopar.nll_loss_backward.default": 4,
}  # fmt: skip
"""Position of the offset among each operator's arguments."""


def _window(indices: Tensor, offset: int, size: int) -> tuple[Tensor, Tensor]:
    """Which indices lie inside the window, and their places in it (0 for those outside)."""
    local = indices - offset
    inside = (local >= 0) & (local < size)
    return inside, torch.where(inside, local, 0)


def _embedding(weight: Tensor, indices: Tensor, offset: int) -> Tensor:
    if offset == WHOLE:
        return torch.embedding(weight, indices)
    inside, local = _window(indices, offset, weight.shape[0])
    rows = weight.index_select(0, local.reshape(-1)).reshape(*indices.shape, *weight.shape[1:])
    return rows.masked_fill_(~inside.unsqueeze(-1), 0)


def _embedding_shapes(weight: Tensor, indices: Tensor, offset: int) -> Tensor:
    return weight.new_empty([*indices.shape, *weight.shape[1:]])


def _embedding_backward(grad: Tensor, indices: Tensor, rows: int, offset: int, padding_idx: int) -> Tensor:
    if offset == WHOLE:
        return torch.ops.aten.embedding_dense_backward.default(grad, indices, rows, padding_idx, False)
    inside, local = _window(indices, offset, rows)
    if padding_idx >= 0:
        inside = inside & (indices != padding_idx)
    kept = grad.masked_fill(~inside.unsqueeze(-1), 0).reshape(indices.numel(), grad.shape[-1])  # whatever else it holds, NaN too
    return grad.new_zeros([rows, grad.shape[-1]]).index_add_(0, local.reshape(-1), kept)


def _embedding_backward_shapes(grad: Tensor, indices: Tensor, rows: int, offset: int, padding_idx: int) -> Tensor:
    return grad.new_empty([rows, grad.shape[-1]])


def _save_embedding(context: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    weight, indices, context.offset = inputs
    context.rows = weight.shape[0]
    context.save_for_backward(indices)


def _embedding_gradient(context: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    (indices,) = context.saved_tensors
    return torch.ops.autopar.embedding_backward.default(gradient, indices, context.rows, context.offset, -1), None, None


class PaddedEmbedding(torch.autograd.Function):
    """``autopar.embedding`` whose row ``padding_idx`` gets no gradient."""

    @staticmethod
    def forward(context: Any, weight: Tensor, indices: Tensor, padding_idx: int) -> Tensor:
        context.rows, context.padding_idx = weight.shape[0], padding_idx
        context.save_for_backward(indices)
        return torch.ops.autopar.embedding.default(weight, indices, 0)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (indices,) = context.saved_tensors
        backward = torch.ops.autopar.embedding_backward.default
        return backward(gradient, indices, context.rows, 0, context.padding_idx), None, None


def _nll_loss(logp: Tensor, target: Tensor, ignore_index: int, offset: int) -> Tensor:
    if offset == WHOLE:
        if target.dim() < 2:
            return nll_loss(logp, target, ignore_index=ignore_index, reduction="none")
        return nll_loss(logp.flatten(0, -2), target.flatten(), ignore_index=ignore_index, reduction="none").view(target.shape)
    inside, local = _window(target, offset, logp.shape[-1])
    picked = logp.gather(-1, local.unsqueeze(-1)).squeeze(-1)
    return torch.where(inside & (target != ignore_index), -picked, 0)


def _nll_loss_shapes(logp: Tensor, target: Tensor, ignore_index: int, offset: int) -> Tensor:
    return logp.new_empty(target.shape)


def _nll_loss_backward(grad: Tensor, target: Tensor, classes: int, ignore_index: int, offset: int) -> Tensor:
    if offset == WHOLE:
        return _nll_loss_backward_whole(grad, target, classes, ignore_index)
    inside, local = _window(target, offset, classes)
    kept = torch.where(inside & (target != ignore_index), -grad, 0)
    return grad.new_zeros([*target.shape, classes]).scatter_(-1, local.unsqueeze(-1), kept.unsqueeze(-1))


def _nll_loss_backward_whole(grad: Tensor, target: Tensor, classes: int, ignore_index: int) -> Tensor:
    """By torch's kernel, which asks for the input's shape alone: a scalar stands for it."""
    nothing, rows = grad.new_empty(()), target.flatten()
    like = nothing.expand(rows.numel(), classes)
    made = torch.ops.aten.nll_loss_backward.default(grad.flatten(), like, rows, None, 0, ignore_index, nothing)
    return made if target.dim() == 1 else made.view(*target.shape, classes)


def _nll_loss_backward_shapes(grad: Tensor, target: Tensor, classes: int, ignore_index: int, offset: int) -> Tensor:
    return grad.new_empty([*target.shape, classes])


def _save_nll_loss(context: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    logp, target, context.ignore_index, context.offset = inputs
    context.classes = logp.shape[-1]
    context.save_for_backward(target)


def _nll_loss_gradient(context: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
    (target,) = context.saved_tensors
    backward = torch.ops.autopar.nll_loss_backward.default
    return backward(gradient, target, context.classes, context.ignore_index, context.offset), None, None, None


define(
    "embedding(Tensor weight, Tensor indices, int offset) -> Tensor",
    _embedding, _embedding_shapes, _embedding_gradient, _save_embedding,
)  # fmt: skip
define(
    "embedding_backward(Tensor grad, Tensor indices, int rows, int offset, int padding_idx) -> Tensor",
    _embedding_backward, _embedding_backward_shapes,
)  # fmt: skip
define(
    "nll_loss(Tensor logp, Tensor target, int ignore_index, int offset) -> Tensor",
    _nll_loss, _nll_loss_shapes, _nll_loss_gradient, _save_nll_loss,
)  # fmt: skip
define(
    "nll_loss_backward(Tensor grad, Tensor target, int classes, int ignore_index, int offset) -> Tensor",
    _nll_loss_backward, _nll_loss_backward_shapes,
)  # fmt: skip
