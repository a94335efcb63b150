"""One operator on one rank, as an expression of the straight-line code that runs it.

What can be settled before the first step is settled here: which function runs, where its tensors go among the arguments, and for a
contraction the shapes of the two matrices it multiplies, so that a step pays for neither ``einsum`` nor the dispatch of a custom operator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from autopar.dialect.contraction import parse
from autopar.graph import Op, Ref
from autopar.runtime.code import Code, ErrorHandler
from autopar.runtime.operators import named_results, registered

Kernel = Callable[[Sequence[Tensor]], Sequence[Tensor]]
"""The local tensors that are read, in order -> those that are written, in order."""
Shapes = Sequence[Sequence[int]]


def bind_kernel(op: Op, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], shapes: Shapes) -> Kernel:
    """The operator alone, as a function.

    Args:
        function: the operator that the target names, or what runs in its place.
        args, kwargs: its arguments on this rank, ``Ref`` in place of tensors.
        shapes: local shapes of its inputs.
    """
    code = Code(1)
    reads = [str(index) for index in range(len(op.inputs))]
    writes = [f"out {index}" for index in range(len(op.outputs))]
    expression = write_operator(code, op, function, args, kwargs, shapes, [code.read(name) for name in reads])
    assign(code, op, [code.write(name) for name in writes], expression)
    segment = code.segment("kernel")

    def run(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        values = dict(zip(reads, tensors, strict=True))
        segment([values], {}, None)
        return [values[name] for name in writes]

    return run


def write_operator(
    code: Code, op: Op, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], shapes: Shapes, reads: Sequence[str]
) -> str:  # fmt: skip
    """The expression of an operator.

    Args:
        function, args, kwargs, shapes: as of ``bind_kernel``.
        reads: the variables of its inputs.
    """
    product = find_product(op, shapes)
    return write_call(code, function, args, kwargs, reads) if product is None else product.write(code, shapes, reads)


def write_call(code: Code, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], reads: Sequence[str]) -> str:
    """A call with tensors put in for each ``Ref``."""
    given = [_argument(code, item, reads) for item in args]
    given += [f"{name}={_argument(code, item, reads)}" for name, item in kwargs.items()]
    return f"{code.object(function)}({', '.join(given)})"


def _argument(code: Code, argument: Any, reads: Sequence[str]) -> str:
    if isinstance(argument, Ref):
        return reads[argument.index]
    if not _holds_tensors(argument):
        return code.object(argument)
    if isinstance(argument, Mapping):
        return "{" + ", ".join(f"{key!r}: {_argument(code, item, reads)}" for key, item in argument.items()) + "}"
    return "[" + ", ".join(_argument(code, item, reads) for item in argument) + "]"


def _holds_tensors(argument: Any) -> bool:
    if isinstance(argument, Mapping):
        return any(map(_holds_tensors, argument.values()))
    return isinstance(argument, Ref) or (isinstance(argument, (list, tuple)) and any(map(_holds_tensors, argument)))


def assign(code: Code, op: Op, writes: Sequence[str], expression: str, handler: ErrorHandler | None = None) -> None:
    """Assigns an operator's results to variables."""
    if not _gives_its_outputs(op):
        expression = f"{code.object(partial(named_results, op))}({expression})"
        code.add(f"[{', '.join(writes)}] = {expression}", handler)
    else:
        code.add(f"{', '.join(writes)} = {expression}", handler)


def _gives_its_outputs(op: Op) -> bool:
    """Whether what is called gives the tensors that the graph names, by torch's schema: one, or a tuple of all of them."""
    schema = getattr(registered(op.target), "_schema", None)
    return schema is not None and bool(op.outputs) and [str(item.type) for item in schema.returns] == ["Tensor"] * len(op.outputs)


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

    @property
    def flat_shape(self) -> tuple[int, int]:
        """Of the result as a matrix."""
        return self.left_shape[self.turned[0]], self.right_shape[not self.turned[1]]

    def write(self, code: Code, shapes: Shapes, reads: Sequence[str]) -> str:
        """The contraction's expression, in as few calls as torch allows.

        Args:
            shapes: of its inputs; what ``matmul`` and ``linear`` take as it is need not be reshaped nor transposed by itself.
        """
        left, right = reads[self.left], reads[self.right]
        if self.turned[0] or not self.takes_rows(shapes):
            made = f"{code.object(torch.mm)}({', '.join(self.write_matrices(shapes, reads))})"
            return made if self.flat_shape == self.shape else f"{made}.view({self.shape})"
        return f"{code.object(linear if self.turned[1] else torch.matmul)}({left}, {right})"

    def takes_rows(self, shapes: Shapes) -> bool:
        """Whether the right input is a matrix, and the left one has its rows in the dims of the result."""
        rows = (*self.shape[:-1], self.left_shape[not self.turned[0]])
        return tuple(shapes[self.right]) == self.right_shape and tuple(shapes[self.left]) == rows

    def write_matrices(self, shapes: Shapes, reads: Sequence[str]) -> tuple[str, str]:
        """The expressions of both matrices, views where memory allows."""
        left, right = (
            reads[index] if tuple(shapes[index]) == shape else f"{reads[index]}.reshape({shape})"
            for index, shape in ((self.left, self.left_shape), (self.right, self.right_shape))
        )
        return f"{left}.t()" if self.turned[0] else left, f"{right}.t()" if self.turned[1] else right


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
