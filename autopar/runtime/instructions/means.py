"""Means in one call.

A graph has a mean as a sum over a count, since parts of a mean are no mean. Where no rank splits what is summed, one kernel makes both. So
it is with the gradient of a mean loss: a kernel of torch's takes the one number that the graph spreads over the entries and divides.

The mean of a loss stays apart from the loss of each entry: of both in one torch gives a number in memory as large as all entries.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from autopar.graph import Op, Ref, Tensor
from autopar.schedule import Instruction, Schedule
from autopar.schedule.storages import needed

MEANS = {"aten.sum.dim_IntList": "aten.mean.dim", "aten.sum.default": "aten.mean.default"}
"""By the target of a sum that of its mean."""
DIVISIONS, SPREAD = ("aten.div.Tensor", "aten.div.Scalar"), "aten.expand.default"
GRADIENTS = tuple(f"aten.{name}_backward.default" for name in ("mse_loss", "smooth_l1_loss", "huber_loss"))
"""Of losses of each entry; the fourth argument, ``reduction``, is 0 where each has its own, 1 where all have that of the mean."""
_FLOATS = ("float16", "bfloat16", "float32", "float64")


@dataclass(frozen=True)
class Mean:
    """Operators that run as one, in the place of the first of them.

    Args:
        places: their indices among the instructions, in order.
        target, args, kwargs: of the operator that runs instead.
        reads, writes: its values.
    """

    places: tuple[int, ...]
    target: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    reads: tuple[str, ...]
    writes: tuple[str, ...]


def find_means(schedule: Schedule, parts: Collection[int] = ()) -> Mapping[int, Mean]:
    """What runs as one kernel, by index of the first instruction.

    Args:
        parts: indices at which a part of the step begins that is run by itself.
    """
    chains, found, taken = _Chains(schedule, parts), dict[int, Mean](), set[int]()
    for index in range(len(schedule.instructions)):
        line = None if index in taken else chains.line(index)
        mean = None if line is None else _find_mean(chains, line) or _find_gradient(chains, line)
        if mean is not None:
            found[index] = mean
            taken.update(mean.places)
    return found


class _Line(NamedTuple):
    """An instruction that runs an operator with one result."""

    place: int
    op: Op
    item: Instruction

    @property
    def made(self) -> str:
        """The value of the result."""
        return self.item.writes[0]


class _Chains:
    """Operators whose one result another one alone reads."""

    def __init__(self, schedule: Schedule, parts: Collection[int]) -> None:
        self.schedule, self.parts = schedule, parts
        self.leaving = {value for _, value in schedule.outputs}
        self.readers: dict[str, list[int]] = {}
        for index, item in enumerate(schedule.instructions):
            for value in needed(schedule, item):
                self.readers.setdefault(value, []).append(index)

    def line(self, index: int) -> _Line | None:
        """What runs at a place, if it runs there as the graph has it."""
        item = self.schedule.instructions[index]
        operation = self.schedule.operations[item.of] if item.kind == "run" else None
        if operation is None or operation.strategy.inner or operation.copied or operation.apart or len(item.writes) != 1:
            return None
        return _Line(index, operation.op, item)

    def follow(self, line: _Line) -> _Line | None:
        """What alone reads the result, in the same part of the step."""
        readers = self.readers.get(line.made, [])
        after = self.line(readers[0]) if len(readers) == 1 and line.made not in self.leaving else None
        if after is None:
            return None
        parted = any(line.place < part <= after.place for part in self.parts)
        together = (line.item.half, line.item.microbatch) == (after.item.half, after.item.microbatch)
        return after if together and not parted else None

    def follow_division(self, line: _Line, count: int) -> _Line | None:
        """The same, if it divides the result by this number."""
        after = self.follow(line)
        if after is None or after.op.target not in DIVISIONS or after.op.kwargs or after.op.args != (Ref(0), count):
            return None
        return after if self.tensor(line.made).dtype == self.tensor(after.made).dtype in _FLOATS else None

    def tensor(self, value: str) -> Tensor:
        return self.schedule.graph.tensors[self.schedule.values[value].tensor]

    def is_split(self, value: str, dims: Sequence[int]) -> bool:
        """Whether ranks have parts of a value along these dims."""
        return any(self.schedule.specs[value].dims[dim] for dim in dims)


def _find_mean(chains: _Chains, line: _Line) -> Mean | None:
    """A sum over dims that every rank has whole, and the division by their size."""
    if line.op.target not in MEANS:
        return None
    (summed,) = line.item.reads
    shape = chains.tensor(summed).shape
    given = line.op.args[1] if len(line.op.args) > 1 else ()
    dims = [dim % len(shape) for dim in given] if isinstance(given, tuple) and given else range(len(shape))
    division = chains.follow_division(line, math.prod(shape[dim] for dim in dims))
    if division is None or chains.is_split(summed, dims):
        return None
    places = line.place, division.place
    return Mean(places, MEANS[line.op.target], line.op.args, line.op.kwargs, line.item.reads, division.item.writes)


def _find_gradient(chains: _Chains, line: _Line) -> Mean | None:
    """The gradient of a mean, spread over the entries and divided, and that of the loss of each entry, which is the next that runs."""
    if line.op.target != SPREAD or chains.tensor(line.item.reads[0]).shape:
        return None
    made = chains.tensor(line.made)
    division = chains.follow_division(line, math.prod(made.shape))
    gradient = None if division is None else chains.follow(division)
    if division is None or gradient is None or gradient.op.target not in GRADIENTS or gradient.item.reads[0] != division.made:
        return None
    before, reduction, after = gradient.op.args[:3], gradient.op.args[3], gradient.op.args[4:]
    places = line.place, division.place, gradient.place
    between = (chains.schedule.instructions[index] for index in range(line.place, gradient.place) if index not in places)
    result = chains.tensor(gradient.made)
    if reduction != 0 or any(item.kind != "free" for item in between) or (made.shape, made.dtype) != (result.shape, result.dtype):
        return None
    if chains.is_split(division.made, range(len(made.shape))):
        return None
    reads = *line.item.reads, *gradient.item.reads[1:]
    return Mean(places, gradient.op.target, (*before, 1, *after), gradient.op.kwargs, reads, gradient.item.writes)
