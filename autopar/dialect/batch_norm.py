"""``autopar.batch_norm``: normalisation by the statistics of the batch, and its gradient.

Whole-tensor statistics are visible as outputs, so that a split batch can sum them over ranks. In evaluation mode batch
norm is pointwise and is captured as such.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopar.dialect.library import define, wide_dtype


def _batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Statistics are at least float32; new running values are ``(1 - momentum) * old + momentum * batch`` (unbiased variance)."""
    wide, count = wide_dtype(x.dtype), x.numel() // x.shape[1]
    if running_mean is not None and running_var is not None and running_mean.dtype == running_var.dtype == wide:
        functional = torch.ops.aten._native_batch_norm_legit_functional.default
        return functional(x, *_affine(x, weight, bias), running_mean, running_var, True, momentum, eps)
    out, mean, invstd = torch.ops.aten._native_batch_norm_legit.no_stats(x, *_affine(x, weight, bias), True, momentum, eps)
    unbiased = (invstd.square().reciprocal() - eps).clamp(min=0) * (count / max(count - 1, 1))
    new_mean = mean.clone() if running_mean is None else (1 - momentum) * running_mean + (momentum * mean).to(running_mean.dtype)
    new_var = unbiased.clone() if running_var is None else (1 - momentum) * running_var + (momentum * unbiased).to(running_var.dtype)
    return out, mean, invstd, new_mean, new_var


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Scale and shift in the dtype in which statistics are to come."""
    wide = wide_dtype(x.dtype)
    if wide == x.dtype:
        return weight, bias
    scale = x.new_ones(x.shape[1], dtype=wide) if weight is None else weight.to(wide)
    return scale, x.new_zeros(x.shape[1], dtype=wide) if bias is None else bias.to(wide)


def batch_norm_in_place(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``autopar.batch_norm`` that writes the new running values, of the statistics' dtype, over the old ones: one kernel of torch's."""
    affine = _affine(x, weight, bias)
    out, mean, invstd = torch.native_batch_norm(x, *affine, running_mean, running_var, True, momentum, eps)
    return out, mean, invstd, running_mean, running_var


def _batch_norm_shapes(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    wide = wide_dtype(x.dtype)
    statistic = x.new_empty([x.shape[1]], dtype=wide)
    new_mean = statistic if running_mean is None else running_mean
    new_var = statistic if running_var is None else running_var
    empty = torch.empty_like
    return x.new_empty(x.shape), empty(statistic), empty(statistic), empty(new_mean), empty(new_var)


def _batch_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, invstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """With ``n`` the normalised input: ``dx = weight * invstd * (grad - mean(grad) - n * mean(grad * n))``, ``dweight = sum(grad * n)``,
    ``dbias = sum(grad)``."""
    backward = torch.ops.aten.native_batch_norm_backward.default
    scale = None if weight is None else _in_dtype(weight, mean.dtype)
    dx, dweight, dbias = backward(grad.contiguous(), x.contiguous(), scale, None, None, mean, invstd, True, 0.0, [True, True, True])
    dtype = mean.dtype if weight is None else weight.dtype
    return _in_dtype(dx, x.dtype), _in_dtype(dweight, dtype), _in_dtype(dbias, dtype)


def _in_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """As ``to``, which takes eight times as long to find that there is nothing to do."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def _batch_norm_backward_shapes(
    grad: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, invstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    like = mean if weight is None else weight
    return x.new_empty(x.shape), torch.empty_like(like), torch.empty_like(like)


def _save(context: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, *_ = inputs
    _, mean, invstd, new_mean, new_var = output
    context.set_materialize_grads(False)
    context.mark_non_differentiable(mean, invstd, new_mean, new_var)
    context.affine = weight is not None, bias is not None
    context.save_for_backward(x, weight, mean, invstd)


def _gradient(context: Any, gradient: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    if gradient is None:
        return (None,) * 7
    has_weight, has_bias = context.affine
    dx, dweight, dbias = torch.ops.autopar.batch_norm_backward.default(gradient, *context.saved_tensors)
    return dx, dweight if has_weight else None, dbias if has_bias else None, None, None, None, None


define(
    "batch_norm(Tensor x, Tensor? weight, Tensor? bias, Tensor? running_mean, Tensor? running_var, float momentum, float eps)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _batch_norm, _batch_norm_shapes, _gradient, _save,
)  # fmt: skip
define(
    "batch_norm_backward(Tensor grad, Tensor x, Tensor? weight, Tensor mean, Tensor invstd) -> (Tensor, Tensor, Tensor)",
    _batch_norm_backward, _batch_norm_backward_shapes,
)  # fmt: skip
