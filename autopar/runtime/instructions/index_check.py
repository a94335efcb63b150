"""A check that indices are in range of the whole table, as torch's own operators check.

A rank with a part of a table reads zeros for rows that it does not hold. An index out of range would then be zeros on all ranks, without
an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from autopar.dialect.library import WHOLE
from autopar.dialect.lookup import OFFSETS
from autopar.errors import UsageError
from autopar.graph import Graph, Op
from autopar.rules import count_entries, ignored_number, localize, looked_up
from autopar.runtime.instructions.code import Code, ErrorHandler
from autopar.runtime.instructions.whole_operands import mark_whole, of_class_weights
from autopar.schedule import Schedule
from autopar.torch_compat import assert_later

BEYOND = "an index is out of range"
"""Message of the assertion."""
HINT = "look at what the data holds, and at how long a sequence may be: in the model itself, too, indices are at least 0 and less than that"


class OutOfReachError(UsageError, IndexError):
    """A row, or a class, that is not there: an IndexError too, as torch's own."""


def check_lookup(op: Op, graph: Graph, operands: Sequence[torch.Tensor]) -> None:
    """Raises OutOfReachError: an operator in forward looks up an entry that its table does not have. The operands are whole."""
    lookup = looked_up(op)
    if lookup is not None and lookup.entries and op.phase == "forward" and not of_class_weights(op, graph):
        size, where = count_entries(op, graph.tensors), op.location or op.module or op.name
        _check(operands[lookup.numbers], size=size, ignored=ignored_number(op), called=lookup.entries, where=where, traced=False)


def write_check(
    code: Code, op: Op, graph: Graph, args: Sequence[Any], reads: Sequence[str], traced: bool
) -> ErrorHandler | None:  # fmt: skip
    """Writes the statement that raises OutOfReachError where an operator looks up an index that the whole table does not have.

    On a rank that holds the whole table torch's own kernel checks. The handler returned says its error in our words. On a GPU and in a
    traced program an assertion fails, as torch's own does.

    Args:
        args: the operator's arguments on this rank.
        reads: the variables of its inputs.
    """
    lookup = looked_up(op)
    if lookup is None or not lookup.entries or op.phase == "backward" or of_class_weights(op, graph):
        return None
    where, indices = op.location or op.module or op.name, reads[1]
    size, ignored, called = count_entries(op, graph.tensors), ignored_number(op), lookup.entries
    check = partial(_check, size=size, ignored=ignored, called=called, where=where, traced=traced)
    if traced or args[OFFSETS[op.target]] != WHOLE:
        code.add(f"{code.object(check)}({indices})")
        return None

    def explain(error: Exception, variables: Mapping[str, Any]) -> None:
        if variables[indices].device.type == "cpu":
            check(variables[indices])

    return explain


def find_checked(schedule: Schedule, rank: int) -> frozenset[str]:
    """What checks of a traced program say of tables that the rank holds whole: torch's own kernels check those."""
    graph, mesh, found = schedule.graph, schedule.machine.mesh, dict[str, bool]()
    for item in schedule.instructions:
        operation = schedule.operations[item.of] if item.kind == "run" else None
        lookup = None if operation is None else looked_up(operation.op)
        if operation is None or operation.strategy.inner or lookup is None or not lookup.entries:
            continue
        op = operation.op
        args, _ = localize(op, graph.tensors, operation.strategy, mesh.sizes, mesh.coordinates(rank))
        reads = ((schedule.specs[value], graph.tensors[name].shape) for value, name in zip(item.reads, op.inputs, strict=True))
        shapes = [spec.own_shape(shape, mesh.sizes, mesh.coordinates(rank)) for spec, shape in reads]
        whole = mark_whole(op, graph, args, shapes)[OFFSETS[op.target]] == WHOLE
        message = _message(op.location or op.module or op.name, count_entries(op, graph.tensors), lookup.entries)
        found[message] = found.get(message, True) and whole
    return frozenset(message for message, whole in found.items() if whole)


@contextmanager
def raise_index_errors() -> Iterator[None]:
    """An assertion that fails within it is an OutOfReachError, also where torch.compile tells something else of what it ran."""
    try:
        yield
    except Exception as error:
        for one in (error, error.__context__):
            if BEYOND in str(one):
                raise OutOfReachError(str(one).splitlines()[0], HINT) from None
        raise


def _check(indices: torch.Tensor, size: int, ignored: Any, called: str, where: str, traced: bool) -> None:
    later = traced or indices.device.type != "cpu"
    if not later:
        if not indices.numel():
            return
        low, high = (int(value) for value in torch.aminmax(indices))
        if low >= 0 and high < size:
            return
    beyond = (indices < 0) | (indices >= size)
    if ignored is not None:
        beyond &= indices != ignored
    if later:
        assert_later(~beyond.any(), _message(where, size, called))
    elif beyond.any():
        first = int(indices[beyond][0])
        raise OutOfReachError(f"{where}: index {first} is out of range, there are {size} {called}", HINT)


def _message(where: str, size: int, called: str) -> str:
    return f"{where}: {BEYOND}, there are {size} {called}"
