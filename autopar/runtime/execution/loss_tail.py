"""The end of forward that only the loss depends on: late waits, and the operators after them.

The loss is a sum over ranks. Waiting for it holds all ranks at the pace of the slowest, and backward does not need it. So late waits
(``Instruction.late``) and the few operators after them run when the loss is read (``deferred_loss``).
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.schedule import Schedule
from autopar.schedule.storages import needed


@dataclass(frozen=True)
class Tail:
    """What of a schedule may run when the loss is read.

    Args:
        places: indices of its instructions, in order; no call starts there, so the order of calls stays the same on all ranks.
        values: what they need and make, which nobody may free or write over before.
    """

    places: tuple[int, ...] = ()
    values: frozenset[str] = frozenset()


def loss_tail(schedule: Schedule) -> Tail:
    """The tail of a training step's schedule; empty when nothing waits for the loss, or what the tail needs is not there any more then: it
    is the user's own, which an optimizer may change meanwhile, or written over."""
    places, brought = list[int](), set[str]()
    for index, item in enumerate(schedule.instructions):
        if item.half == "forward" and item.kind != "free" and (item.late or not brought.isdisjoint(item.reads)):
            places.append(index)
            brought.update(item.writes)
    values = brought.union(*(needed(schedule, schedule.instructions[index]) for index in places))
    entering = {item.tensor for item in schedule.graph.inputs}
    made, overwritten = dict[str, int](), dict[str, int]()
    for index, item in enumerate(schedule.instructions):
        for value in item.writes:
            made.setdefault(value, index)
        if item.over and index not in places:
            overwritten[schedule.storage[item.over]] = index
    for value in values:
        root = schedule.storage[value]
        if root in entering or overwritten.get(root, -1) > made.get(value, -1):
            return Tail()
    return Tail(tuple(places), frozenset(values))
