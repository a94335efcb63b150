"""prefetch: collectives start as early as data and memory allow, and are waited for just before their first reader.

- Calls whose sources are there as the segment begins (gathers of weights) start ahead of their readers, within ``limits.ahead_bytes``.
  They start just early enough to arrive in time on their busy links. By a clock of the operators alone they let urgent calls pass.
- Calls on results of the segment start as soon as these are made.
- Calls that nobody in the segment reads (gradients that leave) trail behind. When more than ``limits.ahead_bytes`` of them are in flight,
  the oldest is waited for, so that its buffers can be freed.
- The next step of a reshard starts as soon as the one before has started: the link, not the operators, waits for it. Where microbatches
  are summed between two steps (``summed_halfway``), it starts when the one before is waited for.

With ``limits.ahead_bytes`` of 0 nothing starts before it is needed, and calls that trail are waited for at once.
What runs before the first microbatch stays as it stands: one call after another.
With ``limits.held_bytes``, starts move ahead of that only as far as there is room (``headroom``).
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from autopar.schedule.accumulating import accumulate, summed_halfway
from autopar.schedule.collectives import Collective
from autopar.schedule.headroom import Headroom
from autopar.schedule.instructions import BEFORE_ALL, COMPUTE, Instruction, Segment
from autopar.schedule.schedule import Schedule
from autopar.schedule.settings import HALFWAY_CALLS, LEAD
from autopar.schedule.windows import Window, anchors, moving, windows


def prefetch(schedule: Schedule) -> Schedule:
    """The schedule with starts and waits moved apart."""
    found, limits, headroom = schedule.once(windows), schedule.limits, None
    planned = schedule.once(times)
    if limits.held_bytes and limits.ahead_bytes:
        late = replace(schedule, limits=replace(limits, ahead_bytes=0))
        headroom = Headroom(accumulate(replace(late, instructions=tuple(_Placing(late, found, planned).run()))), limits.held_bytes)
    return replace(schedule, instructions=tuple(_Placing(schedule, found, planned, headroom).run()))


@dataclass(frozen=True)
class StartTimes:
    """When calls that may run ahead should start.

    Args:
        clock: see ``Clock``.
        early: by instruction id the anchor before which a call may start.
        late: by instruction id the anchor before which a call must start.
        others: for each link its urgent calls, in order: the anchor before which one starts, and its begin in seconds. They are calls on
            results of the segment, and collectives inside operators.
    """

    clock: Clock
    early: Mapping[int, int]
    late: Mapping[int, int]
    others: Mapping[str, Sequence[tuple[int, float]]]

    def holds_up(self, item: Instruction, index: int) -> bool:
        """Whether a call that starts before anchor ``index`` would delay an urgent call that it could follow and still be in time."""
        for link in item.streams:
            starts = self.others.get(link, ())
            place = bisect_right(starts, (index, math.inf))
            after, begins = starts[place] if place < len(starts) else (math.inf, math.inf)
            if after <= self.late[item.id] and self.clock.begins[index] + item.seconds > begins:
                return True
        return False


class Clock(NamedTuple):
    """Seconds at which each anchor begins, with the end of all at last; and at which each ends."""

    begins: Sequence[float]
    ends: Sequence[float]


def _alone(schedule: Schedule) -> Clock:
    """The clock of the operators alone."""
    clock = [0.0]
    for item in schedule.once(anchors):
        clock.append(clock[-1] + item.seconds)
    return Clock(clock, clock[1:])


def times(schedule: Schedule) -> StartTimes:
    """The start times of calls, by the clock of the operators.

    Links are filled from the end. Each call ends before its deadline, and before the next call or operator on its link begins.
    """
    clock, found, inside = _alone(schedule), schedule.once(windows), dict[str, list[int]]()
    for number, item in enumerate(schedule.once(anchors)):
        for link in item.streams if item.stream != COMPUTE else ():
            inside.setdefault(link, []).append(number)
    starts = [item for item in schedule.once(moving) if item.kind == "start"]
    place = {item.id: found[item.id].ready + 1 if found[item.id].behind else found[item.id].deadline for item in starts}
    backwards = sorted(starts, key=lambda item: (place[item.id], found[item.id].depth), reverse=True)
    early, late = (_latest(backwards, found, place, clock, inside, lead) for lead in (LEAD, 1.0))
    others = {link: [(number + 1, clock.begins[number]) for number in numbers] for link, numbers in inside.items()}
    for item in starts:
        if not found[item.id].ahead and not found[item.id].behind:
            for link in item.streams:
                ready = found[item.id].ready
                others.setdefault(link, []).append((ready + 1, clock.ends[ready]))
    return StartTimes(clock, early, late, {link: sorted(set(starts)) for link, starts in others.items()})


def _latest(
    starts: Sequence[Instruction], found: Mapping[int, Window], place: Mapping[int, int], clock: Clock,
    inside: Mapping[str, Sequence[int]], lead: float,
) -> Mapping[int, int]:  # fmt: skip
    """For each call that may run ahead, the anchor before which it starts to be in time, ``lead`` times its length ahead.

    Args:
        starts: the last first.
        inside: for each link the anchors with collectives on it inside.
    """
    needed: dict[str, float] = {}
    busy: dict[str, float] = {}
    latest: dict[int, int] = {}
    for item in starts:
        window, seconds, links, end = found[item.id], item.seconds, item.streams, clock.begins[place[item.id]]
        for link in links:
            if link in busy and busy[link] < end:
                end = busy[link]
        if not window.behind:
            for value in item.writes:
                if value in needed and needed[value] < end:
                    end = needed[value]
        for link in links:
            if link in inside:
                end = _free_until(end, seconds, inside[link], clock)
        begin = end - seconds * lead
        for link in links:
            busy[link] = end - seconds
        for value in item.reads:
            if value not in needed or begin < needed[value]:
                needed[value] = begin
        if window.ahead:
            latest[item.id] = max(bisect_right(clock.begins, begin) - 1, window.ready + 1)
    return latest


def _free_until(end: float, seconds: float, held: Sequence[int], clock: Clock) -> float:
    """The latest time up to ``end`` before which no anchor holds a link for ``seconds``."""
    for number in reversed(held[: bisect_left(held, end, key=clock.begins.__getitem__)]):
        if clock.ends[number] <= end - seconds:
            break
        end = clock.begins[number]
    return end


class _Placing:
    """One sweep over the operators; ``out`` grows."""

    def __init__(self, schedule: Schedule, found: Mapping[int, Window], times: StartTimes, headroom: Headroom | None = None) -> None:
        self.schedule, self.found, self.times, self.limit, self.headroom = schedule, found, times, schedule.limits.ahead_bytes, headroom
        self.soft = schedule.once(moving)
        self.waits = {item.of: item for item in schedule.instructions if item.kind == "wait"}
        self.producer = {value: item for item in self.soft for value in item.writes}
        self.unread: dict[tuple[Segment, str], list[Instruction]] = {}
        for item in self.soft:
            if item.kind == "slice" and found[item.id].deadline == found[item.id].end:
                for value in item.reads:
                    self.unread.setdefault((item.segment, value), []).append(item)
        self.out: list[Instruction] = []
        self.started: set[int] = set()
        self.done: set[int] = set()
        self.ahead = self.behind = 0
        self.leading: list[Instruction] = []
        self.trailing: deque[Instruction] = deque()
        self.held_back: list[Instruction] = []
        summed = summed_halfway(schedule)
        self.follows = {value: item for item in self.soft for value in item.reads if value in summed}
        """By a value that microbatches are summed in, the call that reads the sum: it starts when the value is there."""
        self.halfway: deque[Instruction] = deque()
        """Calls in flight that make such values."""
        self.following: list[Instruction] = []
        """Calls that read a sum, or lead on from it, and have not started."""

    def run(self) -> list[Instruction]:
        fixed, early = self.schedule.once(anchors), self.times.early
        made: dict[int, list[Instruction]] = {}
        for item in self.soft:
            if not self.found[item.id].ahead:
                made.setdefault(self.found[item.id].ready, []).append(item)
        place = {item.id: index for index, item in enumerate(fixed)}
        for segment in self.schedule.segments:
            soft = segment.among(self.soft)
            if segment.microbatch == BEFORE_ALL:
                self.out += segment.among(self.schedule.instructions)
                self.started.update(item.id for item in soft)
                self.done.update(item.id for item in soft)
                continue
            gathers = [item for item in soft if item.kind == "start" and self.found[item.id].ahead]
            gathers.sort(key=lambda item: (self.times.early[item.id], self.found[item.id].deadline, self.found[item.id].depth))
            self.queue = deque(gathers)
            for item in segment.among(fixed):
                index = place[item.id]
                if self.headroom is not None or (self.queue and early[self.queue[0].id] <= index):
                    self._run_ahead(index)
                arrived = len(self.done)
                for value in item.reads:
                    self._arrive(value)
                if len(self.done) > arrived:
                    self._run_ahead(index)
                self.out.append(item)
                for other in made.get(index, ()):
                    self._made(other, index + 1)
            self.held_back.clear()
            self._finish_halfway(0)
            for item in soft:
                self._finish(item)
        return self.out

    def _run_ahead(self, index: int) -> None:
        """Starts the calls that must be under way when the operator ``index`` runs, within the limit."""
        if self.headroom is not None:
            self._keep_room(index)
        while self.queue and self.limit:
            first = self.queue[0]
            if first.id not in self.started:
                full = self.ahead and self.ahead + self._held(first) > self.limit
                if full or self.times.early[first.id] > index or self.times.holds_up(first, index) or not self._has_room(first, index):
                    return
                self._start(first)
            self.queue.popleft()

    def _keep_room(self, index: int) -> None:
        """Starts calls that were held back where there is room now, and waits for trailing calls where there is none."""
        assert self.headroom is not None
        for item in [item for item in self.held_back if item.id in self.started or self._has_room(item, index)]:
            self.held_back.remove(item)
            self._start(item)
        while self._trailing() and not self.headroom.allows(self._trailing(), index):
            self._finish(self.trailing.popleft())

    def _has_room(self, item: Instruction, index: int) -> bool:
        """Whether a call may start before the anchor ``index``, ahead of its readers. Calls that lead to it must have started."""
        if self.headroom is None:
            return True
        makers = [self.producer[value] for value in item.reads if value in self.producer]
        ready = all(maker.id in (self.started if maker.kind == "start" else self.done) for maker in makers)
        deadline = self.found[item.id].deadline
        return ready and self.headroom.reserve(self.schedule.collectives[item.of], min(index, deadline), deadline, self._trailing())

    def _trailing(self) -> list[Collective]:
        return [self.schedule.collectives[item.of] for item in self.trailing]

    def _made(self, item: Instruction, index: int) -> None:
        """Starts a call whose sources are all there now. Slices that nobody in the segment reads are cut, so that the whole can go."""
        if item.kind == "start":
            if not self.limit:
                if self.found[item.id].behind:
                    self._finish(item)
                return
            if not self.found[item.id].behind and not self._has_room(item, index):
                self.held_back.append(item)
                return
            if self._follows_sum(item):
                self.following.append(item)
            else:
                self._start(item)
        elif self.found[item.id].behind:
            self._finish(item)

    def _follows_sum(self, item: Instruction) -> bool:
        """Whether a call, or one that leads to it, reads a sum of a value that is not there yet."""
        makers = [self.producer[value] for value in item.reads if value in self.producer]
        waits = any(self.follows.get(value) is item and self.producer[value].id not in self.done for value in item.reads)
        return waits or any(maker.kind == "start" and maker.id not in self.started for maker in makers)

    def _finish_halfway(self, most: int) -> None:
        """Waits for the oldest calls that make values to be summed, until ``most`` are in flight."""
        while len(self.halfway) > most:
            self._finish(self.halfway[0])

    def _follow(self, made: Instruction) -> None:
        """Starts the calls that read sums of what has been made, and those that they lead to."""
        if made in self.halfway:
            self.halfway.remove(made)
            while (item := next((item for item in self.following if not self._follows_sum(item)), None)) is not None:
                self.following.remove(item)
                self._start(item)

    def _held(self, item: Instruction) -> int:
        return self.schedule.collectives[item.of].held_bytes

    def _start(self, item: Instruction) -> None:
        if item.id in self.started:
            return
        self.started.add(item.id)
        for value in item.reads:
            maker = self.producer.get(value)
            if maker is not None and maker.kind == "start" and self.follows.get(value) is not item:
                self._start(maker)
            elif maker is not None:
                self._finish(maker)
        window, held = self.found[item.id], self._held(item)
        if window.ahead and self.ahead + held > self.limit:
            self._make_room(item)
        while window.behind and self.trailing and self.behind + held > self.limit:
            self._finish(self.trailing.popleft())
        self.out.append(item)
        if not self.follows.keys().isdisjoint(item.writes):
            self._finish_halfway(HALFWAY_CALLS - 1)
            self.halfway.append(item)
        if window.ahead:
            self.ahead += held
            self.leading.append(item)
        elif window.behind:
            self.behind += held
            self.trailing.append(item)

    def _make_room(self, item: Instruction) -> None:
        """Waits for other calls that run ahead, oldest first, where an operator needs ``item`` now and the limit is reached.

        The last of its own sources may stay in flight.
        """
        read = [other for other in self.leading if set(other.writes) & set(item.reads)]
        for other in (*(other for other in self.leading if other not in read), *read[:-1]):
            if self.ahead + self._held(item) > self.limit:
                self._finish(other)

    def _arrive(self, value: str) -> None:
        maker = self.producer.get(value)
        if maker is not None and maker.id not in self.done:
            self._finish(maker)

    def _finish(self, item: Instruction) -> None:
        if item.id in self.done:
            return
        if item.kind == "start":
            self._start(item)
        self.done.add(item.id)
        for value in item.reads:
            self._arrive(value)
        if item.kind == "slice":
            self.out.append(item)
            self._cut(item)
            return
        self.out.append(self.waits[item.of])
        self._cut(item)
        window = self.found[item.id]
        if window.ahead:
            self.ahead -= self._held(item)
            self.leading.remove(item)
        elif window.behind:
            self.behind -= self._held(item)
        self._follow(item)

    def _cut(self, item: Instruction) -> None:
        """Cuts the slices of a new value that nobody in the segment reads, so that the whole can go."""
        for value in item.writes:
            for other in self.unread.get((item.segment, value), ()):
                self._finish(other)
