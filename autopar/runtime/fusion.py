"""Which operators of a schedule run as one kernel, and which may write over what they read.

The graph, the plan and its collectives stay as they are: this is decided when a schedule is bound to its ranks, and only makes a step
cheaper. Nothing here moves a collective, keeps a value past its ``free`` or raises the peak of live memory. Both rules are what PyTorch
does with the same model run eagerly, where a linear adds its bias inside the product and gradients are summed in place.

========  ============================================================================================================
pairs     a contraction and the addition that alone reads it are ``addmm``: a bias, or any tensor of the result's shape
in place  a pointwise operator whose result is as large as an input that nobody reads later writes over that input
========  ============================================================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from autopar.graph import Op, Ref
from autopar.runtime.kernels import Kernel, Product, Shapes, bind_arguments, find_product
from autopar.runtime.operators import find_function, find_operator

CONTRACTION, ADDITION = "autopar.contract.default", "aten.add.Tensor"


@dataclass(frozen=True)
class Line:
    """What of an instruction matters here.

    Args:
        op: None where it is no operator, or has collectives inside.
        reads: the values that must be whole when it runs: of a wait, those that its collective was sending; of a free, none.
        writes: the values that are there after it; of a start, none.
        half: of the step, forward or backward.
    """

    op: Op | None
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    half: str


@dataclass(frozen=True)
class Local:
    """A value on one rank."""

    shape: tuple[int, ...]
    dtype: str


LocalOf = Callable[[str], Local]


@dataclass(frozen=True)
class Pair:
    """An addition done by the contraction that it reads.

    Args:
        contraction, addition: indices of the instructions.
        addend: position of the other tensor among the addition's reads.
        in_place: the result takes the other tensor's memory.
    """

    contraction: int
    addition: int
    addend: int
    in_place: bool


@dataclass(frozen=True)
class Fusion:
    """What ``find_fusion`` decided.

    Args:
        pairs: by index of the contraction, where the pair runs; the addition's place in the list does nothing.
        in_place: by index of the instruction, the position of the read whose memory its result takes.
    """

    pairs: Mapping[int, Pair] = field(default_factory=dict)
    in_place: Mapping[int, int] = field(default_factory=dict)


def find_fusion(
    items: Sequence[Line], root: Mapping[str, str], outputs: Iterable[str], local: LocalOf, *, in_place: bool = True
) -> Fusion:  # fmt: skip
    """What may be fused in a schedule.

    Args:
        items: its instructions, in order.
        root: for each value the one whose memory it is: itself, or what it is a view of.
        outputs: the values that leave.
        local: a value's local shape and dtype.
        in_place: False where someone else plans memory: graphs for a compiler.
    """
    lives = _Lives(items, root, outputs, local, in_place)
    pairs = {pair.contraction: pair for index in range(len(items)) if (pair := _find_pair(index, lives)) is not None}
    done = {pair.addition for pair in pairs.values()}
    found = {index: _find_reuse(index, lives) for index in range(len(items)) if index not in done}
    return Fusion(pairs, {index: position for index, position in found.items() if position is not None})


class _Lives:
    """Who writes each value, who reads it, and when its memory is last used."""

    def __init__(
        self, items: Sequence[Line], root: Mapping[str, str], outputs: Iterable[str], local: LocalOf, in_place: bool
    ) -> None:  # fmt: skip
        self.items, self.root, self.outputs, self.local, self.in_place = items, root, frozenset(outputs), local, in_place
        self.writer = {value: index for index, item in enumerate(items) for value in item.writes}
        self.readers: dict[str, list[int]] = {}
        self.uses: dict[str, list[int]] = {}
        for index, item in enumerate(items):
            for value in item.reads:
                self.readers.setdefault(value, []).append(index)
            for value in (*item.reads, *item.writes):
                self.uses.setdefault(root[value], []).append(index)
        for value in self.outputs:
            self.uses.setdefault(root[value], []).append(len(items))

    def may_take(self, value: str, index: int, since: int, result: str) -> bool:
        """Whether ``result``, made by ``index``, may take the memory of ``value``: a tensor of its own and as large, made by an
        operator of the same half (a backward pass may run twice on what forward left), that nobody else uses from ``since`` on."""
        writer = self.writer.get(value)
        if not self.in_place or writer is None or self.root[value] != value or self.local(value) != self.local(result):
            return False
        made = self.items[writer]
        used = [use for use in self.uses[value] if use >= since]
        return made.half == self.items[index].half and _makes_memory(made.op) and used == [index]


def _makes_memory(op: Op | None) -> bool:
    """Whether the results are tensors of their own, by the operator's schema."""
    schema = getattr(find_operator(op.target), "_schema", None) if op is not None else None
    return schema is not None and all(item.alias_info is None for item in schema.returns)


def _find_pair(index: int, lives: _Lives) -> Pair | None:
    """The pair whose contraction stands at ``index``: one reader, an addition in the same half whose other tensor is there already."""
    item = lives.items[index]
    if item.op is None or item.op.target != CONTRACTION or item.writes[0] in lives.outputs:
        return None
    readers = lives.readers.get(item.writes[0], [])
    addition = lives.items[readers[0]] if len(readers) == 1 else item
    if addition.op is None or addition.op.target != ADDITION or not _is_plain(addition.op) or addition.half != item.half:
        return None
    addend = 1 - addition.reads.index(item.writes[0])
    other, result = lives.local(addition.reads[addend]), lives.local(addition.writes[0])
    product = find_product(item.op, [lives.local(value).shape for value in item.reads])
    if product is None or product.shape != result.shape or not _fits(other.shape, product) or other.dtype != result.dtype:
        return None
    if lives.writer.get(addition.reads[addend], -1) >= index:
        return None
    return Pair(index, readers[0], addend, lives.may_take(addition.reads[addend], readers[0], index, addition.writes[0]))


def _is_plain(op: Op) -> bool:
    """Two tensors and no scale."""
    return op.args == (Ref(0), Ref(1)) and not op.kwargs


def _fits(shape: tuple[int, ...], product: Product) -> bool:
    """Whether a tensor of this shape is a row added to every row of the product's matrix, or as large as that matrix."""
    columns = product.shape[len(product.shape) - len(shape) :]
    return shape == product.shape or (shape == columns and bool(shape) and _size(shape) == product.flat_shape[1])


def _size(shape: Sequence[int]) -> int:
    return int(torch.Size(shape).numel())


def bind_pair(pair: Pair, op: Op, shapes: Shapes, addend: Sequence[int]) -> Kernel:
    """The kernel of a pair: reads the contraction's inputs, then the addend; writes what the addition writes.

    Args:
        op: the contraction.
        shapes: local shapes of its inputs; ``addend``: that of the other tensor.
    """
    product = find_product(op, shapes)
    assert product is not None
    flat = product.flat_shape if tuple(addend) == product.shape else (product.flat_shape[1],)
    left, right = product.left, product.right
    rows = (*product.shape[:-1], product.left_shape[1])
    if len(addend) == 1 and product.turned == (False, True) and shapes[right] == product.right_shape and shapes[left] == rows:
        return lambda tensors: (linear(tensors[left], tensors[right], tensors[2]),)

    def run(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        other = tensors[2]
        if pair.in_place and other.is_contiguous():
            other.view(flat).addmm_(*product.matrices(tensors))
            return (other,)
        return (torch.addmm(other.reshape(flat), *product.matrices(tensors)).view(product.shape),)

    return run


# --- in place ----------------------------------------------------------------------------------------------------------

_FIRST, _EITHER = (0,), (0, 1)
IN_PLACE: Mapping[str, tuple[tuple[int, ...], str, str]] = {
    "aten.add.Tensor": (_EITHER, "aten.add.out", "out"),
    "aten.sub.Tensor": (_EITHER, "aten.sub.out", "out"),
    "aten.mul.Tensor": (_EITHER, "aten.mul.out", "out"),
    "aten.div.Tensor": (_EITHER, "aten.div.out", "out"),
    "aten.gelu_backward.default": (_FIRST, "aten.gelu_backward.grad_input", "grad_input"),
    "aten.silu_backward.default": (_FIRST, "aten.silu_backward.grad_input", "grad_input"),
    "aten.tanh_backward.default": (_FIRST, "aten.tanh_backward.grad_input", "grad_input"),
    "aten.sigmoid_backward.default": (_FIRST, "aten.sigmoid_backward.grad_input", "grad_input"),
    "aten.threshold_backward.default": (_FIRST, "aten.threshold_backward.grad_input", "grad_input"),
}
"""By target: positions among the arguments whose memory the result may take, the operator that writes there, and its name for it."""


def _find_reuse(index: int, lives: _Lives) -> int | None:
    """The position of the read whose memory the result of a pointwise operator may take."""
    item = lives.items[index]
    if item.op is None or item.op.target not in IN_PLACE:
        return None
    for place in IN_PLACE[item.op.target][0]:
        argument = item.op.args[place]
        if isinstance(argument, Ref) and lives.may_take(item.reads[argument.index], index, index, item.writes[0]):
            return argument.index
    return None


def bind_in_place(op: Op, position: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Kernel:
    """The kernel of a pointwise operator that writes over its read at ``position``."""
    _, target, keyword = IN_PLACE[op.target]
    function, arguments = find_function(target), bind_arguments(args, kwargs)

    def run(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        given, named = arguments(tensors)
        return (function(*given, **named, **{keyword: tensors[position]}),)

    return run
