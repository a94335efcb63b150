"""How many floating point operations an operator is, whole."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from autopar.graph import Op, Tensor
from autopar.rules.lookup import find_row, find_rule
from autopar.rules.signature import call_of


def flops(op: Op, tensors: Mapping[str, Tensor]) -> float:
    """Floating point operations of the whole operator, a multiplication and an addition counted as two.

    Contractions, convolutions and attention are exact (attention's softmax apart, and half of the products under a causal
    mask); anything else counts one for each element of its largest tensor, and views and copies none.
    """
    row = find_row(op.target)
    if row is not None and row.alias:
        return 0.0
    return _WORK[row.work if row else "elements"](op, tensors)


def _none(op: Op, tensors: Mapping[str, Tensor]) -> float:
    return 0.0


def _elements(op: Op, tensors: Mapping[str, Tensor]) -> float:
    return float(max(tensors[name].elements for name in (*op.inputs, *op.outputs)))


def _contraction(op: Op, tensors: Mapping[str, Tensor]) -> float:
    return 2.0 * math.prod(find_rule(op, tensors).extent.values())


def _matrices(op: Op, tensors: Mapping[str, Tensor]) -> float:
    """2 n for each element of the largest tensor: of the order of what factorisations of n x n matrices take (2/3 to 20 n^3)."""
    largest = max((tensors[name] for name in (*op.inputs, *op.outputs)), key=lambda tensor: tensor.elements)
    return 2.0 * largest.elements * max(largest.shape[-2:], default=1)


def _grouped(op: Op, tensors: Mapping[str, Tensor]) -> float:
    """Each row by one expert's matrix, however many experts there are; the same for the gradient of the matrices."""
    (rows, inner), second = tensors[op.inputs[0]].shape, tensors[op.inputs[1]].shape
    return 2.0 * rows * inner * second[-1]


def _convolution(op: Op, tensors: Mapping[str, Tensor]) -> float:
    """2 x output elements x input channels of a group x kernel elements: the same for each gradient."""
    if op.target.startswith("aten.convolution_backward"):
        grad, _, weight = (tensors[name].shape for name in op.inputs[:3])
        return 2.0 * math.prod(grad) * math.prod(weight[1:]) * int(sum(op.args[-1][:2]))
    first, second = (tensors[name].shape for name in op.inputs[:2])
    result = tensors[op.outputs[0]].shape
    if op.target.startswith("autopar.convolution_input_gradient"):
        output, weight = first, second
    elif op.target.startswith("autopar.convolution_weight_gradient"):
        output, weight = first, result
    else:
        output, weight = result, second
    return 2.0 * math.prod(output) * math.prod(weight[1:])


def _attention(op: Op, tensors: Mapping[str, Tensor]) -> float:
    """Two products of b h s t by d and by e."""
    start = 1 if op.target.startswith("autopar.attention_backward") else 0
    (b, h, s, d), (_, _, t, _), (*_, e) = (tensors[name].shape for name in op.inputs[start : start + 3])
    row = find_row(op.target)
    assert row is not None
    causal = call_of(op, row, (), ()).arguments["causal"]
    return 2.0 * b * h * s * t * (d + e) * (0.5 if causal else 1.0)


def _attention_backward(op: Op, tensors: Mapping[str, Tensor]) -> float:
    """Five products where forward has two: the scores again, and the gradients of v, p, q and k."""
    return 2.5 * _attention(op, tensors)


def _recurrence(op: Op, tensors: Mapping[str, Tensor]) -> float:
    """A product of every step's state by the weight."""
    weight = tensors[op.inputs[2]]
    return 2.0 * math.prod(tensors[op.inputs[0]].shape) * weight.shape[1]


def _recurrence_backward(op: Op, tensors: Mapping[str, Tensor]) -> float:
    """Three: forward's again, its gradient, and that of the weight."""
    gates, weight = tensors[op.inputs[1]], tensors[op.inputs[4]]
    return 3 * 2.0 * math.prod(gates.shape) * weight.shape[1]


_WORK: Mapping[str, Callable[[Op, Mapping[str, Tensor]], float]] = {
    "none": _none,
    "elements": _elements,
    "contraction": _contraction,
    "matrices": _matrices,
    "grouped": _grouped,
    "experts": _contraction,  # a word of its own: the experts' numbers have another dtype
    "convolution": _convolution,
    "attention": _attention,
    "attention_backward": _attention_backward,
    "recurrence": _recurrence,
    "recurrence_backward": _recurrence_backward,
}
