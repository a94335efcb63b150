"""Operators that write a buffer's new value where the buffer lies: counters, and the running statistics of batch norm.

The graph makes the new value in a tensor of its own, which a call then copies into the buffer. Where nobody reads the old value any more,
the operator may write there at once, as eager PyTorch does. A new value that backward reads, or that leaves, stays apart: a second call
would write over that.
"""

from __future__ import annotations

from collections.abc import Mapping

from autopar.graph import Op, Ref
from autopar.rules import may_write_over
from autopar.schedule import Schedule
from autopar.schedule.storages import needed

BATCH_NORM, COUNT = "autopar.batch_norm.default", "aten.add.Tensor"
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


def find_counters(schedule: Schedule, writes: Mapping[int, Mapping[int, str]]) -> Mapping[int, tuple[int, ...]]:
    """The instructions that add one number to buffers, which may run as one: by the last of them all of them, in order.

    Nobody reads what they make within the step, so that the others can wait for the last.

    Args:
        writes: what is written where it lies.
    """
    items, graph = schedule.instructions, schedule.graph
    read = {value for item in items if item.kind != "free" for value in item.reads}
    found: dict[tuple[object, ...], list[int]] = {}
    for index in writes:
        op = schedule.operations[items[index].of].op
        if op.target == COUNT and len(op.inputs) == 1 and op.args[0] == Ref(0) and not op.kwargs and read.isdisjoint(items[index].writes):
            found.setdefault((items[index].half, op.args[1], graph.tensors[op.outputs[0]].dtype), []).append(index)
    return {places[-1]: tuple(places) for places in found.values() if len(places) > 1}


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
