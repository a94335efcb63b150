"""fill_gaps: a list scheduler for operators. Operators on no long chain are deferred, to fill gaps in which others wait for a collective.

In a backward pass the gradients of activations form one long chain, and the gradients of weights hang off it. In captured order the chain
waits for its collectives although other operators could run. So an operator with a short chain behind it is deferred. It runs when the
next operator of the long chain would wait, when deferred operators keep more than ``limits.aside_bytes``, or at the end. Where no deferred
operator can run, the next operators are pulled forward, if their results stay within the same limit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace

from autopar.schedule.instructions import Instruction, Segment
from autopar.schedule.schedule import Schedule
from autopar.schedule.settings import GAP_OVERSHOOT, PULL_WINDOW, SHORT_CHAIN
from autopar.schedule.windows import Window, anchors, arrived, as_late_as_possible, moving, moving_groups, windows


def fill_gaps(schedule: Schedule) -> Schedule:
    """The schedule with operators in an order that leaves fewer gaps, where ``limits.aside_bytes`` is not 0.

    A segment without collectives and slices has no gaps. It keeps its order, since a deferred operator only holds memory.
    """
    if not schedule.limits.aside_bytes:
        return schedule
    fixed = schedule.once(anchors)
    found = schedule.once(windows)
    with_gaps = {segment for segment in schedule.segments if segment.among(schedule.once(moving))}
    ordered = [
        item
        for segment in schedule.segments
        for item in (_Filling(schedule, fixed, found, segment).run() if segment in with_gaps else segment.among(fixed))
    ]
    return replace(schedule, instructions=as_late_as_possible(schedule.segments, ordered, moving_groups(schedule)))


def _short(schedule: Schedule) -> set[int]:
    """The operators that may be deferred, by the longest chain that follows each: see ``SHORT_CHAIN``."""
    found, windowed = set(), schedule.once(windows)
    for segment in schedule.segments:
        fixed = segment.among(schedule.once(anchors))
        soft = [item for item in segment.among(schedule.once(moving)) if not windowed[item.id].ahead]
        tail: dict[str, float] = {}
        chain: dict[int, float] = {}
        for item in sorted((*fixed, *soft), key=lambda item: item.id, reverse=True):
            longest = max([tail.get(value, 0.0) for value in item.writes], default=0.0)
            chain[item.id] = longest + (item.seconds if item.kind == "run" else 0.0)
            for value in item.reads:
                tail[value] = max(tail.get(value, 0.0), chain[item.id])
        remaining = 0.0
        for item in reversed(fixed):
            remaining += item.seconds
            if chain[item.id] < SHORT_CHAIN * remaining:
                found.add(item.id)
    return found


class _Filling:
    """One sweep over the operators of a segment, with the time at which each value arrives if collectives start at once."""

    def __init__(self, schedule: Schedule, fixed: Sequence[Instruction], found: Mapping[int, Window], segment: Segment) -> None:
        self.schedule = schedule
        self.fixed = segment.among(fixed)
        soft = segment.among(schedule.once(moving))
        there = [item for item in soft if found[item.id].ready == found[item.id].begin]
        self.soft = [item for item in soft if found[item.id].ready != found[item.id].begin]
        self.waiting: dict[str, list[Instruction]] = {}
        self.missing: dict[int, int] = {}
        made = {value for item in (*self.fixed, *self.soft) for value in item.writes}
        for item in self.soft:
            reads = [value for value in dict.fromkeys(item.reads) if value in made]
            self.missing[item.id] = len(reads)
            for value in reads:
                self.waiting.setdefault(value, []).append(item)
        self.made = made
        self.arrival: dict[str, float] = {}
        self.free: dict[str, float] = {}
        self.now = 0.0
        self.out: list[Instruction] = []
        self.aside: deque[Instruction] = deque()
        self.kept: dict[int, int] = {}
        self.pulled: dict[int, int] = {}
        for item in sorted(there, key=lambda item: (found[item.id].deadline, found[item.id].depth)):
            self._move(item)

    def run(self) -> list[Instruction]:
        short = self.schedule.once(_short)
        for place, item in enumerate(self.fixed):
            if self.pulled.pop(item.id, None) is not None:
                continue
            if item.id in short and item.of not in self.schedule.graph.prepared:
                self.aside.append(item)
                self.kept[item.id] = sum(self.schedule.values[value].bytes for value in dict.fromkeys(item.reads))
                while self.aside and sum(self.kept.values()) > self.schedule.limits.aside_bytes:
                    self._set(self._oldest())
                continue
            self._make_what(item)
            ready = arrived(item, self.arrival)
            if self.now < ready:
                self._fill_until(ready)
                self._pull_until(ready, place + 1)
            self._set(item)
        while self.aside:
            self._set(self._oldest())
        return self.out

    def _oldest(self) -> Instruction:
        """Takes the next deferred operator: the oldest that would not wait for a collective, or the oldest."""
        ready = (place for place, item in enumerate(self.aside) if not self._lacks(item) and arrived(item, self.arrival) <= self.now)
        place = next(ready, 0)
        item = self.aside[place]
        del self.aside[place]
        return item

    def _make_what(self, item: Instruction) -> None:
        """Runs deferred operators, oldest first, until the sources of an operator are made."""
        while self._lacks(item):
            self._set(self._oldest())

    def _lacks(self, item: Instruction) -> bool:
        """Whether a source of an operator has not been made."""
        return any(value not in self.arrival and value in self.made for value in item.reads)

    def _fill_until(self, time: float) -> None:
        """Runs deferred operators, oldest first, that are not much longer than the gap."""
        passed: deque[Instruction] = deque()
        while self.aside and self.now < time:
            item = self.aside.popleft()
            gap = time - self.now
            if item.seconds > GAP_OVERSHOOT * gap or self._lacks(item) or arrived(item, self.arrival) > self.now:
                passed.append(item)
            else:
                self._set(item)
        self.aside.extendleft(reversed(passed))

    def _pull_until(self, time: float, place: int) -> None:
        """Runs the next operators, in order, in the rest of a gap."""
        waiting = {item.id for item in self.aside}
        for item in self.fixed[place : place + PULL_WINDOW]:
            if self.now >= time:
                return
            if item.id in waiting or item.id in self.pulled or item.seconds > GAP_OVERSHOOT * (time - self.now):
                continue
            if self._lacks(item) or arrived(item, self.arrival) > self.now:
                continue
            size = sum(self.schedule.values[value].bytes for value in item.writes)
            if sum(self.pulled.values()) + size <= self.schedule.limits.aside_bytes:
                self.pulled[item.id] = size
                self._set(item)

    def _set(self, item: Instruction) -> None:
        self.kept.pop(item.id, None)
        self.now = max(self.now, arrived(item, self.arrival)) + item.seconds
        self.out.append(item)
        for value in item.writes:
            self._arrive(value, self.now)

    def _arrive(self, value: str, time: float) -> None:
        self.arrival[value] = time
        for item in self.waiting.get(value, ()):
            self.missing[item.id] -= 1
            if not self.missing[item.id]:
                self._move(item)

    def _move(self, item: Instruction) -> None:
        """Runs a collective or slice whose sources are there, as soon as its links are free."""
        begin = max(arrived(item, self.arrival), *(self.free.get(link, 0.0) for link in item.streams), 0.0)
        self.free.update(dict.fromkeys(item.streams, begin + item.seconds))
        for written in item.writes:
            self._arrive(written, begin + item.seconds)
