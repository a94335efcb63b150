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
from autopar.search.model import Model, Priced, Side

Place = tuple[Phase, Side]

FIRST: Mapping[Side, float] = {"ahead": 0.5, "between": 1.0, "behind": 0.5}
"""What is believed before the first schedule."""
KEPT = 0.6
"""Share of the old belief in the new one."""


@dataclass(frozen=True)
class Exposure:
    """As ``Weights`` of a problem: operators count whole, reshards by the share of their seconds that operators wait for."""

    shares: Mapping[Place, float]

    @staticmethod
    def first() -> Exposure:
        """What is believed before anything was simulated."""
        phases: tuple[Phase, ...] = ("forward", "backward")
        return Exposure({(phase, side): share for phase in phases for side, share in FIRST.items()})

    def price(self, model: Model) -> Priced:
        made: dict[object, np.ndarray] = {}
        edges = []
        for edge in model.edges:
            share = self.shares[edge.phase, edge.side]
            key = id(edge.seconds), share
            if key not in made:
                finite = np.isfinite(edge.seconds)
                made[key] = np.where(finite, share * np.where(finite, edge.seconds, 0.0), np.inf)
            edges.append(made[key] if edge.tensor is not None else edge.seconds)
        return Priced([node.seconds for node in model.nodes], edges)

    def learn(self, schedule: Schedule, slots: Sequence[Slot]) -> Exposure:
        """The belief after a simulated schedule: where it has collectives, part of what is seen takes the place of what was believed."""
        seen = exposed(schedule, slots)
        return Exposure({place: KEPT * share + (1 - KEPT) * seen.get(place, share) for place, share in self.shares.items()})


def exposed(schedule: Schedule, slots: Sequence[Slot]) -> dict[Place, float]:
    """For each place of collectives the share of their seconds during which operators stood still for one."""
    stalls = [(slot.begin, slot.end) for slot in slots if slot.stalled > 0.0]
    begins = [begin for begin, _ in stalls]
    found = windows(schedule)
    total: dict[Place, float] = defaultdict(float)
    waited: dict[Place, float] = defaultdict(float)
    for slot in slots:
        item = slot.instruction
        if item.kind == "start":
            window = found[item.id]
            place: Place = item.phase, "ahead" if window.ahead else "behind" if window.behind else "between"
            total[place] += slot.end - slot.begin
            for begin, end in stalls[max(bisect_left(begins, slot.begin) - 1, 0) : bisect_left(begins, slot.end)]:
                waited[place] += max(0.0, min(end, slot.end) - max(begin, slot.begin))
    return {place: waited[place] / seconds for place, seconds in total.items() if seconds > 0.0}
