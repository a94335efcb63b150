"""What plans of little time do without: a reshard waits for all that leads to it and is waited for by all that follows, so that a plan that
has it takes at least as long as these and it, one after another.

A problem without the reshards that take longer than some time in that way bounds every plan: one that has none of them by its own bound,
and any other by that time (as variables are fixed by reduced costs; Balas, Martin 1980). Its answers cannot be mixed of plans that each
wait somewhere else, as under weights alone, which then say that nothing waits for long anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from autopar.graph import Phase
from autopar.search.bounds import PHASES, floor
from autopar.search.model import Edge, Model
from autopar.search.space import IMPOSSIBLE


def within(model: Model, seconds: float) -> Model:
    """The model without the reshards that no plan of at most so many seconds has.

    Args:
        model: not of folded layers.
    """
    rest, around = floor(model), {phase: _Around.of(model, phase) for phase in PHASES}

    def kept(number: int, edge: Edge) -> Edge:
        beside = around[edge.phase].beside(edge)
        if edge.tensor is None or beside is None:
            return edge
        moved = np.where(np.isfinite(edge.seconds), edge.seconds - model.copies(edge), 0.0)
        if number in model.late:
            moved = np.where(model.late[number], 0.0, moved)
        too_long = (moved > 0.0) & (rest - around[edge.phase].all + beside + moved > seconds)
        return replace(edge, seconds=np.where(too_long, IMPOSSIBLE, edge.seconds)) if too_long.any() else edge

    return replace(model, edges=[kept(number, edge) for number, edge in enumerate(model.edges)])


@dataclass(frozen=True)
class _Around:
    """Seconds of operators of a phase, each in its fastest strategy: of all, and for each node of what leads to it, or follows it, and its
    own; and the nodes' places in time."""

    all: float
    before: dict[int, float]
    after: dict[int, float]
    place: dict[int, int]

    @staticmethod
    def of(model: Model, phase: Phase) -> _Around:
        waits = model.dependencies(phase)
        if not len(waits.leads):
            return _Around(0.0, {}, {}, {})
        taken = np.where(waits.runs, [model.nodes[number].seconds.min() for number in waits.order], 0.0)
        before, after = taken + taken @ waits.leads, taken + waits.leads @ taken
        known = dict(zip(waits.order, before, strict=True)), dict(zip(waits.order, after, strict=True))
        return _Around(float(taken.sum()), *known, {number: place for place, number in enumerate(waits.order)})

    def beside(self, edge: Edge) -> float | None:
        """Of what leads to a reshard, and of what follows it; None where nothing waits for it here."""
        if edge.target not in self.place:
            return None
        earlier = edge.source in self.place and self.place[edge.source] < self.place[edge.target]
        return (self.before[edge.source] if earlier else 0.0) + self.after[edge.target]
