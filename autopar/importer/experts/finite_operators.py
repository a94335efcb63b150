"""Operators that are finite, with finite gradients, wherever their operands are.

Rows that experts do not fill are zeros, and nobody reads what becomes of them. Yet their gradients, zeros too, are added to those of
weights. Where an operator is infinite, or steeper than any number, zero times that is no number.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import Node

aten = torch.ops.aten
_FINITE = frozenset({
    "abs", "add", "atan", "bitwise_and", "bitwise_not", "bitwise_or", "bitwise_xor", "celu", "clamp", "clamp_max", "clamp_min", "clip",
    "clone", "contiguous", "cos", "detach", "alias", "elu", "eq", "erf", "exp", "ge", "gelu", "gt", "hardsigmoid", "hardswish", "hardtanh",
    "le", "leaky_relu", "log_sigmoid", "logical_and", "logical_not", "logical_or", "lt", "masked_fill", "maximum", "minimum", "mish",
    "mul", "multiply", "ne", "neg", "negative", "relu", "relu6", "rsub", "selu", "sigmoid", "sign", "silu", "sin", "softplus", "square",
    "sub", "subtract", "tanh", "to", "_to_copy", "where",
})  # fmt: skip
"""Names of operators, in place or not."""
_DIVISIONS = frozenset({"div", "divide", "true_divide"})


def stays_finite(node: Node) -> bool:
    """Whether an operator on each element is known to be finite, with finite gradients, at every finite operand."""
    target: Any = node.target
    numbers = [item for item in (*node.args, *node.kwargs.values()) if isinstance(item, int | float)]
    if not all(map(math.isfinite, numbers)):
        return False
    name = target.overloadpacket.__name__.removesuffix("_")
    if name in _DIVISIONS:
        return not isinstance(node.args[1], Node) and node.args[1] != 0
    if name == "pow":
        exponent = node.args[1]
        return isinstance(exponent, int | float) and exponent == int(exponent) and exponent >= 1
    return name in _FINITE


def has_margin(node: Node) -> bool:
    """Whether a norm adds something to the variance, so that a row of equal elements has a finite gradient."""
    place = 4 if node.target is aten.layer_norm.default else 3
    given: Any = node.args[place] if len(node.args) > place else node.kwargs.get("eps", 1e-5)
    return given is None or given > 0
