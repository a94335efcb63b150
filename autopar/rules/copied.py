"""Operands that a kernel copies before it reads them, since they do not lie in order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from autopar.graph import Op
from autopar.rules.memory_order import MemoryOrder, Shape, strides_of
from autopar.rules.products import CONTRACTION, parse_equation

AS_ROWS: Mapping[str, tuple[int, ...]] = {"autopar.attention.default": (0, 1, 2), "autopar.attention_backward.default": (0, 1, 2, 3, 4)}
"""Operands of kernels that need neighbours along the last dim side by side in memory. Others are copied."""
AS_WHOLE: Mapping[str, tuple[int, ...]] = {
    "aten.native_group_norm.default": (0, 1, 2),
    "aten.native_group_norm_backward.default": (0, 1, 2, 3, 4),
    "autopar.batch_norm_backward.default": (0, 1),
}
"""Operands of kernels that need all elements in the order of memory. Others are copied."""


def find_copied(op: Op, shapes: Sequence[Shape], orders: Sequence[MemoryOrder]) -> tuple[int, ...]:
    """The positions of the operands that an operator copies before it reads them.

    A contraction reads operands as matrices, whatever the order of their dims. Of those that repeat, dims that it takes as one must lie in
    memory as one. ``AS_ROWS`` and ``AS_WHOLE`` name others.

    Args:
        shapes, orders: of the operands on a rank, and how they lie.
    """
    if all(order.in_order for order in orders):
        return ()
    if op.target != CONTRACTION:
        rows = [place for place in AS_ROWS.get(op.target, ()) if (orders[place].strides or (0,))[-1] != 1]
        whole = AS_WHOLE.get(op.target, ())[: len(orders)]
        return tuple([place for place in (*rows, *whole) if not orders[place].in_order])
    first, second, result = parse_equation(op.args[2])
    operands = zip((first, second), (second, first), shapes, orders, strict=True)
    return tuple(
        [
            position
            for position, (own, other, shape, order) in enumerate(operands)
            if order.repeats and not _is_matrix(own, other, result, shape, order)
        ]
    )


def _is_matrix(own: Sequence[str], other: Sequence[str], result: Sequence[str], shape: Shape, order: MemoryOrder) -> bool:
    """Whether the factors of an operand that a contraction takes as one dim lie in memory as one: each begins where the next one ends."""
    found = strides_of(shape, order)
    if found is None:
        return False
    strides, sizes = dict(zip(own, found, strict=True)), dict(zip(own, shape, strict=True))
    for taken in (
        [name for name in result if name in own and name in other],
        [name for name in result if name in own and name not in other],
        [name for name in own if name in other and name not in result],
    ):
        long = [name for name in taken if sizes[name] > 1]
        if any(strides[one] != strides[behind] * sizes[behind] for one, behind in pairwise(long)):
            return False
    return True
