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
        if q.dim() != 4:
            return _with_four_dims(attention, q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        batch = max(q.shape[0], k.shape[0], v.shape[0])
        q, k, v = (_expand_batch(tensor, batch) for tensor in (q, k, v))
        if k.shape[1] != v.shape[1] or (not enable_gqa and q.shape[1] != k.shape[1]):
            heads = max(q.shape[1], k.shape[1], v.shape[1])
            q, k, v = (tensor.expand(-1, heads, -1, -1) for tensor in (q, k, v))
        if attn_mask is not None and attn_mask.dim() < 4:
            attn_mask = attn_mask.reshape(*[1] * (4 - attn_mask.dim()), *attn_mask.shape)
        if dropout_p > 0 or (attn_mask is not None and attn_mask.requires_grad):
            return _attention_in_parts(q, k, v, attn_mask, dropout_p, is_causal, scale, next_seed)
        return torch.ops.autopar.attention.default(q, k, v, attn_mask, is_causal, scale, 0.0, 0)[0]

    return attention


def _expand_batch(tensor: Tensor, batch: int) -> Tensor:
    return tensor if tensor.shape[0] == batch else tensor.expand(batch, -1, -1, -1)


def _with_four_dims(
    attention: Replacement, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, causal: bool, scale: float, gqa: bool
) -> Tensor:
    """Attention on ``[..., s, d]``: fewer than four dims get dims of size 1, more are flattened into the first."""
    if q.dim() < 4:
        lead = 4 - q.dim()

        def widen(tensor: Tensor) -> Tensor:
            place = tensor.dim() - 2
            return tensor.reshape(*tensor.shape[:place], *[1] * lead, *tensor.shape[place:])

        if mask is not None and mask.dim() > 2:
            mask = widen(mask)
        out = attention(widen(q), widen(k), widen(v), mask, dropout, causal, scale=scale, enable_gqa=gqa)
        return out.reshape(*q.shape[:-1], v.shape[-1])
    lead_sizes = torch.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])

    def flat(tensor: Tensor) -> Tensor:
        return tensor.expand(*lead_sizes, *tensor.shape[-3:]).flatten(0, -4)

    if mask is not None and mask.dim() > 3:
        mask = flat(mask)
    out = attention(flat(q), flat(k), flat(v), mask, dropout, causal, scale=scale, enable_gqa=gqa)
    return out.unflatten(0, lead_sizes)


def _attention_in_parts(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, causal: bool, scale: float, next_seed: Callable[[], int]
) -> Tensor:
    """Attention whose probabilities are dropped or whose mask is trained: no fused kernel gives these the dialect's meaning.

    A query that sees no key has zeros, and gradients of zero. Its scores are not hidden, so that they are numbers.
    """
    share = q.shape[1] // k.shape[1]
    if share > 1:
        k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
    scores = contract(q, tuple("bhsd"), k, tuple("bhtd"), tuple("bhst")) * scale
    blind = None
    if causal:  # torch takes no mask beside it here
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    if mask is not None:
        hidden = ~mask if mask.dtype == torch.bool else mask == float("-inf")
        blind = hidden.all(-1, keepdim=True)
        scores = scores.masked_fill(hidden & ~blind, float("-inf")) if mask.dtype == torch.bool else scores + mask.masked_fill(blind, 0)
    p = torch.softmax(scores, -1)
    if dropout > 0:
        p = torch.ops.autopar.dropout.default(p, dropout, next_seed())[0]
    out = contract(p, tuple("bhst"), v, tuple("bhtd"), tuple("bhsd"))
    return out if blind is None else out.masked_fill(blind, 0)
