"""Calls that wait until another link is busy: operators are slowed while any link is, so what is under way on two at the same time costs
them no more than what is on one.

Only what trails can wait for that, since nobody waits for it before the phase ends: it starts beside a call of another link, as soon as
what it reads has arrived and where it ends before its own link is needed by a call that operators wait for; and without any of that
when the rest of the phase is only just long enough for all that is to follow on its link.
What trails on the link that carries most of what operators wait for does not wait: it is what others start beside.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence

from autopar.graph import Phase
from autopar.schedule.instructions import Instruction
from autopar.schedule.schedule import Schedule
from autopar.schedule.windows import anchors, arrived, moving, windows


def patient(schedule: Schedule, begins: Sequence[float]) -> Mapping[int, float]:
    """Instruction ids of the calls that wait, and when each must have started.

    Args:
        begins: when each anchor begins, and at last when all have ended.
    """
    if not schedule.machine.hardware.overlap_slowdown:
        return {}
    found, starts = schedule.once(windows), [item for item in schedule.once(moving) if item.kind == "start"]
    waited: dict[tuple[Phase, str], float] = defaultdict(float)
    for item in (*schedule.once(anchors), *starts):
        if item.kind == "run" or not (found[item.id].ahead or found[item.id].behind):
            for link in item.streams:
                waited[item.half, link] += item.seconds
    links = {link for item in starts for link in item.streams}
    due, busy, needed = dict[int, float](), dict[tuple[Phase, str], float](), dict[str, float]()
    trail = [item for item in starts if found[item.id].behind]
    for item in sorted(trail, key=lambda item: (found[item.id].ready, found[item.id].depth), reverse=True):
        held = [(item.half, link) for link in item.streams]
        followed = (needed.get(value, math.inf) for value in item.writes)
        begin = min([begins[found[item.id].end], *(busy.get(one, math.inf) for one in held), *followed]) - item.seconds
        busy.update(dict.fromkeys(held, begin))
        needed.update({value: min(begin, needed.get(value, begin)) for value in item.reads})
        most = max((waited[one] for one in held), default=math.inf)
        if any(waited[item.half, link] > most for link in links.difference(item.streams)):
            due[item.id] = begin
    return due


class Links:
    """When links are busy, by the clock of one sweep over the operators.

    Args:
        begins, due: see ``patient``.
        others: for each link when calls hold it for which operators wait: see ``prefetching.StartTimes``.
    """

    def __init__(self, begins: Sequence[float], due: Mapping[int, float], others: Mapping[str, Sequence[tuple[int, float]]]) -> None:
        self.begins, self.due, self.others = begins, due, others
        self.index = 0
        """The anchor that the sweep has come to."""
        self.busy: dict[str, float] = {}
        self.arrives: dict[str, float] = {}

    def start(self, item: Instruction) -> None:
        """A call starts."""
        end = max(self._free(item), arrived(item, self.arrives)) + item.seconds
        for link in item.streams:
            self.busy[link] = end
        for value in item.writes:
            self.arrives[value] = end

    def _free(self, item: Instruction) -> float:
        """When its links are."""
        found, busy = self.begins[self.index], self.busy
        for link in item.streams:
            if link in busy and busy[link] > found:
                found = busy[link]
        return found

    def waits(self, item: Instruction) -> bool:
        """Whether a patient call should not start yet."""
        now = self.begins[self.index]
        if self.due[item.id] <= now:
            return False
        begin, links = self._free(item), item.streams
        beside = [until for link, until in self.busy.items() if until > begin and link not in links]
        return not beside or arrived(item, self.arrives) > now or self._holds_up(item, begin)

    def _holds_up(self, item: Instruction, begin: float) -> bool:
        """Whether it would keep a link from a call for which operators wait."""
        for link in item.streams:
            starts = self.others.get(link, ())
            place = bisect_right(starts, (self.index, math.inf))
            if place < len(starts) and starts[place][1] < begin + item.seconds:
                return True
        return False
