"""prefetch: a list scheduler for collectives. Each starts as early as data and memory allow, and is waited for before its first reader.

Operators keep their order.

- A call may run ahead of its readers when its sources are there as its segment begins: a weight to gather. The call whose reader comes
  first has priority, and starts as soon as calls ahead hold at most ``limits.ahead_bytes`` with it.
- A call that reads what the segment makes starts as soon as that is made.
- A call whose results nobody in the segment reads trails behind: gradients that leave. Beyond ``limits.ahead_bytes`` the oldest is waited
  for, so that its buffers can be freed.
- The next step of a reshard starts as soon as the one before has started: the link waits for it, not the operators.

With ``limits.ahead_bytes`` of 0 only memory counts: nothing starts before it is needed, and what trails is waited for at once.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from autopar.schedule.instructions import Instruction, Segment
from autopar.schedule.schedule import Schedule
from autopar.schedule.windows import anchors, moving, windows


def prefetch(schedule: Schedule) -> Schedule:
    """The schedule with starts and waits moved apart."""
    return replace(schedule, instructions=tuple(_ListScheduler(schedule).run()))


class _ListScheduler:
    """One sweep over the operators; ``out`` grows."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule, self.limit = schedule, schedule.limits.ahead_bytes
        self.found, self.soft = schedule.once(windows), schedule.once(moving)
        self.waits = {item.of: item for item in schedule.instructions if item.kind == "wait"}
        self.producer = {value: item for item in self.soft for value in item.writes}
        self.unread: dict[tuple[Segment, str], list[Instruction]] = {}
        for item in self.soft:
            if item.kind == "slice" and self.found[item.id].deadline == self.found[item.id].end:
                for value in item.reads:
                    self.unread.setdefault((item.segment, value), []).append(item)
        self.out: list[Instruction] = []
        self.started: set[int] = set()
        self.done: set[int] = set()
        self.ahead = self.behind = 0
        """Bytes of ``leading`` and ``trailing``."""
        self.leading: list[Instruction] = []
        self.trailing: deque[Instruction] = deque()
        self.queue: deque[Instruction] = deque()
        """The calls of the segment that may run ahead, in order of priority."""

    def run(self) -> list[Instruction]:
        made: dict[int, list[Instruction]] = {}
        for item in self.soft:
            if not self.found[item.id].ahead:
                made.setdefault(self.found[item.id].ready, []).append(item)
        place = {item.id: index for index, item in enumerate(self.schedule.once(anchors))}
        for segment in self.schedule.segments:
            soft = segment.among(self.soft)
            ahead = [item for item in soft if item.kind == "start" and self.found[item.id].ahead]
            self.queue = deque(sorted(ahead, key=self._priority))
            for item in segment.among(self.schedule.once(anchors)):
                index, arrived = place[item.id], len(self.done)
                self._run_ahead(index)
                for value in item.reads:
                    self._arrive(value)
                if len(self.done) > arrived:
                    self._run_ahead(index)
                self.out.append(item)
                for other in made.get(index, ()):
                    self._hand_over(other)
            for item in soft:
                self._finish(item)
        return self.out

    def _priority(self, item: Instruction) -> tuple[int, int, int]:
        window = self.found[item.id]
        return window.ready, window.deadline, window.depth

    def _run_ahead(self, index: int) -> None:
        """Starts the calls that may be under way when an operator runs, as far as the limit allows."""
        while self.queue and self.limit and self.found[self.queue[0].id].ready < index:
            first = self.queue[0]
            if first.id not in self.started:
                if self.ahead and self.ahead + self._held(first) > self.limit:
                    return
                self._start(first)
            self.queue.popleft()

    def _hand_over(self, item: Instruction) -> None:
        """Starts a call whose sources were just made. A slice that nobody in the segment reads is cut, so that the whole can go."""
        behind = self.found[item.id].behind
        if item.kind == "start" and self.limit:
            self._start(item)
        elif behind:
            self._finish(item)

    def _held(self, item: Instruction) -> int:
        return self.schedule.collectives[item.of].held_bytes

    def _start(self, item: Instruction) -> None:
        if item.id in self.started:
            return
        self.started.add(item.id)
        for value in item.reads:
            maker = self.producer.get(value)
            if maker is not None and maker.kind == "start":
                self._start(maker)
            elif maker is not None:
                self._finish(maker)
        window, held = self.found[item.id], self._held(item)
        if window.ahead and self.ahead + held > self.limit:
            self._make_room(item)
        while window.behind and self.trailing and self.behind + held > self.limit:
            self._finish(self.trailing.popleft())
        self.out.append(item)
        if window.ahead:
            self.ahead += held
            self.leading.append(item)
        elif window.behind:
            self.behind += held
            self.trailing.append(item)

    def _make_room(self, item: Instruction) -> None:
        """Waits for other calls ahead, oldest first, until an urgent one is within the limit. The last call that it reads may stay in
        flight."""
        read = [other for other in self.leading if set(other.writes) & set(item.reads)]
        for other in (*(other for other in self.leading if other not in read), *read[:-1]):
            if self.ahead + self._held(item) > self.limit:
                self._finish(other)

    def _arrive(self, value: str) -> None:
        maker = self.producer.get(value)
        if maker is not None:
            self._finish(maker)

    def _finish(self, item: Instruction) -> None:
        """Waits for a call, or cuts a slice, once what it reads is there. Slices of it that nobody in the segment reads follow."""
        if item.id in self.done:
            return
        if item.kind == "start":
            self._start(item)
        self.done.add(item.id)
        for value in item.reads:
            self._arrive(value)
        self.out.append(self.waits[item.of] if item.kind == "start" else item)
        for value in item.writes:
            for other in self.unread.get((item.segment, value), ()):
                self._finish(other)
        if item.kind != "start":
            return
        if self.found[item.id].ahead:
            self.ahead -= self._held(item)
            self.leading.remove(item)
        elif self.found[item.id].behind:
            self.behind -= self._held(item)
