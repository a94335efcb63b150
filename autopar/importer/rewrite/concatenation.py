"""Concatenation without the parts that add nothing: a cache starts as an empty tensor, of one dim whatever the others have."""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor


def cat(tensors: list[Tensor], dim: int = 0) -> Tensor:
    """``aten.cat`` of the parts that hold something, in the dtype of them all."""
    filled = [part for part in tensors if part.numel()]
    if not filled or len(filled) == len(tensors):
        return torch.ops.aten.cat.default(tensors, dim)
    dtype = reduce(torch.promote_types, (part.dtype for part in tensors))
    filled = [part.to(dtype) for part in filled]
    return torch.ops.aten.cat.default(filled, dim) if len(filled) > 1 else filled[0].clone()
