"""Concatenation without the parts that add nothing: a cache starts as an empty tensor, of one dim whatever the others have."""

from __future__ import annotations

from functools import reduce
from typing import Any

import torch
from torch import Tensor


def cat(tensors: list[Tensor], dim: int = 0) -> Tensor:
    """``aten.cat`` of the parts that hold something, in the dtype of them all."""
    filled = [part for part in tensors if part.numel()]
    if not filled or len(filled) == len(tensors):
        return torch.ops.aten.cat.default(tensors, dim)
    dtype = reduce(torch.promote_types, (part.dtype for part in tensors))
    cast = [part.to(dtype) for part in filled]
    result = torch.ops.aten.cat.default(cast, dim) if len(cast) > 1 else cast[0].clone()
    trained = [part for part in tensors if not part.numel() and part.requires_grad]
    return _Beside.apply(result, *trained) if trained else result


class _Beside(torch.autograd.Function):
    """Gradients, of nothing, for parts that were left out."""

    @staticmethod
    def forward(context: Any, result: Tensor, *empty: Tensor) -> Tensor:
        context.empty = empty
        return result.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        return gradient, *(torch.zeros_like(part) for part in context.empty)
