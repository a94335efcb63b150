"""The collectives that a model calls itself, as operators on the values of all ranks: dim 0 of their input is the ranks.

``over`` says over which axes of the mesh that dim lies (``autopar.sharding.AxisLayout``): on a mesh each rank has its own value, and the
operator is the collective. Whole, it is what the collective means. With ``n`` ranks:

    all_gather      [n, ...] -> [n, ...]        every rank has all of it
    all_reduce      [n, ...] -> [...]           ``reduction`` over the ranks, sum, max or min; every rank has it
    reduce_scatter  [n, n, ...] -> [n, ...]     summed over the ranks; dim 1 is whose part it becomes
    all_to_all      [n, n, ...] -> [n, n, ...]  by who sends and who receives -> by who receives and who sent

Gradients are those of the whole operators, and free to be planned.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopar.dialect.library import define

Gradients = tuple[Tensor | None, ...]


def _all_gather(x: Tensor, over: str) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def _all_gather_shapes(x: Tensor, over: str) -> Tensor:
    return x.new_empty(x.shape)


def _same(context: Any, gradient: Tensor) -> Gradients:
    return gradient, None


_REDUCED = {"sum": torch.sum, "max": torch.amax, "min": torch.amin}


def _all_reduce(x: Tensor, over: str, reduction: str) -> Tensor:
    return torch.sum(x, 0, dtype=x.dtype) if reduction == "sum" else _REDUCED[reduction](x, 0)


def _all_reduce_shapes(x: Tensor, over: str, reduction: str) -> Tensor:
    return x.new_empty(x.shape[1:])


def _save_reduced(context: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, _, context.reduction = inputs
    context.ranks = x.shape[0]
    context.save_for_backward(*(() if context.reduction == "sum" else (x, output)))


def _all_reduce_gradient(context: Any, gradient: Tensor) -> Gradients:
    """Of an extreme in equal shares to the ranks that have it, as ``amax`` does."""
    spread = gradient.unsqueeze(0).expand(context.ranks, *gradient.shape)
    if context.reduction == "sum":
        return spread, None, None
    x, output = context.saved_tensors
    there = (x == output.unsqueeze(0)).to(gradient.dtype)
    return spread * there / there.sum(0).unsqueeze(0), None, None


def _reduce_scatter(x: Tensor, over: str) -> Tensor:
    return torch.sum(x, 0, dtype=x.dtype)


def _reduce_scatter_shapes(x: Tensor, over: str) -> Tensor:
    return x.new_empty(x.shape[1:])


def _save_ranks(context: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    context.ranks = inputs[0].shape[0]


def _reduce_scatter_gradient(context: Any, gradient: Tensor) -> Gradients:
    return gradient.unsqueeze(0).expand(context.ranks, *gradient.shape), None


def _all_to_all(x: Tensor, over: str) -> Tensor:
    return x.transpose(0, 1).clone(memory_format=torch.contiguous_format)


def _all_to_all_shapes(x: Tensor, over: str) -> Tensor:
    return x.new_empty((x.shape[1], x.shape[0], *x.shape[2:]))


def _turned(context: Any, gradient: Tensor) -> Gradients:
    return gradient.transpose(0, 1), None


define("all_gather(Tensor x, str over) -> Tensor", _all_gather, _all_gather_shapes, _same)
define("all_reduce(Tensor x, str over, str reduction) -> Tensor", _all_reduce, _all_reduce_shapes, _all_reduce_gradient, _save_reduced)
define("reduce_scatter(Tensor x, str over) -> Tensor", _reduce_scatter, _reduce_scatter_shapes, _reduce_scatter_gradient, _save_ranks)
define("all_to_all(Tensor x, str over) -> Tensor", _all_to_all, _all_to_all_shapes, _turned)
