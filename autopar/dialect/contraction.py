"""``autopar.contract``: every product of two tensors that sums over shared factors, as one operator.

``mm``, ``bmm``, ``addmm``, ``linear``, ``matmul`` and two-operand ``einsum`` differ only in how they flatten dims, and
flattening hides which dims can be split (batch on one axis, sequence on another). The equation keeps the original dims
and is the sharding rule of the operator: ``b s k, n k -> b s n``.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from autopar.dialect.library import define


@lru_cache(maxsize=4096)
def parse(equation: str) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Factors of both operands and of the result; ``()`` is a scalar, as in the rules.

    >>> parse("k, k -> ()")
    (('k',), ('k',), ())
    >>> parse("b s k, n k -> b s n")
    (('b', 's', 'k'), ('n', 'k'), ('b', 's', 'n'))
    """
    operands, arrow, result = equation.partition("->")
    a, comma, b = operands.partition(",")
    if not arrow or not comma:
        raise ValueError(f"autopar.contract needs an equation like 'm k, k n -> m n', got {equation!r}")
    first, second, out = (() if term.strip() == "()" else tuple(term.split()) for term in (a, b, result))
    return first, second, out


def write(a: tuple[str, ...], b: tuple[str, ...], result: tuple[str, ...]) -> str:
    """The equation of these factors, the inverse of ``parse``."""
    first, second, out = (" ".join(factors) or "()" for factors in (a, b, result))
    return f"{first}, {second} -> {out}"


def _sizes(a: Tensor, b: Tensor, equation: str) -> dict[str, int]:
    first, second, _ = parse(equation)
    if len(first) != a.dim() or len(second) != b.dim():
        raise ValueError(f"autopar.contract {equation!r} does not fit shapes {tuple(a.shape)} and {tuple(b.shape)}")
    sizes: dict[str, int] = {}
    for factor, size in (*zip(first, a.shape, strict=True), *zip(second, b.shape, strict=True)):
        if sizes.setdefault(factor, size) != size:
            raise ValueError(f"autopar.contract {equation!r}: factor {factor} is {sizes[factor]} and {size}")
    return sizes


def _contract(a: Tensor, b: Tensor, equation: str) -> Tensor:
    _sizes(a, b, equation)
    return torch.einsum(_letters(equation), a, b).contiguous()


def _letters(equation: str) -> str:
    """The equation as ``torch.einsum`` writes it."""
    return equation.replace("()", "").replace(" ", "")


def _contract_shapes(a: Tensor, b: Tensor, equation: str) -> Tensor:
    sizes = _sizes(a, b, equation)
    return a.new_empty([sizes[factor] for factor in parse(equation)[2]])


def _save(context: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, b, context.equation = inputs
    needs_a, needs_b, _ = context.needs_input_grad[:3]
    context.save_for_backward(a if needs_b else None, b if needs_a else None)


def _gradient(context: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    a, b = context.saved_tensors
    first, second, result = parse(context.equation)
    needs_a, needs_b, _ = context.needs_input_grad[:3]
    contract = torch.ops.autopar.contract.default
    to_a = contract(gradient, b.conj(), write(result, second, first)) if needs_a else None
    to_b = contract(gradient, a.conj(), write(result, first, second)) if needs_b else None
    return to_a, to_b, None


define("contract(Tensor a, Tensor b, str equation) -> Tensor", _contract, _contract_shapes, _gradient, _save)
