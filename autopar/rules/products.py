"""Contractions that are one product of two matrices, and additions that such a product does as well.

The runtime runs them by ``mm``, ``linear`` and ``addmm``: one kernel, without another for a layout or for the addition.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.graph import Graph, Op, Ref

CONTRACTION, ADDITION = "autopar.contract.default", "aten.add.Tensor"
Shapes = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Product:
    """A contraction that is ``[m, k] @ [k, n]`` without moving anything in memory.

    Args:
        left, right: which input is the left matrix, which the right.
        left_shape, right_shape: the shapes in which they are read.
        turned: whether each of them is then transposed.
        shape: of the result.
    """

    left: int
    right: int
    left_shape: tuple[int, int]
    right_shape: tuple[int, int]
    turned: tuple[bool, bool]
    shape: tuple[int, ...]

    @property
    def flat_shape(self) -> tuple[int, int]:
        """Of the result as a matrix."""
        return self.left_shape[self.turned[0]], self.right_shape[not self.turned[1]]

    def takes_rows(self, shapes: Shapes) -> bool:
        """Whether the right input is a matrix, and the left one has its rows in the dims of the result."""
        rows = (*self.shape[:-1], self.left_shape[not self.turned[0]])
        return tuple(shapes[self.right]) == self.right_shape and tuple(shapes[self.left]) == rows


def find_product(op: Op, shapes: Shapes) -> Product | None:
    """The contraction as a product of matrices; None for other operators, for batched ones, and where factors lie mixed.

    >>> op = Op("y", "autopar.contract.default", ("x", "w"), ("y",), (Ref(0), Ref(1), "b s k, n k -> b s n"))
    >>> find_product(op, [(2, 3, 8), (4, 8)])
    Product(left=0, right=1, left_shape=(6, 8), right_shape=(4, 8), turned=(False, True), shape=(2, 3, 4))
    """
    if op.target != CONTRACTION or op.args[:2] != (Ref(0), Ref(1)) or op.kwargs:
        return None
    first, second, result = parse_equation(op.args[2])
    if any(len(set(term)) < len(term) for term in (first, second, result)):
        return None
    summed = set(first) & set(second)
    if not summed or summed & set(result) or set(result) != set(first) ^ set(second):
        return None
    size = dict(zip((*first, *second), (*shapes[0], *shapes[1]), strict=True))
    terms = [(0, first), (1, second)]
    if result[:1] and result[0] in second:
        terms.reverse()
    (left, rows), (right, columns) = terms
    ahead, behind = (tuple(factor for factor in term if factor not in summed) for term in (rows, columns))
    order = tuple(factor for factor in rows if factor in summed)
    if result != ahead + behind or order != tuple(factor for factor in columns if factor in summed):
        return None
    turned = (rows != ahead + order, columns != order + behind)
    if (turned[0] and rows != order + ahead) or (turned[1] and columns != behind + order):
        return None
    m, k, n = (math.prod(size[factor] for factor in term) for term in (ahead, order, behind))
    return Product(
        left, right, (k, m) if turned[0] else (m, k), (n, k) if turned[1] else (k, n), turned, tuple(size[factor] for factor in result)
    )


def parse_equation(equation: object) -> tuple[tuple[str, ...], ...]:
    """Factors of both operands and of the result, of an equation ``b s k, n k -> b s n``; ``()`` is a scalar."""
    terms = str(equation).replace("->", ",").split(",")
    return tuple(() if term.strip() == "()" else tuple(term.split()) for term in terms)


def is_plain_addition(op: Op) -> bool:
    """Whether it adds two tensors without a scale."""
    return op.target == ADDITION and op.args == (Ref(0), Ref(1)) and not op.kwargs


def find_fusable_additions(graph: Graph) -> Mapping[str, int]:
    """The additions that run as one kernel with a contraction which they alone read, if nothing is resharded in between.

    The other tensor is there before the contraction, and is as large as the product or a row of it.

    Returns:
        by the addition's name, the position of the contraction's result among its inputs.
    """
    leaving, place = {output.tensor for output in graph.outputs}, {op.name: index for index, op in enumerate(graph.ops)}
    found: dict[str, int] = {}
    for op in graph.ops:
        if not is_plain_addition(op) or len(op.inputs) != 2:
            continue
        for position, (name, other) in enumerate((op.inputs, op.inputs[::-1])):
            maker, before = graph.producer.get(name), graph.producer.get(other)
            if maker is None or maker.phase != op.phase or name in leaving or len(graph.consumers[name]) != 1:
                continue
            if before is not None and place[before.name] > place[maker.name]:
                continue
            product = find_product(maker, [graph.tensors[tensor].shape for tensor in maker.inputs])
            result, addend = graph.tensors[op.outputs[0]], graph.tensors[other]
            if product is not None and product.shape == result.shape and addend.dtype == result.dtype and fits(addend.shape, product):
                found[op.name] = position
                break
    return found


def fits(addend: Sequence[int], product: Product) -> bool:
    """Whether a tensor is as large as the product, or one row that is added to each of its matrix's rows."""
    shape = tuple(addend)
    columns = product.shape[len(product.shape) - len(shape) :]
    return shape == columns and (shape == product.shape or (bool(shape) and math.prod(shape) == product.flat_shape[1]))
