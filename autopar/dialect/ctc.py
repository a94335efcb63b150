"""``autopar.ctc_loss``: the negative log likelihood of each sequence of a batch, under connectionist temporal classification.

torch's own operator gives its table of path probabilities too, whose size depends on the lengths' values; here the gradient makes that
table again, and sizes are known beforehand. ``logp [t, n, c]``, ``targets [n, s]``, lengths ``[n]``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopar.dialect.library import define


def _ctc_loss(logp: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, blank: int, zero_infinity: bool) -> Tensor:
    return torch.ops.aten._ctc_loss.Tensor(logp, targets, input_lengths, target_lengths, blank, zero_infinity)[0]


def _ctc_loss_shapes(logp: Tensor, *_: Any) -> Tensor:
    return logp.new_empty([logp.shape[1]])


def _ctc_loss_backward(
    grad: Tensor, logp: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, blank: int, zero_infinity: bool
) -> Tensor:
    call = logp, targets, input_lengths, target_lengths
    likelihood, table = torch.ops.aten._ctc_loss.Tensor(*call, blank, zero_infinity)
    return torch.ops.aten._ctc_loss_backward.Tensor(
        grad.contiguous(), *call, likelihood, table, blank, zero_infinity
    )


def _ctc_loss_backward_shapes(grad: Tensor, logp: Tensor, *_: Any) -> Tensor:
    return logp.new_empty(logp.shape)


def _save(context: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, context.blank, context.zero_infinity = inputs
    context.save_for_backward(*tensors)


def _gradient(context: Any, gradient: Tensor) -> tuple[Any, ...]:
    backward = torch.ops.autopar.ctc_loss_backward.default
    return backward(gradient, *context.saved_tensors, context.blank, context.zero_infinity), None, None, None, None, None


_TENSORS = "Tensor logp, Tensor targets, Tensor input_lengths, Tensor target_lengths, int blank, bool zero_infinity"
define(f"ctc_loss({_TENSORS}) -> Tensor", _ctc_loss, _ctc_loss_shapes, _gradient, _save)
define(f"ctc_loss_backward(Tensor grad, {_TENSORS}) -> Tensor", _ctc_loss_backward, _ctc_loss_backward_shapes)
