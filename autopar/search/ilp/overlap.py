"""Overlap pricing: a collective costs as much as operators wait for it in a schedule.

A collective hidden behind operators costs nothing, an exposed one costs all of its seconds. So a plan is searched under the exposure that
the last schedule showed, averaged with what was believed before. Exposure is known for the collectives of the simulated plan alone. It is
taken as equal among collectives of one phase and side.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from autopar.graph import Phase
from autopar.schedule import Schedule, Slot
from autopar.schedule.windows import windows
from autopar.search.ilp.model import Edge, InSequence, Model, Priced, Side, Weights
from autopar.search.settings import BELIEF_KEPT, FIRST_CALLS, FIRST_WAITED

PhaseSide = tuple[Phase, Side]


class OverlapStats(NamedTuple):
    """Statistics of the collectives of one phase and side.

    Args:
        exposed: share of their seconds for which operators wait.
        calls_per_value: calls for each value; 1: no buckets.
        slowing: share of their seconds that slows operators. Calls on two links at the same time slow them once.
    """

    exposed: float
    calls_per_value: float
    slowing: float = 1.0

    def blended_with(self, seen: OverlapStats | None) -> OverlapStats:
        """The average of the belief and what a schedule showed."""
        if seen is None:
            return self
        return OverlapStats(*(BELIEF_KEPT * mine + (1 - BELIEF_KEPT) * its for mine, its in zip(self, seen, strict=True)))


FIRST_OVERLAPPABLE = OverlapStats(FIRST_WAITED, FIRST_CALLS)
FIRST_BELIEFS: Mapping[Side, OverlapStats] = {"ahead": FIRST_OVERLAPPABLE, "between": OverlapStats(1.0, 1.0), "behind": FIRST_OVERLAPPABLE}
"""Belief before the first schedule."""
CONCURRENT_SLOWDOWN = 0.5
"""Share of the slowdown that each of two concurrent calls causes: together they slow operators as one does."""


@dataclass(frozen=True)
class LearnedOverlap:
    """``Weights`` learnt from simulation: operators and copies count whole, collectives by their exposed share.

    A latency, which a bucket pays once, counts by the calls per value.

    Args:
        slowdown: the hardware's ``overlap_slowdown``: hidden collectives cost that share, because they slow operators.
    """

    beliefs: Mapping[PhaseSide, OverlapStats]
    slowdown: float

    @staticmethod
    def first(slowdown: float) -> LearnedOverlap:
        """The belief before anything was simulated."""
        phases: tuple[Phase, ...] = ("forward", "backward")
        return LearnedOverlap({(phase, side): belief for phase in phases for side, belief in FIRST_BELIEFS.items()}, slowdown)

    @staticmethod
    def optimistic(slowdown: float) -> LearnedOverlap:
        """The belief that collectives that may overlap are hidden. The others are waited for."""
        first = LearnedOverlap.first(slowdown)
        hidden = {place: belief._replace(exposed=0.0) if place[1] != "between" else belief for place, belief in first.beliefs.items()}
        return LearnedOverlap(hidden, slowdown)

    def price(self, model: Model) -> Priced:
        made: dict[object, np.ndarray] = {}
        edges = []
        for edge in model.edges:
            if edge.tensor is None:
                edges.append(edge.seconds)
                continue
            belief = self.beliefs[edge.phase, edge.side]
            key = id(edge.seconds), belief, edge.sources if edge.share < 1.0 else ()
            if key not in made:
                share = belief.exposed + (1.0 - belief.exposed) * self.slowdown * belief.slowing
                copies = model.copies(edge)
                moved = edge.seconds - copies - (1.0 - belief.calls_per_value) * _latency(model, edge)
                # 0 times infinity is not a number
                made[key] = (share * moved if share else np.where(np.isfinite(moved), 0.0, moved)) + copies + model.sums(edge)
            edges.append(made[key])
        return Priced([node.seconds for node in model.nodes], edges)

    def learn(self, schedule: Schedule, slots: Sequence[Slot]) -> LearnedOverlap:
        """The belief after a simulated schedule. Where the schedule has no collectives, the belief stays."""
        seen = measure_overlap(schedule, slots)
        return LearnedOverlap({place: belief.blended_with(seen.get(place)) for place, belief in self.beliefs.items()}, self.slowdown)


def learn_weights(schedule: Schedule, slots: Sequence[Slot]) -> Weights:
    """The weights learnt from the schedule of one plan alone; where nothing overlaps, all seconds count."""
    machine = schedule.machine
    return LearnedOverlap.first(machine.hardware.overlap_slowdown).learn(schedule, slots) if machine.overlaps else InSequence()


def _latency(model: Model, edge: Edge) -> np.ndarray:
    """The part of an edge's seconds that is paid once a call."""
    rest = sum((model.loads(edge, link) for link in model.space.links), model.copies(edge))
    return np.where(np.isfinite(edge.seconds), np.maximum(edge.seconds - rest, 0.0), 0.0)


def measure_overlap(schedule: Schedule, slots: Sequence[Slot]) -> dict[PhaseSide, OverlapStats]:
    """Statistics of a simulated schedule, by phase and side.

    Deferred collectives of the loss are left out: nobody waits for them, unlike for others of their side.
    """
    stalls = [(slot.since, slot.since + slot.stalled) for slot in slots if slot.stalled > 0.0]
    begins = [begin for begin, _ in stalls]
    found = windows(schedule)
    total: dict[PhaseSide, float] = defaultdict(float)
    waited: dict[PhaseSide, float] = defaultdict(float)
    calls: dict[PhaseSide, int] = defaultdict(int)
    parts: dict[PhaseSide, int] = defaultdict(int)
    slows: dict[PhaseSide, float] = defaultdict(float)
    flights: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for slot in slots:
        if slot.instruction.kind == "start" and slot.end > slot.begin:
            flights[slot.instruction.stream].append((slot.begin, slot.end))
    for slot in slots:
        item = slot.instruction
        if item.kind == "start" and not schedule.collectives[item.of].late:
            window = found[item.id]
            place: PhaseSide = item.half, "ahead" if window.ahead else "behind" if window.behind else "between"
            total[place] += slot.end - slot.begin
            calls[place] += 1
            parts[place] += len(schedule.collectives[item.of].parts)
            both = sum(_seconds_under_way(others, slot.begin, slot.end) for stream, others in flights.items() if stream != item.stream)
            slows[place] += max(slot.end - slot.begin - CONCURRENT_SLOWDOWN * both, 0.0)
            for begin, end in stalls[max(bisect_left(begins, slot.begin) - 1, 0) : bisect_left(begins, slot.end)]:
                waited[place] += max(0.0, min(end, slot.end) - max(begin, slot.begin))
    return {
        place: OverlapStats(waited[place] / seconds, calls[place] / parts[place], slows[place] / seconds)
        for place, seconds in total.items() if seconds > 0.0
    }  # fmt: skip


def _seconds_under_way(flights: Sequence[tuple[float, float]], begin: float, end: float) -> float:
    """Seconds between two times for which calls of one stream are under way."""
    some = flights[max(bisect_left(flights, (begin, 0.0)) - 1, 0) : bisect_left(flights, (end, 0.0))]
    return sum(max(0.0, min(last, end) - max(first, begin)) for first, last in some)
