"""When a collective or slice may happen, as far as the data allow: between which two operators.

Operators are anchors: their order is given. What lies between them (starts, waits, slices) may move within its window: after the last
anchor that makes what it reads (``ready``), before the first that needs what it makes (``deadline``), within its phase.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.graph import Phase
from autopar.schedule.instructions import Instruction, Schedule


@dataclass(frozen=True)
class Window:
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
    ready: dict[str, int] = {}
    phase_of: dict[str, Phase] = {}
    for index, item in enumerate(fixed):
        ready.update(dict.fromkeys(item.writes, index))
        phase_of.update(dict.fromkeys(item.writes, item.half))
    first: dict[int, int] = {}
    depth: dict[str, int] = {}
    for item in soft:
        begin = bounds[item.half][0]
        here = [value for value in item.reads if phase_of.get(value) == item.half]
        first[item.id] = max([ready[value] for value in here], default=begin)
        level = (item.kind != "add") + max([depth.get(value, 0) for value in here], default=0)
        ready.update(dict.fromkeys(item.writes, first[item.id]))
        phase_of.update(dict.fromkeys(item.writes, item.half))
        depth.update(dict.fromkeys(item.writes, level))
    needed: dict[tuple[Phase, str], int] = {}
    for index, item in enumerate(fixed):
        for value in item.reads:
            needed.setdefault((item.half, value), index)
    last: dict[int, int] = {}
    for item in reversed(soft):
        last[item.id] = min(needed.get((item.half, value), bounds[item.half][1]) for value in item.writes)
        for value in item.reads:
            key = item.half, value
            needed[key] = min(needed.get(key, bounds[item.half][1]), last[item.id])
    return {
        item.id: Window(first[item.id], last[item.id], depth[item.writes[0]], *bounds[item.half]) for item in soft if item.kind != "add"
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
