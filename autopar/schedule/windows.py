"""When a collective or slice may happen, as far as the data allow: between which two operators.

Operators are anchors: their order is given. What lies between them (starts, waits, slices) may move within its window: after the last
anchor that makes what it reads (``ready``), before the first that needs what it makes (``deadline``), within its phase.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from autopar.graph import Phase
from autopar.schedule.instructions import Instruction, Schedule


class Window(NamedTuple):
    """Where one start (with its wait) or slice may stand.

    Args:
        ready: index of the anchor it must follow; ``begin`` when its sources are there when the phase begins.
        deadline: index of the anchor it must precede; ``end`` when nobody in the phase reads it.
        depth: how many starts and slices before it in the phase lead to it, itself included.
        begin, end: of the phase: the anchor before its first, and the one after its last.
    """

    ready: int
    deadline: int
    depth: int
    begin: int
    end: int

    @property
    def ahead(self) -> bool:
        """Its sources are there when the phase begins: it may run ahead of its readers."""
        return self.ready == self.begin

    @property
    def behind(self) -> bool:
        """It is made from what the phase makes, and nobody in the phase reads it."""
        return self.deadline == self.end and not self.ahead


def anchors(schedule: Schedule) -> list[Instruction]:
    """The operators, in order."""
    return [item for item in schedule.instructions if item.kind == "run"]


def moving(schedule: Schedule) -> list[Instruction]:
    """Starts and slices, in order."""
    return [item for item in schedule.instructions if item.kind in ("start", "slice")]


def windows(schedule: Schedule) -> Mapping[int, Window]:
    """The window of each start and slice, by instruction id. Their order in the list must be right: producers first. A sum is there
    when what is added to it is."""
    fixed, soft = anchors(schedule), [item for item in schedule.instructions if item.kind in ("start", "slice", "add")]
    bounds = _bounds(fixed)
    ready: dict[str, tuple[Phase, int, int]] = {}
    needed: dict[Phase, dict[str, int]] = {"forward": {}, "backward": {}}
    for index, item in enumerate(fixed):
        phase = item.half
        for value in item.writes:
            ready[value] = phase, index, 0
        readers = needed[phase]
        for value in item.reads:
            if value not in readers:
                readers[value] = index
    first: dict[int, tuple[int, int]] = {}
    for item in soft:
        phase = item.half
        begin, level, some = bounds[phase][0], 0, False
        for value in item.reads:
            made = ready.get(value)
            if made is not None and made[0] == phase:
                begin, level, some = made[1] if not some else max(begin, made[1]), max(level, made[2]), True
        level += item.kind != "add"
        first[item.id] = begin, level
        for value in item.writes:
            ready[value] = phase, begin, level
    last: dict[int, int] = {}
    for item in reversed(soft):
        readers, end = needed[item.half], bounds[item.half][1]
        due = last[item.id] = min([readers.get(value, end) for value in item.writes])
        for value in item.reads:
            if due < readers.get(value, end):
                readers[value] = due
    return {
        item.id: Window(first[item.id][0], last[item.id], first[item.id][1], *bounds[item.half]) for item in soft if item.kind != "add"
    }


def _bounds(fixed: Sequence[Instruction]) -> Mapping[Phase, tuple[int, int]]:
    """For each phase the index before its first anchor and the one after its last."""
    middle = sum(item.half == "forward" for item in fixed)
    return {"forward": (-1, middle), "backward": (middle - 1, len(fixed))}


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
        for item in fixed:
            if item.half == phase:
                for value in item.reads:
                    if value in producer:
                        make(producer[value])
                found.append(item)
        for group in soft:
            if group[0].half == phase:
                make(group)
    return tuple(found)
