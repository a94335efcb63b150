"""``autopar.convolution`` and its two gradients, each an operator of its own, since each splits differently.

The three are linear in each of their two tensors and give each other's gradients, so that any of them can be differentiated again.

Bias is a separate addition. Channels first, any number of spatial dims; ``x [n, c, ...]``, ``w [o, c / groups, ...]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.dialect.library import define

_SETTINGS = "int[] stride, int[] padding, int[] dilation, int groups"


def _convolution(
    x: Tensor, w: Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int
) -> Tensor:  # fmt: skip
    zeros = [0] * len(stride)
    return torch.convolution(x, w, None, stride, padding, dilation, False, zeros, groups).contiguous()


def _convolution_shapes(
    x: Tensor, w: Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int
) -> Tensor:  # fmt: skip
    if x.shape[1] != w.shape[1] * groups or w.shape[0] % groups:
        raise ValueError(f"convolution of {tuple(x.shape)} with weight {tuple(w.shape)} in {groups} groups: channels do not fit")
    spatial = [
        (size + 2 * pad - spread * (kernel - 1) - 1) // step + 1
        for size, kernel, step, pad, spread in zip(x.shape[2:], w.shape[2:], stride, padding, dilation, strict=True)
    ]
    return x.new_empty([x.shape[0], w.shape[0], *spatial])


def _backward(gradient: Tensor, x: Tensor, w: Tensor, settings: tuple[Any, ...], wanted: list[bool]) -> Tensor:
    stride, padding, dilation, groups = settings
    zeros = [0] * len(stride)
    found = torch.ops.aten.convolution_backward.default(
        gradient, x, w, None, stride, padding, dilation, False, zeros, groups, wanted
    )  # fmt: skip
    return found[wanted.index(True)].contiguous()


def _stand_in(grad: Tensor, size: Sequence[int]) -> Tensor:
    """One number in place of the tensor that a gradient does not depend on."""
    return grad.new_empty_strided(size, [0] * len(size))


def _input_gradient(grad: Tensor, w: Tensor, input_size: Sequence[int], *settings: Any) -> Tensor:
    return _backward(grad, _stand_in(grad, input_size), w, settings, [True, False, False])


def _input_gradient_shapes(grad: Tensor, w: Tensor, input_size: Sequence[int], *settings: Any) -> Tensor:
    return grad.new_empty(input_size)


def _weight_gradient(grad: Tensor, x: Tensor, weight_size: Sequence[int], *settings: Any) -> Tensor:
    return _backward(grad, x, _stand_in(grad, weight_size), settings, [False, True, False])


def _weight_gradient_shapes(grad: Tensor, x: Tensor, weight_size: Sequence[int], *settings: Any) -> Tensor:
    return grad.new_empty(weight_size)


def _save(context: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, w, *context.settings = inputs
    context.sizes = tuple(x.shape), tuple(w.shape)
    needs_x, needs_w = context.needs_input_grad[:2]
    context.save_for_backward(x if needs_w else None, w if needs_x else None)


def _gradient(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    x, w = context.saved_tensors
    input_size, weight_size = context.sizes
    needs_x, needs_w = context.needs_input_grad[:2]
    ops = torch.ops.autopar
    to_x = ops.convolution_input_gradient.default(gradient, w, input_size, *context.settings) if needs_x else None
    to_w = ops.convolution_weight_gradient.default(gradient, x, weight_size, *context.settings) if needs_w else None
    return to_x, to_w, None, None, None, None


def _save_input(context: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    grad, w, _, *context.settings = inputs
    context.weight_size = tuple(w.shape)
    context.save_for_backward(grad, w)


def _input_gradient_gradient(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    grad, w = context.saved_tensors
    needs_grad, needs_w = context.needs_input_grad[:2]
    ops = torch.ops.autopar
    to_grad = ops.convolution.default(gradient, w, *context.settings) if needs_grad else None
    to_w = ops.convolution_weight_gradient.default(grad, gradient, context.weight_size, *context.settings) if needs_w else None
    return to_grad, to_w, None, None, None, None, None


def _save_weight(context: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    grad, x, _, *context.settings = inputs
    context.input_size = tuple(x.shape)
    context.save_for_backward(grad, x)


def _weight_gradient_gradient(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    grad, x = context.saved_tensors
    needs_grad, needs_x = context.needs_input_grad[:2]
    ops = torch.ops.autopar
    to_grad = ops.convolution.default(x, gradient, *context.settings) if needs_grad else None
    to_x = ops.convolution_input_gradient.default(grad, gradient, context.input_size, *context.settings) if needs_x else None
    return to_grad, to_x, None, None, None, None, None


define(f"convolution(Tensor x, Tensor w, {_SETTINGS}) -> Tensor", _convolution, _convolution_shapes, _gradient, _save)
define(
    f"convolution_input_gradient(Tensor grad, Tensor w, int[] input_size, {_SETTINGS}) -> Tensor",
    _input_gradient,
    _input_gradient_shapes,
    _input_gradient_gradient,
    _save_input,
)
define(
    f"convolution_weight_gradient(Tensor grad, Tensor x, int[] weight_size, {_SETTINGS}) -> Tensor",
    _weight_gradient,
    _weight_gradient_shapes,
    _weight_gradient_gradient,
    _save_weight,
)
