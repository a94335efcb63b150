"""What running an operator means: how many floating point operations and kernels, whole, and whether it may be done twice."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from autopar.graph import Graph, Op, Ref, Tensor
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


def family(op: Op) -> str:
    """The class by which cost models tell operators apart: its family in the table, ``view`` for everything that shares its input's
    storage, ``unknown`` without a row."""
    row = find_row(op.target)
    return "unknown" if row is None else "view" if row.alias else row.family


def is_alias(op: Op) -> bool:
    """Whether output 0 shares the storage of input 0 (views, and what is stored into it)."""
    row = find_row(op.target)
    return (row is not None and row.alias) or stores(op)


STORING: Mapping[str, str] = {
    "aten.index_copy.default": "aten.index_copy_.default", "aten.index_put.default": "aten.index_put_.default",
}  # fmt: skip
"""Operators that give a tensor with some of its entries replaced, and those that put these entries into the tensor itself."""
_STORING = frozenset(STORING.values())


def stores(op: Op) -> bool:
    """Whether the operator writes into input 0, some entries of it, and gives it as output 0."""
    return op.target in _STORING


def storage_roots(graph: Graph) -> dict[str, str]:
    """The tensor whose storage each tensor shares when nothing is resharded in between."""
    root = {item.tensor: item.tensor for item in graph.inputs}
    for op in graph.ops:
        root.update((tensor, root[op.inputs[0]] if op.inputs and is_alias(op) else tensor) for tensor in op.outputs)
    return root


def moves(op: Op, inputs: Sequence[int], outputs: Sequence[int]) -> int:
    """Bytes that the operator reads and writes, whose operands are of so many bytes: of a view none, of what is stored, or read
    along a diagonal, these entries twice, and not what they are stored into or read from."""
    row = find_row(op.target)
    if row is not None and row.alias:
        return 0
    if op.target == "autopar.diagonal.default":
        return 2 * sum(outputs)
    return 2 * sum(inputs[1:]) if stores(op) else sum(inputs) + sum(outputs)


WRITES_OVER: Mapping[str, tuple[int, ...]] = {
    "aten.add.Tensor": (0, 1), "aten.sub.Tensor": (0, 1), "aten.mul.Tensor": (0, 1), "aten.div.Tensor": (0, 1),
    "aten.gelu_backward.default": (0,), "aten.silu_backward.default": (0,), "aten.tanh_backward.default": (0,),
    "aten.sigmoid_backward.default": (0,), "aten.threshold_backward.default": (0,),
}  # fmt: skip
"""Pointwise operators that torch can have write into one of these arguments, entry by entry."""


def may_write_over(op: Op) -> tuple[int, ...]:
    """The positions among the inputs of tensors that the operator's result may take the memory of, if it is as large."""
    places = WRITES_OVER.get(op.target)
    if places is None:
        return ()
    arguments = (op.args[place] for place in places)
    return tuple(dict.fromkeys(argument.index for argument in arguments if isinstance(argument, Ref)))


KERNELS: Mapping[str, tuple[int, int]] = {"lstm": (10, 28), "gru": (9, 20), "tanh": (4, 7), "relu": (4, 6)}
"""Of a recurrent cell, how many kernels run for a step, forward and backward."""


def launches(op: Op, tensors: Mapping[str, Tensor]) -> int:
    """How many kernels run one after another, each with a part of the work: of all but recurrent layers that is taken as one."""
    if not op.target.startswith("autopar.recurrence"):
        return 1
    backward = len(op.outputs) > 1
    return tensors[op.inputs[backward]].shape[0] * KERNELS[str(op.args[-1])][backward]


def why_once(op: Op) -> str:
    """Why an operator may not run a second time to make its results again; empty when it may.

    Of an operator without a row nobody knows what it does besides: it may write over what it reads, or draw random numbers.
    """
    row = find_row(op.target)
    return "it has no rule: whether it always makes the same is not known" if row is None else row.once


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


def _experts(op: Op, tensors: Mapping[str, Tensor]) -> float:
    """The same of an equation: every factor but the experts."""
    extents = find_rule(op, tensors).extent
    return 2.0 * math.prod(extents.values()) / extents["e"]


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
    "experts": _experts,
    "convolution": _convolution,
    "attention": _attention,
    "attention_backward": _attention_backward,
    "recurrence": _recurrence,
    "recurrence_backward": _recurrence_backward,
}
