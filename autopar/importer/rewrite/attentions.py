"""Scaled dot product attention as one operator, whatever the rank, head sharing and mask of its operands."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from autopar.importer.rewrite.contractions import autocast, contract

Replacement = Callable[..., Any]


def attention_replacement(next_seed: Callable[[], int]) -> Replacement:
    def attention(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        q, k, v = autocast(q, k, v)
        scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
        rank, own = max(q.dim(), k.dim(), v.dim()), -3 if enable_gqa else -2
        lead = (*torch.broadcast_shapes(*(tensor.shape[:own] for tensor in (q, k, v))), *q.shape[own:-2])
        q, k, v = (_with_four_dims(_with_dims(tensor, rank), lead, enable_gqa) for tensor in (q, k, v))
        if attn_mask is not None:
            attn_mask = _with_four_dims(attn_mask, lead, enable_gqa) if attn_mask.dim() > min(len(lead) + 1, 3) else attn_mask
            attn_mask = _with_dims(attn_mask, 4)
        q, k, v = _broadcast(q, k, v, enable_gqa)
        if dropout_p > 0 or (attn_mask is not None and attn_mask.requires_grad):
            out = _attention_in_parts(q, k, v, attn_mask, dropout_p, is_causal, scale, next_seed)
        else:
            out = torch.ops.autopar.attention.default(q, k, v, attn_mask, is_causal, scale, 0.0, 0)[0]
        return out if len(lead) == 2 else out.reshape(*lead, *out.shape[-2:])

    return attention


def _with_dims(tensor: Tensor, dims: int) -> Tensor:
    """The tensor with dims of size 1 in front, where it has fewer."""
    return tensor.reshape(*[1] * (dims - tensor.dim()), *tensor.shape) if tensor.dim() < dims else tensor


def _with_four_dims(tensor: Tensor, lead: tuple[int, ...], shared: bool) -> Tensor:
    """``[..., s, d]`` as ``[b, h, s, d]``. Of more than four dims those before the heads are flattened. A single one of ``lead`` is the
    batch; where heads are ``shared``, it is the heads."""
    if len(lead) > 2:
        return tensor.expand(*lead[:-1], *tensor.shape[-3:]).flatten(0, -4)
    if len(lead) == 2 or shared:
        return _with_dims(tensor, 4)
    place = tensor.dim() - 2
    return tensor.reshape(*tensor.shape[:place], *[1] * (4 - tensor.dim()), *tensor.shape[place:])


def _broadcast(q: Tensor, k: Tensor, v: Tensor, shared: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Operands of one batch and with as many heads, or with heads of keys and values, as many, that several of queries share."""
    (batch,) = torch.broadcast_shapes(q.shape[:1], k.shape[:1], v.shape[:1])
    q, k, v = (tensor if tensor.shape[0] == batch else tensor.expand(batch, -1, -1, -1) for tensor in (q, k, v))
    if shared:
        k, v = (k, v) if k.shape[1] == v.shape[1] else (_repeated(k, q.shape[1]), _repeated(v, q.shape[1]))
    elif not q.shape[1] == k.shape[1] == v.shape[1]:
        (heads,) = torch.broadcast_shapes(q.shape[1:2], k.shape[1:2], v.shape[1:2])
        q, k, v = (tensor.expand(-1, heads, -1, -1) for tensor in (q, k, v))
    return q, k, v


def _repeated(tensor: Tensor, heads: int) -> Tensor:
    return tensor if tensor.shape[1] == heads else tensor.repeat_interleave(heads // tensor.shape[1], 1)


def _attention_in_parts(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, causal: bool, scale: float, next_seed: Callable[[], int]
) -> Tensor:
    """Attention whose probabilities are dropped or whose mask is trained: no fused kernel gives these the dialect's meaning.

    A query that sees no key has zeros, and gradients of zero. Its scores are not hidden, so that they are numbers.
    An added mask as large as the scores is taken as it is: looking for such queries costs 15 % of a step of T5-11B.
    """
    k, v = _repeated(k, q.shape[1]), _repeated(v, q.shape[1])
    scores = contract(q, tuple("bhsd"), k, tuple("bhtd"), tuple("bhst")) * scale
    blind = None
    if causal:  # torch takes no mask beside it here
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    if mask is not None and mask.dtype == torch.bool:
        blind = (~mask).all(-1, keepdim=True)
        scores = scores.masked_fill(~mask & ~blind, float("-inf"))
    elif mask is not None:
        if mask.numel() < scores.numel():
            blind = (mask == float("-inf")).all(-1, keepdim=True)
            mask = mask.masked_fill(blind, 0)
        scores = scores + mask
    p = torch.softmax(scores, -1)
    if dropout > 0:
        p = torch.ops.autopar.dropout.default(p, dropout, next_seed())[0]
    out = contract(p, tuple("bhst"), v, tuple("bhtd"), tuple("bhsd"))
    return out if blind is None else out.masked_fill(blind, 0)
