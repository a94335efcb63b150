"""prefetch: collectives start as early as data and memory allow, and are waited for just before their first reader.

- What is there when the phase begins (weights to gather) starts ahead of its readers, in the order in which they come, as long as what
  is in flight stays within ``limits.ahead_bytes``.
- What the phase makes starts as soon as it is made.
- What nobody in the phase reads (gradients that leave) trails behind; when more than ``limits.ahead_bytes`` of it is in flight,
  the oldest is waited for, so that its buffers can be freed.
- The next step of a reshard starts as soon as the one before has started: the link, not the operators, waits for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import replace

from autopar.schedule.instructions import Instruction, Schedule
from autopar.schedule.windows import Window, anchors, moving, windows


def prefetch(schedule: Schedule) -> Schedule:
    """The schedule with starts and waits moved apart."""
    found = windows(schedule)
    return replace(schedule, instructions=tuple(_Placing(schedule, found).run()))


class _Placing:
    """One sweep over the operators; ``out`` grows."""

    def __init__(self, schedule: Schedule, found: Mapping[int, Window]) -> None:
        self.schedule, self.found, self.limit = schedule, found, schedule.limits.ahead_bytes
        self.soft = moving(schedule)
        self.waits = {item.of: item for item in schedule.instructions if item.kind == "wait"}
        self.producer = {value: item for item in self.soft for value in item.writes}
        self.out: list[Instruction] = []
        self.started: set[int] = set()
        self.done: set[int] = set()
        self.ahead = self.behind = 0
        self.trailing: deque[Instruction] = deque()

    def run(self) -> list[Instruction]:
        fixed = anchors(self.schedule)
        made: dict[int, list[Instruction]] = {}
        for item in self.soft:
            if not self.found[item.id].ahead:
                made.setdefault(self.found[item.id].ready, []).append(item)
        numbered = list(enumerate(fixed))
        for phase in ("forward", "backward"):
            gathers = [item for item in self.soft if item.phase == phase and item.kind == "start" and self.found[item.id].ahead]
            gathers.sort(key=lambda item: (self.found[item.id].deadline, self.found[item.id].depth))
            self.queue = deque(gathers)
            for index, item in numbered:
                if item.phase != phase:
                    continue
                self._run_ahead()
                for value in item.reads:
                    self._arrive(value)
                self._run_ahead()
                self.out.append(item)
                for other in made.get(index, ()):
                    self._made(other)
            for item in self.soft:
                if item.phase == phase:
                    self._finish(item)
        return self.out

    def _run_ahead(self) -> None:
        while self.queue and (self.queue[0].id in self.started or not self.ahead or self.ahead + self._held(self.queue[0]) <= self.limit):
            self._start(self.queue.popleft())

    def _made(self, item: Instruction) -> None:
        """What reads only what is there now: calls start, and slices that nobody in the phase reads are cut, so that the whole can go."""
        if item.kind == "start":
            if self.found[item.id].behind:
                while self.trailing and self.behind + self._held(item) > self.limit:
                    self._finish(self.trailing.popleft())
            self._start(item)
        elif self.found[item.id].behind:
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
        self.out.append(item)
        window = self.found[item.id]
        if window.ahead:
            self.ahead += self._held(item)
        elif window.behind:
            self.behind += self._held(item)
            self.trailing.append(item)

    def _arrive(self, value: str) -> None:
        if value in self.producer:
            self._finish(self.producer[value])

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
            return
        self.out.append(self.waits[item.of])
        window = self.found[item.id]
        if window.ahead:
            self.ahead -= self._held(item)
        elif window.behind:
            self.behind -= self._held(item)
