"""One operator on one rank, as an expression of the straight-line code that runs it.

What can be settled before the first step is settled here: which function runs, where its tensors go among the arguments, and for a
contraction the shapes of the two matrices it multiplies, so that a step pays for neither ``einsum`` nor the dispatch of a custom operator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from autopar.dialect.experts import Places, View, multiply_grouped, settle_layout, sum_grouped
from autopar.dialect.library import WHOLE
from autopar.graph import Op, Ref
from autopar.rules import Product, find_product
from autopar.runtime.instructions.code import Code, ErrorHandler
from autopar.runtime.instructions.operators import named_results, registered

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
    return write_call(code, function, args, kwargs, reads) if product is None else write_product(code, product, shapes, reads)


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


def write_product(code: Code, product: Product, shapes: Shapes, reads: Sequence[str]) -> str:
    """A contraction's expression, in as few calls as torch allows.

    Args:
        shapes: of its inputs; what ``matmul`` and ``linear`` take as it is need not be reshaped nor transposed by itself.
    """
    left, right = reads[product.left], reads[product.right]
    if product.turned[0] or not product.takes_rows(shapes):
        made = f"{code.object(torch.mm)}({', '.join(write_matrices(product, shapes, reads))})"
        return made if product.flat_shape == product.shape else f"{made}.view({write_sizes(product.shape)})"
    return f"{code.object(linear if product.turned[1] else torch.matmul)}({left}, {right})"


def write_expert_product(
    code: Code, equation: str, experts: int, dtype: torch.dtype, shapes: Shapes, places: Places, reads: Sequence[str]
) -> str | None:  # fmt: skip
    """The expression of an ``expert_contract`` on a rank with all experts; None where torch has no grouped product of it.

    Args:
        dtype: of its operands; shapes: of its inputs.
        places: finds where rows end.
    """
    layout = settle_layout(*map(tuple, shapes), equation, experts, dtype)
    if not layout.grouped:
        return None
    ends = f"{code.object(places)}.find_ends({reads[2]}, {WHOLE}, {experts})"
    left, right = _write_view(layout.a, reads[0]), _write_view(layout.b, reads[1])
    made = f"{code.object(sum_grouped if layout.outer else multiply_grouped)}({left}, {right}, {ends})"
    made = made if layout.shape is None else f"{made}.view({write_sizes(layout.shape)})"
    return f"{made}.contiguous()" if layout.order is None else f"{made}.permute({write_sizes(layout.order)}).contiguous()"


def _write_view(view: View, value: str) -> str:
    value = value if view.order is None else f"{value}.permute({write_sizes(view.order)})"
    return value if view.shape is None else f"{value}.reshape({write_sizes(view.shape)})"


def write_sizes(shape: Sequence[int]) -> str:
    """Sizes as arguments of ``view`` and ``reshape``: one by one, since torch takes twice as long to read a tuple."""
    return ", ".join(map(str, shape)) or "()"


def write_matrices(product: Product, shapes: Shapes, reads: Sequence[str]) -> tuple[str, str]:
    """The expressions of both matrices, views where memory allows."""
    left, right = (
        reads[index] if tuple(shapes[index]) == shape else f"{reads[index]}.reshape({write_sizes(shape)})"
        for index, shape in ((product.left, product.left_shape), (product.right, product.right_shape))
    )
    return f"{left}.t()" if product.turned[0] else left, f"{right}.t()" if product.turned[1] else right
