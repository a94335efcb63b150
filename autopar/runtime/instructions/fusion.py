"""Fusion of a contraction with an addition, and operators that write over an input.

A contraction and the addition that alone reads it run as ``addmm``, for a bias or any tensor of the result's shape. Graph, plan and
collectives stay the same: fusion happens when a schedule is bound to its ranks. It moves no collective, keeps no value past its ``free``
and never raises the peak of live memory. Eager PyTorch does the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from autopar.graph import Op, Ref
from autopar.rules import CONTRACTION, Product, find_product, is_plain_addition, out_variant
from autopar.runtime.instructions.code import Code
from autopar.runtime.instructions.kernels import Shapes, write_call, write_matrices, write_sizes
from autopar.runtime.instructions.operators import find_function, find_operator, registered
from autopar.schedule import Instruction, Schedule
from autopar.schedule.storages import needed


@dataclass(frozen=True)
class Line:
    """What of an instruction matters here.

    Args:
        op: None where it is no operator, or has collectives inside.
        reads: the values that must be whole when it runs: of a wait, those that its collective was sending; of a free, none.
        writes: the values that are there after it; of a start, none.
        half: of the step, forward or backward.
        over: the value whose memory the result takes, if it may in this form.
    """

    op: Op | None
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    half: str
    over: str | None = None


@dataclass(frozen=True)
class Local:
    """A value on one rank: the shape of the largest part, and for each dim what all ranks' lengths follow from."""

    shape: tuple[int, ...]
    lengths: tuple[object, ...]
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


def find_fusion(items: Sequence[Line], root: Mapping[str, str], outputs: Iterable[str], local: LocalOf) -> Mapping[int, Pair]:
    """The additions of a schedule that run with a contraction, by index of the contraction; the addition's place then does nothing.

    Args:
        items: its instructions, in order.
        root: for each value the one whose memory it is: itself, or what it is a view of or written over.
        outputs: the values that leave.
        local: a value's local shapes and dtype.
    """
    lives = _Lives(items, root, outputs, local)
    found = (_find_pair(index, lives) for index in range(len(items)))
    return {pair.contraction: pair for pair in found if pair is not None}


def pairs_of(schedule: Schedule, in_place: bool) -> Mapping[int, Pair]:
    """What of the schedule runs as one kernel, by index of the first instruction.

    Args:
        in_place: whether results may take the memory of what they are written over.
    """
    leaving = [value for _, value in schedule.outputs]
    lines = [_line(schedule, item, in_place) for item in schedule.instructions]
    return find_fusion(lines, schedule.storage, leaving, lambda value: _local(schedule, value))


def _line(schedule: Schedule, item: Instruction, in_place: bool) -> Line:
    operation = schedule.operations[item.of] if item.kind == "run" else None
    op = None if operation is None or operation.strategy.inner else operation.op
    writes = () if item.kind == "start" else item.writes
    return Line(op, needed(schedule, item), writes, item.half, item.over if in_place else None)


def _local(schedule: Schedule, value: str) -> Local:
    tensor, spec, sizes = schedule.graph.tensors[schedule.values[value].tensor], schedule.specs[value], schedule.machine.mesh.sizes
    return Local(spec.local_shape(tensor.shape, sizes), spec.lengths(tensor.shape, sizes), tensor.dtype)


class _Lives:
    """Who writes each value, who reads it, and when its memory is used."""

    def __init__(self, items: Sequence[Line], root: Mapping[str, str], outputs: Iterable[str], local: LocalOf) -> None:
        self.items, self.root, self.outputs, self.local = items, root, frozenset(outputs), local
        self.writer = {value: index for index, item in enumerate(items) for value in item.writes}
        self.readers: dict[str, list[int]] = {}
        self.uses: dict[str, list[int]] = {}
        for index, item in enumerate(items):
            for value in item.reads:
                self.readers.setdefault(value, []).append(index)
            for value in (*item.reads, *item.writes):
                self.uses.setdefault(root[value], []).append(index)

    def unused(self, value: str, begin: int, end: int) -> bool:
        """Whether nobody uses the memory of ``value`` from one instruction up to another."""
        return not any(begin <= use < end for use in self.uses[self.root[value]])


def _find_pair(index: int, lives: _Lives) -> Pair | None:
    """The pair whose contraction stands at ``index``: one reader, an addition in the same half whose other tensor is there already."""
    item = lives.items[index]
    if item.op is None or item.op.target != CONTRACTION or item.writes[0] in lives.outputs:
        return None
    readers = lives.readers.get(item.writes[0], [])
    addition = lives.items[readers[0]] if len(readers) == 1 else item
    if addition.op is None or not is_plain_addition(addition.op) or addition.half != item.half:
        return None
    addend = 1 - addition.reads.index(item.writes[0])
    beside, result = lives.local(addition.reads[addend]), lives.local(addition.writes[0])
    product = find_product(item.op, [lives.local(value).shape for value in item.reads])
    if product is None or product.shape != result.shape or not _fits(beside, result, product):
        return None
    if not lives.local(item.writes[0]).dtype == beside.dtype == result.dtype:  # a half-precision product beside a float32 stream
        return None
    if lives.writer.get(addition.reads[addend], -1) >= index:
        return None
    other = addition.reads[addend]
    return Pair(index, readers[0], addend, addition.over == other and lives.unused(other, index, readers[0]))


def _fits(addend: Local, result: Local, product: Product) -> bool:
    """Whether a tensor is a row added to every row of the product's matrix, or as large as that matrix, on every rank."""
    shape, columns = addend.shape, result.lengths[len(result.lengths) - len(addend.lengths) :]
    return addend.lengths == columns and (shape == product.shape or (bool(shape) and _size(shape) == product.flat_shape[1]))


def _size(shape: Sequence[int]) -> int:
    return int(torch.Size(shape).numel())


def write_pair(code: Code, pair: Pair, op: Op, shapes: Shapes, addend: Sequence[int], reads: Sequence[str]) -> str:
    """The expression of a pair, which gives what the addition writes.

    Args:
        op: the contraction.
        shapes: local shapes of its inputs; ``addend``: that of the other tensor.
        reads: the variables of the contraction's inputs, then of the addend.
    """
    product = find_product(op, shapes)
    assert product is not None
    other = reads[2]
    if len(addend) == 1 and product.turned == (False, True) and product.takes_rows(shapes):
        return f"{code.object(linear)}({reads[product.left]}, {reads[product.right]}, {other})"
    flat = product.flat_shape if tuple(addend) == product.shape else (product.flat_shape[1],)
    left, right = write_matrices(product, shapes, reads)
    if pair.in_place:
        return f"{code.object(_add_product)}({other}, {flat}, {left}, {right})"
    flattened = other if tuple(addend) == flat else f"{other}.reshape({write_sizes(flat)})"
    made = f"{code.object(torch.addmm)}({flattened}, {left}, {right})"
    return made if product.flat_shape == product.shape else f"{made}.view({write_sizes(product.shape)})"


def _add_product(other: Tensor, flat: tuple[int, ...], left: Tensor, right: Tensor) -> Tensor:
    """The product added to a tensor where it lies, if it is one run of memory."""
    if other.is_contiguous():
        other.view(flat).addmm_(left, right)
        return other
    return torch.addmm(other.reshape(flat), left, right).view(other.shape)


# --- in place ----------------------------------------------------------------------------------------------------------


def makes_memory(op: Op) -> bool:
    """Whether the results are tensors of their own, by torch's schema of the operator; a reshape's may not be, whatever it stands for."""
    if find_operator(op.target) is torch.reshape:
        return False
    schema = getattr(registered(op.target), "_schema", None)
    return schema is not None and all(item.alias_info is None for item in schema.returns)


def write_in_place(code: Code, op: Op, position: int, args: Sequence[Any], kwargs: Mapping[str, Any], reads: Sequence[str]) -> str:
    """The expression of a pointwise operator that writes over its read at ``position``."""
    target, keyword = out_variant(op)
    return write_call(code, find_function(target), args, {**kwargs, keyword: Ref(position)}, reads)
