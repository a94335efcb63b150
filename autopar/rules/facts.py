"""What follows from an operator's row beside its rule and its work: aliasing, memory, draws, numbers that are looked up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autopar.graph import Graph, Op, Ref, Tensor
from autopar.rules.lookup import find_row
from autopar.rules.signature import LooksUp, Row, call_of, signature
from autopar.rules.table import ROWS
from autopar.sharding import AxisLayout


def family(op: Op) -> str:
    """The class by which cost models tell operators apart: its family in the table, ``view`` for everything that shares its input's
    storage, ``unknown`` without a row."""
    row = find_row(op.target)
    return "unknown" if row is None else "view" if row.alias else row.family


def is_alias(op: Op) -> bool:
    """Whether output 0 shares the storage of input 0 (views, and what is stored into it)."""
    row = find_row(op.target)
    return row is not None and (row.alias or row.stores)


def axis_layout(op: Op) -> AxisLayout | None:
    """How the operator's input 0 lies over some axes, where the model itself says so."""
    row = find_row(op.target)
    if row is None or not row.layout:
        return None
    text = op.args[[parameter.name for parameter in signature(row.operator)].index(row.layout)]
    return AxisLayout.parse(str(text))


STORING: Mapping[str, str] = {f"{row.name.removesuffix('_')}.default": f"{row.name}.default" for row in ROWS if row.stores}
"""Operators that give a tensor with some of its entries replaced, and those that put these entries into the tensor itself."""


def stores(op: Op) -> bool:
    """Whether the operator writes into input 0, some entries of it, and gives it as output 0."""
    row = find_row(op.target)
    return row is not None and row.stores


def storage_roots(graph: Graph) -> dict[str, str]:
    """The tensor whose storage each tensor shares when nothing is resharded in between."""
    root = {item.tensor: item.tensor for item in graph.inputs}
    for op in graph.ops:
        root.update((tensor, root[op.inputs[0]] if op.inputs and is_alias(op) else tensor) for tensor in op.outputs)
    return root


def bytes_moved(op: Op, inputs: Sequence[int], outputs: Sequence[int]) -> int:
    """Bytes that the operator reads and writes, whose operands are of so many bytes.

    A view moves none. Entries that are stored, or read along a diagonal, count twice; the tensor that has them does not count. Rows of
    which sums are made are put in order and read to be added, weighed ones written in float32 between; sums are written and narrowed.
    """
    row = find_row(op.target)
    if row is None:
        return sum(inputs) + sum(outputs)
    if row.alias:
        return 0
    if row.reads == "results":
        return 2 * sum(outputs)
    if row.reads == "terms":
        return (7 if len(inputs) > 2 else 3) * inputs[0] + 3 * sum(outputs)
    return 2 * sum(inputs[1:]) if row.stores else sum(inputs) + sum(outputs)


def may_write_over(op: Op) -> tuple[int, ...]:
    """The positions among the inputs of tensors that the operator's result may take the memory of, if it is as large."""
    row = find_row(op.target)
    if row is None or row.over is None or op.target.rpartition(".")[2] != row.over.overload:
        return ()
    arguments = (op.args[place] for place in row.over.places)
    return tuple(dict.fromkeys(argument.index for argument in arguments if isinstance(argument, Ref)))


def out_variant(op: Op) -> tuple[str, str]:
    """Of an operator that ``may_write_over`` something: the one that writes where it is told, and its argument for the place."""
    row = find_row(op.target)
    assert row is not None and row.over is not None, op.target
    return f"{row.name}.{row.over.out}", row.over.out


def kernel_launches(op: Op, tensors: Mapping[str, Tensor]) -> int:
    """How many kernels run one after another, each with a part of the work: of all but recurrent layers that is taken as one."""
    row = find_row(op.target)
    if row is None or not row.kernels:
        return 1
    arguments = call_of(op, row, (), ()).arguments
    return tensors[op.inputs[arguments["gates"].index]].shape[0] * dict(row.kernels)[arguments["cell"]]


def why_once(op: Op) -> str:
    """Why an operator may not run a second time to make its results again; empty when it may.

    Of an operator without a row nobody knows what it does besides: it may write over what it reads, or draw random numbers.
    """
    row = find_row(op.target)
    return "it has no rule: whether it always makes the same is not known" if row is None else row.once


def seed_of(op: Op) -> int | None:
    """The place among its arguments of the seed of what it draws; None for an operator that draws nothing."""
    row = find_row(op.target)
    return None if row is None else row.seed


def why_each(op: Op) -> str:
    """Why an operator that reads the same in all microbatches may not run once for all of them; empty when it may."""
    return why_once(op) or ("" if seed_of(op) is None else "it draws other numbers in each microbatch")


def takes_one_dtype(op: Op) -> bool:
    """Whether torch runs it on operands of one dtype alone; without values (meta, fake) it lets others pass."""
    row = find_row(op.target)
    return row is not None and row.one_dtype


def reads_values(op: Op) -> bool:
    """Whether the operator asks more than the shape of what it reads."""
    row = find_row(op.target)
    return row is None or row.reads != "shape"


def effect_of_number(op: Op) -> str:
    """What a plain number among its arguments does to the tensor: ``multiplies``, ``divides``, ``adds``, or empty."""
    row = find_row(op.target)
    return "" if row is None else row.number


def looked_up(op: Op) -> LooksUp | None:
    """That an input holds numbers of entries of a table."""
    row = find_row(op.target)
    return None if row is None else row.looks_up


def count_entries(op: Op, tensors: Mapping[str, Tensor]) -> int:
    """How many entries there are for the numbers that an operator looks up."""
    row = find_row(op.target)
    assert row is not None and row.looks_up is not None, op.target
    found = row.looks_up
    if found.size:
        return int(_argument(op, row, found.size))
    dim = found.dim if isinstance(found.dim, int) else _argument(op, row, found.dim)
    entries = tensors[op.inputs[0]].shape or (1,)  # a tensor without dims is one
    return entries[dim.index(Ref(found.numbers)) if isinstance(dim, tuple) else dim]


def ignored_number(op: Op) -> int | None:
    """The number that stands for no entry; None where each stands for one."""
    row = find_row(op.target)
    if row is None or row.looks_up is None or not row.looks_up.ignored:
        return None
    return int(_argument(op, row, row.looks_up.ignored))


def _argument(op: Op, row: Row, name: str) -> Any:
    """An operator's argument by its name in the row."""
    return call_of(op, row, (), ()).arguments[name]
