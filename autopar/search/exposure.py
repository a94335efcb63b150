"""Prices by exposure: a collective counts as much as operators wait for it in a schedule.

What is hidden behind operators costs nothing, what is waited for costs all of it; so a plan is searched under the exposure that the last
one showed, averaged with what was believed before, and the best simulated schedule is kept. Exposure is known for the collectives of the
plan that was simulated, and is taken as equal among those that stand alike beside the operators (phase and side).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.graph import Phase
from autopar.schedule import Schedule, Slot
from autopar.schedule.windows import windows
from autopar.search.model import Edge, Model, Priced, Side

PhaseSide = tuple[Phase, Side]


@dataclass(frozen=True)
class Belief:
    """Of the collectives of one place: the share of their seconds that operators wait for, and calls for each value (1: no buckets)."""

    waited: float
    calls: float

    def mixed(self, seen: Belief | None) -> Belief:
        """Part of what is seen in the place of what was believed."""
        if seen is None:
            return self
        return Belief(KEPT * self.waited + (1 - KEPT) * seen.waited, KEPT * self.calls + (1 - KEPT) * seen.calls)


FIRST: Mapping[Side, Belief] = {"ahead": Belief(0.5, 0.2), "between": Belief(1.0, 1.0), "behind": Belief(0.5, 0.2)}
"""What is believed before the first schedule."""
KEPT = 0.6
"""Share of the old belief in the new one."""


@dataclass(frozen=True)
class Exposure:
    """As ``Weights`` of a problem: operators and copies count whole, collectives by the share of their seconds waited for, and their
    latency, which a bucket pays once, by how many values share a call.

    Args:
        slowdown: the hardware's ``overlap_slowdown``: what is hidden costs that share all the same.
    """

    beliefs: Mapping[PhaseSide, Belief]
    slowdown: float

    @staticmethod
    def first(slowdown: float) -> Exposure:
        """What is believed before anything was simulated."""
        phases: tuple[Phase, ...] = ("forward", "backward")
        return Exposure({(phase, side): belief for phase in phases for side, belief in FIRST.items()}, slowdown)

    @staticmethod
    def even(waited: float, slowdown: float) -> Exposure:
        """The same share of every collective is waited for, and none share a call."""
        phases: tuple[Phase, ...] = ("forward", "backward")
        return Exposure({(phase, side): Belief(waited, 1.0) for phase in phases for side in FIRST}, slowdown)

    def price(self, model: Model) -> Priced:
        made: dict[object, np.ndarray] = {}
        edges = []
        for edge in model.edges:
            if edge.tensor is None:
                edges.append(edge.seconds)
                continue
            belief = self.beliefs[edge.phase, edge.side]
            key = id(edge.seconds), belief
            if key not in made:
                share = belief.waited + (1.0 - belief.waited) * self.slowdown
                copies = model.copies(edge)
                made[key] = share * (edge.seconds - copies - (1.0 - belief.calls) * _latency(model, edge)) + copies
            edges.append(made[key])
        return Priced([node.seconds for node in model.nodes], edges)

    def learn(self, schedule: Schedule, slots: Sequence[Slot]) -> Exposure:
        """The belief after a simulated schedule; where it has no collectives, what was believed stays."""
        seen = exposed(schedule, slots)
        return Exposure({place: belief.mixed(seen.get(place)) for place, belief in self.beliefs.items()}, self.slowdown)


def _latency(model: Model, edge: Edge) -> np.ndarray:
    """What of an edge's seconds is paid once a call."""
    rest = sum((model.loads(edge, link) for link in model.space.links), model.copies(edge))
    return np.where(np.isfinite(edge.seconds), np.maximum(edge.seconds - rest, 0.0), 0.0)


def exposed(schedule: Schedule, slots: Sequence[Slot]) -> dict[PhaseSide, Belief]:
    """What a simulated schedule shows of each place of collectives: the share of their seconds during which operators stood still."""
    stalls = [(slot.since, slot.since + slot.stalled) for slot in slots if slot.stalled > 0.0]
    begins = [begin for begin, _ in stalls]
    found = windows(schedule)
    total: dict[PhaseSide, float] = defaultdict(float)
    waited: dict[PhaseSide, float] = defaultdict(float)
    calls: dict[PhaseSide, int] = defaultdict(int)
    parts: dict[PhaseSide, int] = defaultdict(int)
    for slot in slots:
        item = slot.instruction
        if item.kind == "start":
            window = found[item.id]
            place: PhaseSide = item.half, "ahead" if window.ahead else "behind" if window.behind else "between"
            total[place] += slot.end - slot.begin
            calls[place] += 1
            parts[place] += len(schedule.collectives[item.of].parts)
            for begin, end in stalls[max(bisect_left(begins, slot.begin) - 1, 0) : bisect_left(begins, slot.end)]:
                waited[place] += max(0.0, min(end, slot.end) - max(begin, slot.begin))
    return {place: Belief(waited[place] / seconds, calls[place] / parts[place]) for place, seconds in total.items() if seconds > 0.0}
