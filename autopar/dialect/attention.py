"""``autopar.attention``: scaled dot product attention as one operator, with its own gradient operator.

``q [b, h, s, d]``, ``k [b, g, t, d]``, ``v [b, g, t, e]`` with ``h`` a multiple of ``g``: query heads ``i * h/g ...`` share
key head ``i``. ``mask`` broadcasts to ``[b, h, s, t]``; a boolean one is true where attended, a float one is added to the
scores. ``causal`` hides key ``j`` from query ``i`` when ``j > offset + i``: ``offset`` is the place of the first query
among the keys, 0 but on ranks that hold a later part of the queries; without ``causal`` it means nothing. ``lse [b, h, s]``
is the logarithm of the sum of exponentials of the scores, float32 (float64 for float64 inputs). Results lie in memory as
``[b, s, h, d]``, which is how the projections around attention read and write them.

Which kernel runs is chosen at run time (``attention_kernels``); plans never name a kernel.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from autopar.dialect.attention_kernels import run_backward, run_forward
from autopar.dialect.library import define, wide_dtype


def _heads_last(tensor: Tensor) -> Tensor:
    """The same ``[b, h, s, d]`` values, in memory as ``[b, s, h, d]``: the tensor itself where it lies so."""
    lying = tensor.transpose(1, 2)
    return tensor if lying.is_contiguous() else lying.contiguous().transpose(1, 2)


def _empty_heads_last(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    b, h, s, d = shape
    return like.new_empty([b, s, h, d]).transpose(1, 2)


class _Stretch(NamedTuple):
    """Keys ``start`` to ``stop`` as one kernel call: with this mask; ``causal`` hides key ``start + j`` from query ``i`` when ``j > i``."""

    start: int
    stop: int
    mask: Tensor | None
    causal: bool

    def of(self, tensor: Tensor) -> Tensor:
        """The stretch's keys or values."""
        length = self.stop - self.start
        return tensor if length == tensor.shape[2] else tensor.narrow(2, self.start, length)


def _in_one_call(q: Tensor, k: Tensor, causal: bool, offset: int) -> bool:
    """Whether one kernel call takes all keys as they are, as mostly: each is seen by some query, and queries begin where keys do."""
    return not causal or (offset == 0 and k.shape[2] <= q.shape[2])


def _stretches(q: Tensor, k: Tensor, mask: Tensor | None, offset: int) -> list[_Stretch]:
    """The kernel calls that causal attention is made of: one when ``offset`` is 0.

    Keys before ``offset`` are seen by every query, those at the queries' own places by the later of them, those behind by none: a call
    without causality, a square call with it, and nothing. So it does not matter where a kernel starts the diagonal of a rectangle.
    With a mask there is one call, causality written into the mask: fused kernels give no ``lse`` for a query that sees none of its keys.
    """
    s, t = q.shape[2], k.shape[2]
    stop = min(t, offset + s)
    if mask is None:
        if offset == 0:
            return [_Stretch(0, stop, None, True)]
        found = [_Stretch(0, min(t, offset), None, False), _Stretch(offset, stop, None, True)]
        return [item for item in found if item.start < item.stop] or [_Stretch(0, t, None, False)]
    if mask.shape[-1] != 1:
        mask = mask[..., :stop]
    if offset == 0:
        return [_Stretch(0, stop, mask, True)]
    hidden = torch.ones(s, stop, dtype=torch.bool, device=q.device).triu(offset + 1)
    return [_Stretch(0, stop, mask & ~hidden if mask.dtype == torch.bool else mask.masked_fill(hidden, float("-inf")), False)]


def _merged(parts: list[tuple[Tensor, Tensor]], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """``(out, lse)`` over all keys from those over stretches of them: ``out`` is the sum of ``out_i * exp(lse_i - lse)``."""
    if len(parts) == 1:
        return parts[0]
    wide = wide_dtype(dtype)
    lse = torch.logsumexp(torch.stack([part.to(wide) for _, part in parts]), 0)
    weighed = [out.to(wide) * torch.exp(part.to(wide) - lse).unsqueeze(-1) for out, part in parts]
    return sum(weighed[1:], weighed[0]).to(dtype), lse


def _joined(gradients: list[Tensor], stretches: list[_Stretch], like: Tensor) -> Tensor:
    """The gradient of all keys (or values) from those of stretches of them; keys that no query sees have zeros."""
    if len(gradients) == 1 and gradients[0].shape[2] == like.shape[2]:
        return _heads_last(gradients[0])
    found = _empty_heads_last(like, like.shape)
    for gradient, stretch in zip(gradients, stretches, strict=True):
        stretch.of(found).copy_(gradient)
    found[:, :, stretches[-1].stop :] = 0
    return found


def _attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float, dropout: float, offset: int
) -> tuple[Tensor, Tensor]:
    _refuse_dropout(dropout)
    if _in_one_call(q, k, causal, offset):
        out, lse = run_forward(q, k, v, mask, causal, scale)
        return _heads_last(out), lse.to(wide_dtype(q.dtype)).contiguous()
    stretches = _stretches(q, k, mask, offset)
    out, lse = _merged([run_forward(q, item.of(k), item.of(v), item.mask, item.causal, scale) for item in stretches], q.dtype)
    return _heads_last(out), lse.to(wide_dtype(q.dtype)).contiguous()


def _attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    dropout: float,
    offset: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """With ``out`` and ``lse`` over all keys, each stretch of keys gives its own gradient and an addend of the queries'."""
    _refuse_dropout(dropout)
    if _in_one_call(q, k, causal, offset):
        to_q, to_k, to_v = run_backward(grad, q, k, v, out, lse, mask, causal, scale)
        return _heads_last(to_q), _heads_last(to_k), _heads_last(to_v)
    stretches = _stretches(q, k, mask, offset)
    found = [run_backward(grad, q, item.of(k), item.of(v), out, lse, item.mask, item.causal, scale) for item in stretches]
    dq, dk, dv = zip(*found, strict=True)
    return _heads_last(sum(dq[1:], dq[0])), _joined(list(dk), stretches, k), _joined(list(dv), stretches, v)


def _refuse_dropout(dropout: float) -> None:
    if dropout:
        raise NotImplementedError("autopar.attention has no dropout of its own: attention with dropout is captured as its parts")


def _attention_shapes(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float, dropout: float, offset: int
) -> tuple[Tensor, Tensor]:
    b, h, s, _ = q.shape
    return _empty_heads_last(q, (b, h, s, v.shape[3])), q.new_empty([b, h, s], dtype=wide_dtype(q.dtype))


def _attention_backward_shapes(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _empty_heads_last(q, q.shape), _empty_heads_last(k, k.shape), _empty_heads_last(v, v.shape)


def _save(context: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, mask, *context.settings = inputs
    context.set_materialize_grads(False)
    context.mark_non_differentiable(output[1])
    context.save_for_backward(q, k, v, *output, mask)


def _gradient(context: Any, gradient: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if gradient is None:
        return (None,) * 8
    dq, dk, dv = torch.ops.autopar.attention_backward.default(gradient, *context.saved_tensors, *context.settings)
    return dq, dk, dv, None, None, None, None, None


define(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? mask, bool causal, float scale, float dropout, int offset) -> (Tensor, Tensor)",
    _attention, _attention_shapes, _gradient, _save,
)  # fmt: skip
define(
    "attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? mask, bool causal,"
    " float scale, float dropout, int offset) -> (Tensor, Tensor, Tensor)",
    _attention_backward, _attention_backward_shapes,
)  # fmt: skip
