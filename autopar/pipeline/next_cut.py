"""The cut to plan after others: its stages are estimated by those that were planned."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from autopar.graph import Graph
from autopar.pipeline.clock import StageCosts, find_stage_needs
from autopar.pipeline.cutting import find_units

LEAST_GAIN = 0.01
"""Share by which a cut must be expected to shorten the step, for its stages to be planned: each search takes about ten CPU seconds."""
_Span = tuple[int, int]
"""The first unit of a stage, and the one behind its last."""


@dataclass
class StageEstimates:
    """What each stage of a cut takes: as planned where a stage of the same kinds of units was.

    Another stage takes what the nearest planned one takes, in proportion to the seconds of their units.

    Args:
        units: the modules that a stage may begin with, in order, shape [u].
        kinds: a number of each unit, equal for those of equal operators and shapes, shape [u].
        seconds: of each unit in a plan of the whole, for one microbatch, shape [u].
        in_flight: microbatches that each stage is planned for, shape [n].
        positions: ranks along the axis of stages.
        microbatches: of a step.
        transfer: seconds of what crosses.
        planned: by microbatches in flight and kinds of units, the seconds of the units and the figures of their plan.
    """

    units: tuple[str, ...]
    kinds: tuple[int, ...]
    seconds: Sequence[float]
    in_flight: Sequence[int]
    positions: int
    microbatches: int
    transfer: float = 0.0
    planned: dict[int, dict[tuple[int, ...], tuple[float, StageCosts]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.until = list(accumulate(self.seconds, initial=0.0))

    def learn(self, cut: Sequence[str], costs: Sequence[StageCosts], transfer: float) -> None:
        """Adds the figures of a planned cut's stages, shape [n], and the seconds of what crosses."""
        self.transfer = transfer
        for (begin, end), count, cost in zip(self._spans(cut), self.in_flight, costs, strict=True):
            self.planned.setdefault(count, {})[self.kinds[begin:end]] = (self.until[end] - self.until[begin], cost)

    def improve_cut(self, cut: Sequence[str], tried: Set[tuple[str, ...]]) -> tuple[str, ...] | None:
        """The cut that descent from a planned one ends at; None where its step is not expected to be shorter by ``LEAST_GAIN``.

        A stage of the slowest rank gives a unit to another stage: the one for which the stages' needs are least, the largest first.

        Args:
            tried: cuts that are left out.
        """
        spans = self._spans(cut)
        needs = self._needs(spans)
        most = max(needs)
        while True:
            slowest = needs.index(max(needs)) % self.positions
            given = [other for source in range(slowest, len(spans), self.positions) for other in _give(spans, source)]
            found = [(self._needs(other), other) for other in given if self._names(other) not in tried]
            best = min(found, key=lambda pair: sorted(pair[0], reverse=True), default=(needs, spans))
            if sorted(best[0], reverse=True) >= sorted(needs, reverse=True):
                return self._names(spans) if max(needs) < (1 - LEAST_GAIN) * most else None
            needs, spans = best

    def _needs(self, spans: Sequence[_Span]) -> list[float]:
        """Seconds of a step that each stage needs at least, shape [n]."""
        costs = [self._cost(span, count) for span, count in zip(spans, self.in_flight, strict=True)]
        return [need.least for need in find_stage_needs(costs, self.microbatches, self.transfer, self.positions)]

    def _cost(self, span: _Span, in_flight: int) -> StageCosts:
        begin, end = span
        seconds, planned = self.until[end] - self.until[begin], self.planned[in_flight]
        if self.kinds[begin:end] in planned:
            return planned[self.kinds[begin:end]][1]
        near, cost = min(planned.values(), key=lambda one: abs(one[0] - seconds))
        return cost.scaled(seconds / near) if near else cost

    def _spans(self, cut: Sequence[str]) -> list[_Span]:
        return list(pairwise([0, *map(self.units.index, cut), len(self.units)]))

    def _names(self, spans: Sequence[_Span]) -> tuple[str, ...]:
        return tuple(self.units[begin] for begin, _ in spans[1:])


def _give(spans: Sequence[_Span], source: int) -> Iterator[list[_Span]]:
    """The cuts in which a stage has a unit less and another one more. Stages between the two move by one unit."""
    begins, end = [begin for begin, _ in spans], spans[-1][1]
    if spans[source][1] - spans[source][0] == 1:
        return
    for target in range(len(spans)):
        moved = range(source + 1, target + 1) if target > source else range(target + 1, source + 1)
        by = -1 if target > source else 1
        if target != source:
            yield list(pairwise([*(begin + by * (stage in moved) for stage, begin in enumerate(begins)), end]))


def find_kinds(graph: Graph) -> tuple[int, ...]:
    """A number for each unit of a graph, equal for those of equal operators and shapes in forward."""
    starts = [0, *list(find_units(graph).values())[1:], len(graph.ops)]
    kinds: dict[tuple[object, ...], int] = {}
    found = []
    for begin, end in pairwise(starts):
        ops = [op for op in graph.ops[begin:end] if op.phase == "forward"]
        rows = tuple((op.target, *(graph.tensors[name].shape for name in (*op.inputs, *op.outputs))) for op in ops)
        found.append(kinds.setdefault(rows, len(kinds)))
    return tuple(found)
