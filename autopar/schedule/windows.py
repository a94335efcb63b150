"""When a collective or slice may happen, as far as the data allow: between which two operators.

Operators are anchors: their order is given. Starts, waits and slices may move between them, within their segment: after the last anchor
that makes a source (``ready``), before the first that needs a result (``deadline``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from typing import NamedTuple

from autopar.schedule.instructions import Instruction, Segment
from autopar.schedule.schedule import Schedule


class Window(NamedTuple):
    """Where one start (with its wait) or slice may stand.

    Args:
        ready: index of the anchor it must follow; ``begin`` where its sources are there as the segment begins.
        deadline: index of the anchor it must precede; ``end`` where nobody in the segment reads it.
        depth: how many starts and slices of the segment lead to it, itself included.
        begin, end: of the segment: the anchor before its first, and the one after its last.
        ahead: its sources are there as the segment begins, or made by ``Graph.prepared``: it may run ahead of its readers.
        behind: its sources are made in the segment, and nobody there reads it.
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


def moving_groups(schedule: Schedule) -> list[tuple[Instruction, ...]]:
    """Starts, each with its wait, and slices, in order."""
    waits = {item.of: item for item in schedule.instructions if item.kind == "wait"}
    return [(item, waits[item.of]) if item.kind == "start" else (item,) for item in schedule.once(moving)]


def windows(schedule: Schedule) -> Mapping[int, Window]:
    """The window of each start and slice, by instruction id. Producers stand before readers; a sum is there when its addend is."""
    fixed, soft = schedule.once(anchors), [item for item in schedule.instructions if item.kind in ("start", "slice", "add")]
    prepared = schedule.graph.prepared
    found: dict[int, Window] = {}
    for segment, (begin, end) in _bounds(schedule).items():
        ready: dict[str, tuple[int, int]] = {}
        due: dict[str, int] = {}
        for index, item in enumerate(fixed[begin + 1 : end], begin + 1):
            for value in item.writes:
                ready[value] = index, 0
            for value in item.reads:
                if value not in due:
                    due[value] = index
        mine = segment.among(soft)
        led = begin + sum(1 for _ in takewhile(lambda item: item.of in prepared, fixed[begin + 1 : end]))
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


def _bounds(schedule: Schedule) -> Mapping[Segment, tuple[int, int]]:
    """For each segment the index before its first anchor and the one after its last."""
    found, begin = dict[Segment, tuple[int, int]](), -1
    for segment in schedule.segments:
        count = len(segment.among(schedule.once(anchors)))
        found[segment] = begin, begin + count + 1
        begin += count
    return found


def arrived(item: Instruction, arrival: Mapping[str, float]) -> float:
    """When the sources of an instruction are there; a value without a time is there at once."""
    found = 0.0
    for value in item.reads:
        if value in arrival and arrival[value] > found:
            found = arrival[value]
    return found


def as_late_as_possible(
    segments: Iterable[Segment], fixed: Sequence[Instruction], soft: Sequence[tuple[Instruction, ...]]
) -> tuple[Instruction, ...]:  # fmt: skip
    """Operators in the given order, and everything between them just before its first reader, or at the end of its segment.

    Args:
        segments: in order.
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

    groups = {group[0].id: group for group in soft}
    for segment in segments:
        for item in segment.among(fixed):
            for value in item.reads:
                if value in producer:
                    make(producer[value])
            found.append(item)
        for first in segment.among(group[0] for group in soft):
            make(groups[first.id])
    return tuple(found)
