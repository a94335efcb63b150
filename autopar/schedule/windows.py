"""When a collective or slice may happen, as far as the data allow: between which two operators.

Operators are anchors: their order is given. What lies between them (starts, waits, slices) may move within its window: after the last
anchor that makes what it reads (``ready``), before the first that needs what it makes (``deadline``), within its phase.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import NamedTuple

from autopar.graph import Phase
from autopar.schedule.instructions import Instruction
from autopar.schedule.schedule import Schedule


class Window(NamedTuple):
    """Where one start (with its wait) or slice may stand.

    Args:
        ready: index of the anchor it must follow; ``begin`` when its sources are there when the phase begins.
        deadline: index of the anchor it must precede; ``end`` when nobody in the phase reads it.
        depth: how many starts and slices before it in the phase lead to it, itself included.
        begin, end: of the phase: the anchor before its first, and the one after its last.
        ahead: its sources are there when the phase begins, or made by what leads it (``Graph.prepared``): it may run ahead of its readers.
        behind: it is made from what the phase makes, and nobody in the phase reads it.
    """

    ready: int
    deadline: int
    depth: int
    begin: int
    end: int
    ahead: bool
    behind: bool


def anchors(schedule: Schedule) -> list[Instruction]:
    """The operators, in order."""
    return [item for item in schedule.instructions if item.kind == "run"]


def moving(schedule: Schedule) -> list[Instruction]:
    """Starts and slices, in order."""
    return [item for item in schedule.instructions if item.kind in ("start", "slice")]


def windows(schedule: Schedule) -> Mapping[int, Window]:
    """The window of each start and slice, by instruction id. Their order in the list must be right: producers first. A sum is there
    when what is added to it is."""
    fixed, soft = schedule.once(anchors), [item for item in schedule.instructions if item.kind in ("start", "slice", "add")]
    bounds, prepared = _bounds(fixed), schedule.graph.prepared
    found: dict[int, Window] = {}
    for phase, (begin, end) in bounds.items():
        ready: dict[str, tuple[int, int]] = {}
        due: dict[str, int] = {}
        for index, item in enumerate(fixed[begin + 1 : end], begin + 1):
            for value in item.writes:
                ready[value] = index, 0
            for value in item.reads:
                if value not in due:
                    due[value] = index
        mine = [item for item in soft if (item.phase == "forward") == (phase == "forward")]
        led = begin + (sum(1 for _ in takewhile(lambda item: item.of in prepared, fixed)) if phase == "forward" else 0)
        first: list[tuple[int, int]] = []
        for item in mine:
            after, level = begin, 0
            for value in item.reads:
                if value in ready:
                    index, depth = ready[value]
                    after, level = (index if index > after else after), (depth if depth > level else level)
            made = after, level + (item.kind != "add")
            first.append(made)
            for value in item.writes:
                ready[value] = made
        for item, (after, level) in zip(reversed(mine), reversed(first), strict=True):
            before = end
            for value in item.writes:
                if value in due and due[value] < before:
                    before = due[value]
            for value in item.reads:
                if before < due.get(value, end):
                    due[value] = before
            if item.kind != "add":
                found[item.id] = Window(after, before, level, begin, end, after <= led, before == end and after > led)
    return found


def _bounds(fixed: Sequence[Instruction]) -> Mapping[Phase, tuple[int, int]]:
    """For each phase the index before its first anchor and the one after its last."""
    middle = sum(item.half == "forward" for item in fixed)
    return {"forward": (-1, middle), "backward": (middle - 1, len(fixed))}


def arrived(item: Instruction, arrival: Mapping[str, float]) -> float:
    """When all that an instruction reads is there, by the times of those values that have one."""
    found = 0.0
    for value in item.reads:
        if value in arrival and arrival[value] > found:
            found = arrival[value]
    return found


def lazily(fixed: Sequence[Instruction], soft: Sequence[tuple[Instruction, ...]]) -> tuple[Instruction, ...]:
    """Operators in the given order, and everything between them just before its first reader, or at the end of its phase.

    Args:
        soft: slices, and starts with their waits.
    """
    producer = {value: group for group in soft for value in group[0].writes}
    found: list[Instruction] = []
    done: set[int] = set()

    def make(group: tuple[Instruction, ...]) -> None:
        if group[0].id not in done:
            done.add(group[0].id)
            for value in group[0].reads:
                if value in producer:
                    make(producer[value])
            found.extend(group)

    for phase in ("forward", "backward"):
        forward = phase == "forward"
        for item in fixed:
            if (item.phase == "forward") is forward:
                for value in item.reads:
                    if value in producer:
                        make(producer[value])
                found.append(item)
        for group in soft:
            if (group[0].phase == "forward") is forward:
                make(group)
    return tuple(found)
