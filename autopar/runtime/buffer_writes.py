"""Operators that write a buffer's new value where the buffer lies: counters, and the running statistics of batch norm.

The graph makes the new value in a tensor of its own, which a call then copies into the buffer. Where nobody reads the old value any more,
the operator may write there at once, as eager PyTorch does. A new value that backward reads, or that leaves, stays apart: a second call
would write over that.
"""

from __future__ import annotations

from collections.abc import Mapping

from autopar.graph import Op
from autopar.rules import may_write_over
from autopar.schedule import Schedule
from autopar.schedule.storages import needed

BATCH_NORM = "autopar.batch_norm.default"
_STATISTICS = {3: 3, 4: 4}
"""Of batch norm: from the place of a running statistic's new value among the outputs to that of the old one among the arguments."""


def find_buffer_writes(schedule: Schedule) -> Mapping[int, Mapping[int, str]]:
    """By index of a run instruction: from the position of a value that it writes to the buffer in whose memory it may make it."""
    graph, items = schedule.graph, schedule.instructions
    if graph.microbatches > 1:
        return {}
    buffers = {item.name: item.tensor for item in graph.of_kind("buffer")}
    becomes = {value: buffers[output.name] for output, value in schedule.outputs if output.kind == "buffer"}
    others = {schedule.storage[value] for _, value in schedule.outputs}  # what leaves, or becomes another buffer, is the old value
    last: dict[str, int] = {}
    kept = {schedule.storage[value] for output, value in schedule.outputs if output.kind != "buffer"}  # what the user is given stays
    for index, item in enumerate(items):
        roots = [schedule.storage[value] for value in needed(schedule, item)]
        last.update(dict.fromkeys(roots, index))
        kept.update(roots if item.half == "backward" else ())
    found: dict[int, dict[int, str]] = {}
    for index, item in enumerate(items):
        if item.kind != "run" or schedule.operations[item.of].strategy.inner:
            continue
        op, own = schedule.operations[item.of].op, dict[int, str]()
        for position, value in enumerate(item.writes):
            buffer = becomes.get(value)
            if buffer is None or buffer in others or last.get(buffer, index) != index or schedule.storage[value] in kept:
                continue
            if not _may_write(op, position, buffer, item.reads):
                continue
            made = graph.tensors[op.outputs[position]]
            if graph.tensors[buffer].dtype == made.dtype and schedule.specs[buffer] == schedule.specs[value]:
                own[position] = buffer
        if own and (op.target != BATCH_NORM or _writes_all(schedule, op, own)):
            found[index] = own
    return found


def _may_write(op: Op, position: int, buffer: str, reads: tuple[str, ...]) -> bool:
    """Whether the operator can make an output in the memory of a buffer that it reads once."""
    if reads.count(buffer) != 1:
        return False
    place = reads.index(buffer)
    if op.target != BATCH_NORM:
        return place in may_write_over(op)
    argument = op.args[_STATISTICS[position]] if position in _STATISTICS else None
    return getattr(argument, "index", None) == place


def _writes_all(schedule: Schedule, op: Op, own: Mapping[int, str]) -> bool:
    """Whether batch norm writes both statistics, in the dtype that torch's kernel has them in."""
    tensors = schedule.graph.tensors
    return set(own) == set(_STATISTICS) and all(tensors[buffer].dtype == tensors[op.outputs[1]].dtype for buffer in own.values())
