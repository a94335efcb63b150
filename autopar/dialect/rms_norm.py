"""``autopar.rms_norm``: division by the root mean square of the last dims, and its gradient.

torch has this as one operator on GPUs only; on the CPU it is captured as nine operators whose intermediate results would be
priced and kept. One operator of ours is the same graph everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.dialect.library import define, wide_dtype


def _wide(x: Tensor) -> Tensor:
    return x.to(wide_dtype(x.dtype))


def _last(sizes: Sequence[int]) -> list[int]:
    return list(range(-len(sizes), 0))


def _rms_norm(x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """``out = x * rstd * weight``; ``rstd [..., 1]`` is ``1 / sqrt(mean(x^2) + eps)``, float32 at least."""
    wide = _wide(x)
    rstd = torch.rsqrt(wide.square().mean(_last(normalized_shape), keepdim=True) + eps)
    out = wide * rstd
    return (out if weight is None else out.mul_(weight)).to(x.dtype), rstd


def _rms_norm_shapes(x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    lead = x.dim() - len(normalized_shape)
    if list(x.shape[lead:]) != list(normalized_shape):
        raise ValueError(f"rms_norm over {tuple(normalized_shape)} does not fit a tensor of shape {tuple(x.shape)}")
    dtype = wide_dtype(x.dtype)
    return x.new_empty(x.shape), x.new_empty([*x.shape[:lead], *[1] * len(normalized_shape)], dtype=dtype)


def _rms_norm_backward(
    grad: Tensor, x: Tensor, normalized_shape: Sequence[int], rstd: Tensor, weight: Tensor | None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """With ``n = x * rstd`` and ``g = grad * weight``: ``dx = rstd * (g - n * mean(g * n))``, ``dweight = sum(grad * n)``."""
    dims = _last(normalized_shape)
    grad, normal = _wide(grad), _wide(x) * rstd
    product = grad * normal  # of this size no more than these two are held, beside a wider gradient
    dweight = product.sum(list(range(x.dim() - len(dims)))) if x.dim() > len(dims) else product.clone()
    mean = (product if weight is None else product.mul_(weight)).mean(dims, keepdim=True)
    scaled = product.copy_(grad) if weight is None else torch.mul(grad, weight, out=product)
    dx = scaled.sub_(normal.mul_(mean)).mul_(rstd)
    return dx.to(x.dtype), dweight.to(x.dtype if weight is None else weight.dtype)


def _rms_norm_backward_shapes(
    grad: Tensor, x: Tensor, normalized_shape: Sequence[int], rstd: Tensor, weight: Tensor | None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    dtype = x.dtype if weight is None else weight.dtype
    return x.new_empty(x.shape), x.new_empty(list(normalized_shape), dtype=dtype)


def _save(context: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, context.normalized_shape, weight, _ = inputs
    context.set_materialize_grads(False)
    context.mark_non_differentiable(output[1])
    context.save_for_backward(x, output[1], weight)


def _gradient(context: Any, gradient: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if gradient is None:
        return None, None, None, None
    x, rstd, weight = context.saved_tensors
    dx, dweight = torch.ops.autopar.rms_norm_backward.default(gradient, x, context.normalized_shape, rstd, weight)
    return dx, None, None if weight is None else dweight, None


define(
    "rms_norm(Tensor x, int[] normalized_shape, Tensor? weight, float eps) -> (Tensor, Tensor)",
    _rms_norm, _rms_norm_shapes, _gradient, _save,
)  # fmt: skip
define(
    "rms_norm_backward(Tensor grad, Tensor x, int[] normalized_shape, Tensor rstd, Tensor? weight) -> (Tensor, Tensor)",
    _rms_norm_backward, _rms_norm_backward_shapes,
)  # fmt: skip
