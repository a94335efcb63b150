"""One operator on one rank, bound once and called every step: local tensors in, local tensors out.

What can be settled before the first step is settled here: which function runs, where its tensors go among the arguments, and for a
contraction the shapes of the two matrices it multiplies, so that a step pays for neither ``einsum`` nor the dispatch of a custom operator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from autopar.dialect.contraction import parse
from autopar.graph import Op, Ref
from autopar.runtime.operators import named_results, with_tensors

Kernel = Callable[[Sequence[Tensor]], Sequence[Tensor]]
"""The local tensors that are read, in order -> those that are written, in order."""
Shapes = Sequence[Sequence[int]]


def bind_kernel(op: Op, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], shapes: Shapes) -> Kernel:
    """The operator as a kernel.

    Args:
        function: the operator that the target names, or what runs in its place.
        args, kwargs: its arguments on this rank, ``Ref`` in place of tensors.
        shapes: local shapes of its inputs.
    """
    product = find_product(op, shapes)
    if product is not None:
        return product.kernel(shapes)
    arguments, count = bind_arguments(args, kwargs), len(op.outputs)

    def run(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        given, named = arguments(tensors)
        result = function(*given, **named)
        if isinstance(result, Tensor) and count == 1:
            return (result,)
        plain = isinstance(result, tuple) and len(result) == count and all(isinstance(item, Tensor) for item in result)
        return result if plain else named_results(op, result)

    return run


def bind_arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[[Sequence[Tensor]], tuple[Sequence[Any], Mapping[str, Any]]]:
    """The tensors that are read -> the call's arguments, those that hold none made once."""
    places = [(place, item.index) for place, item in enumerate(args) if isinstance(item, Ref)]
    nested = [(place, item) for place, item in enumerate(args) if not isinstance(item, Ref) and _holds_tensors(item)]
    named = {name: item for name, item in kwargs.items() if _holds_tensors(item)}

    if not nested and not named and places == [(place, place) for place in range(len(places))]:
        rest = tuple(args[len(places) :])
        return lambda tensors: ((*tensors, *rest), kwargs)

    def fill(tensors: Sequence[Tensor]) -> tuple[Sequence[Any], Mapping[str, Any]]:
        given = list(args)
        for place, index in places:
            given[place] = tensors[index]
        for place, item in nested:
            given[place] = with_tensors(item, tensors)
        return given, kwargs if not named else {**kwargs, **with_tensors(named, tensors)}

    return fill


def _holds_tensors(argument: Any) -> bool:
    if isinstance(argument, Mapping):
        return any(map(_holds_tensors, argument.values()))
    return isinstance(argument, Ref) or (isinstance(argument, (list, tuple)) and any(map(_holds_tensors, argument)))


# --- contractions as products of two matrices --------------------------------------------------------------------------


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

    def matrices(self, tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Both matrices, as views where memory allows."""
        left, right = _shaped(tensors[self.left], self.left_shape), _shaped(tensors[self.right], self.right_shape)
        return left.t() if self.turned[0] else left, right.t() if self.turned[1] else right

    @property
    def flat_shape(self) -> tuple[int, int]:
        """Of the result as a matrix."""
        return self.left_shape[self.turned[0]], self.right_shape[not self.turned[1]]

    def kernel(self, shapes: Shapes) -> Kernel:
        """The contraction, in as few calls as torch allows.

        Args:
            shapes: of its inputs; what ``matmul`` and ``linear`` take as it is need not be reshaped nor transposed by itself.
        """
        left, right = self.left, self.right
        if self.turned[0] or tuple(shapes[right]) != self.right_shape or tuple(shapes[left]) != (*self.shape[:-1], self.left_shape[1]):
            return self.multiply
        if self.turned[1]:
            return lambda tensors: (linear(tensors[left], tensors[right]),)
        return lambda tensors: (torch.matmul(tensors[left], tensors[right]),)

    def multiply(self, tensors: Sequence[Tensor]) -> tuple[Tensor]:
        """The contraction of tensors of whatever shapes."""
        return (_shaped(torch.mm(*self.matrices(tensors)), self.shape),)


def _shaped(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """``reshape``, of which most matrices have no need: asking is ten times cheaper than the operator."""
    return tensor if tensor.shape == shape else tensor.reshape(shape)


def find_product(op: Op, shapes: Shapes) -> Product | None:
    """The contraction as a product of matrices; None for other operators, for batched ones, and where factors lie mixed.

    >>> op = Op("y", "autopar.contract.default", ("x", "w"), ("y",), (Ref(0), Ref(1), "b s k, n k -> b s n"))
    >>> find_product(op, [(2, 3, 8), (4, 8)])
    Product(left=0, right=1, left_shape=(6, 8), right_shape=(4, 8), turned=(False, True), shape=(2, 3, 4))
    """
    if op.target != "autopar.contract.default" or op.args[:2] != (Ref(0), Ref(1)) or op.kwargs:
        return None
    first, second, result = parse(op.args[2])
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
