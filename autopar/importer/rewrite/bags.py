"""``embedding_bag`` as lookups and sums: bags of one size (how ``nn.EmbeddingBag`` takes a matrix of indices) are a dim of their own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from autopar.errors import CaptureError
from autopar.importer.rewrite.losses import embedding

aten = torch.ops.aten
SUM, MEAN, MAX = 0, 1, 2
Bags = tuple[Tensor, None, None, None]


def equal_bags(node: Node) -> int | None:
    """Indices a bag, where the offsets are ``arange(0, numel, size)``."""
    offsets: Any = node.args[2]
    if not isinstance(offsets, Node) or offsets.target is not aten.arange.start_step or (node.kwargs | dict(enumerate(node.args))).get(7):
        return None
    start, end, step = offsets.args[:3]
    return step if start == 0 and end == node.args[1].meta["val"].numel() and end % step == 0 else None


def embedding_bag(
    weight: Tensor, indices: Tensor, offsets: Tensor, scale_grad_by_freq: bool = False, mode: int = SUM, sparse: bool = False,
    per_sample_weights: Tensor | None = None, include_last_offset: bool = False, padding_idx: int | None = None, *, size: int | None = None,
) -> Bags:  # fmt: skip
    """``aten.embedding_bag``: ``weight [v, d]``, ``indices [n]``, ``offsets [bags]`` give ``[bags, d]``; ``size`` is that of equal bags."""
    if scale_grad_by_freq:
        raise CaptureError("embedding_bag with scale_grad_by_freq counts words over the whole batch", "leave scale_grad_by_freq out")
    if padding_idx is not None and padding_idx < 0:
        padding_idx = padding_idx + weight.shape[0] if padding_idx != -1 else None
    bags = offsets.shape[0] - int(include_last_offset)
    numbers = indices.reshape(bags, size) if size is not None else indices
    rows = embedding(weight, numbers)
    counted = numbers != padding_idx if padding_idx is not None else None
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.reshape(numbers.shape).unsqueeze(-1)
    if counted is not None:
        rows = rows.masked_fill(~counted.unsqueeze(-1), float("-inf") if mode == MAX else 0.0)
    if size is not None:
        if mode == MAX:
            found = rows.max(1).values
            return found if counted is None else found.masked_fill(~counted.any(1, keepdim=True), 0.0), None, None, None
        total = rows.sum(1)
        if mode == MEAN:
            total = total / (size if counted is None else counted.sum(1, keepdim=True).clamp(min=1))
        return total, None, None, None
    if mode == MAX:
        raise CaptureError("embedding_bag of unequal bags with mode='max' is not supported", "give a matrix of indices with a padding_idx")
    first = offsets[:bags]
    bag = torch.bucketize(torch.arange(indices.shape[0], device=indices.device), first, right=True) - 1
    total = rows.new_zeros(bags, rows.shape[1]).index_add(0, bag, rows)
    if mode == MEAN:
        ones = torch.ones(indices.shape[0], dtype=rows.dtype, device=rows.device) if counted is None else counted.to(rows.dtype)
        total = total / rows.new_zeros(bags).index_add(0, bag, ones).clamp(min=1).unsqueeze(-1)
    return total, None, None, None
