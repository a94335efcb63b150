"""The end of the forward pass that only the loss asks for: waits for calls, and what is made of what they bring.

The loss is a sum over ranks. Waiting for it holds all ranks at the pace of the slowest, and backward does not need it. So the waits that
lead to nothing else, and the few operators after them, run when the loss is read (``late``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from autopar.runtime.still import STILL
from autopar.schedule import Instruction, Schedule
from autopar.schedule.collectives import Collective
from autopar.schedule.freeing import storage_bytes
from autopar.schedule.reusing import needed

FEW, SHARE = 1024, 0.01
"""A tail may keep as many bytes as this, or this share of what came in: they outlive the forward pass."""


@dataclass(frozen=True)
class Tail:
    """What of a schedule may run when the loss is read.

    Args:
        places: indices of its instructions, in order; no call starts there, so the order of calls stays the same on all ranks.
        values: what they need and make, which nobody may free or write over before.
    """

    places: tuple[int, ...] = ()
    values: frozenset[str] = frozenset()


def loss_tail(schedule: Schedule, blocks: Callable[[Collective], bool]) -> Tail:
    """The tail of a training step's schedule; empty when nothing waits for the loss.

    Args:
        blocks: whether waiting for a call holds this thread up.
    """
    loss = next((value for output, value in schedule.outputs if output.kind == "output" and output.name == "loss"), None)
    if schedule.graph.mode != "train" or loss is None:
        return Tail()
    alone = _leading_only_to(loss, schedule)
    places: list[int] = []
    brought: set[str] = set()
    for index in alone:
        item = schedule.instructions[index]
        if (item.kind == "wait" and blocks(schedule.collectives[item.of])) or not brought.isdisjoint(item.reads):
            places.append(index)
            brought.update(item.writes)
    values = brought.union(*(needed(schedule, schedule.instructions[index]) for index in places))
    made, overwritten = dict[str, int](), dict[str, int]()
    for index, item in enumerate(schedule.instructions):
        for value in item.writes:
            made.setdefault(value, index)
        if item.over and index not in places:
            overwritten[schedule.storage[item.over]] = index
    if any(overwritten.get(schedule.storage[value], -1) > made.get(value, -1) for value in values):
        return Tail()
    entering = sum(schedule.local_bytes(item.tensor) for item in schedule.graph.inputs)
    held = sum(storage_bytes(schedule, root) for root in {schedule.storage[value] for value in values})
    return Tail(tuple(places), frozenset(values)) if loss in brought and held <= max(FEW, SHARE * entering) else Tail()


def _leading_only_to(loss: str, schedule: Schedule) -> list[int]:
    """The waits and operators of forward whose results nobody but others of these reads, down to the loss; in order."""
    readers: dict[str, list[int]] = {}
    for index, item in enumerate(schedule.instructions):
        for value in item.reads if item.kind != "free" else ():
            readers.setdefault(value, []).append(index)
    leaving = {value for _, value in schedule.outputs} - {loss}
    entering = {item.tensor for item in schedule.graph.inputs}
    found: set[int] = set()
    for index in range(len(schedule.instructions) - 1, -1, -1):
        item = schedule.instructions[index]
        read_here = (value not in leaving and found.issuperset(readers.get(value, ())) for value in item.writes)
        if item.half == "forward" and _may_be_late(schedule, item, entering) and all(read_here):
            found.add(index)
    return sorted(found)


def _may_be_late(schedule: Schedule, item: Instruction, entering: set[str]) -> bool:
    """Not what reads the user's own tensors, which an optimizer may change meanwhile, nor what draws, which goes by the step's number."""
    if any(schedule.storage[value] in entering for value in needed(schedule, item)):
        return False
    if item.kind != "run":
        return item.kind in ("wait", "slice")
    operation = schedule.operations[item.of]
    return not operation.strategy.inner and operation.op.target not in STILL
