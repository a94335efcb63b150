"""The cut that is planned next, against all cuts of chains whose stages take longer than in proportion where memory is short."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from random import Random

import pytest

from autopar.pipeline.clock import StageCosts, find_stage_needs
from autopar.pipeline.cutting import find_units
from autopar.pipeline.next_cut import StageEstimates, find_kinds
from tests.pipeline.models import capture

MICROBATCHES, TRANSFER = 8, 0.01


@dataclass
class Chain:
    """Equal layers behind an embedding and before a head, cut for ``stages`` ranks.

    A stage's layers beyond ``room``, shared by its microbatches in flight, take ``again`` of their forward once more.
    """

    layers: int
    head: float
    stages: int
    room: float
    again: float

    @property
    def units(self) -> tuple[str, ...]:
        return ("embedding", *(f"layers.{number}" for number in range(self.layers)), "head")

    @property
    def estimates(self) -> StageEstimates:
        kinds, seconds = (0, *[1] * self.layers, 2), [0.1, *[3.0] * self.layers, self.head]
        in_flight = [min(self.stages - stage, MICROBATCHES) for stage in range(self.stages)]
        return StageEstimates(self.units, kinds, seconds, in_flight, self.stages, MICROBATCHES)

    def costs(self, cut: Sequence[str]) -> list[StageCosts]:
        begins, found = [0, *map(self.units.index, cut), len(self.units)], []
        for stage, (begin, end) in enumerate(pairwise(begins)):
            layers = end - begin - (begin == 0) - (end == len(self.units))
            extra = self.head / 3 * (end == len(self.units)) + 0.03 * (begin == 0)
            beyond = max(layers - self.room / (self.stages - stage), 0.0)
            backward = 2 * (layers + extra) + self.again * beyond
            found.append(StageCosts(layers + extra, backward, backward, 0.0, 1, 1, backward))
        return found

    def step(self, cut: Sequence[str]) -> float:
        return max(need.least for need in find_stage_needs(self.costs(cut), MICROBATCHES, TRANSFER, self.stages))

    def least(self) -> float:
        return min(self.step(cut) for cut in combinations(self.units[1:], self.stages - 1))

    def search(self, cut: tuple[str, ...], rounds: int) -> float:
        """Seconds of the fastest cut of a number of rounds."""
        estimates, tried, best = self.estimates, set[tuple[str, ...]](), cut
        for _ in range(rounds):
            tried.add(cut)
            estimates.learn(cut, self.costs(cut), TRANSFER)
            best = min(best, cut, key=self.step)
            following = estimates.improve_cut(best, tried)
            if following is None:
                break
            assert following not in tried
            cut = following
        return self.step(best)


def random_chain(seed: int) -> Chain:
    chance = Random(seed)
    stages = chance.randrange(2, 5)
    return Chain(chance.randrange(2 * stages, 16), chance.uniform(0.5, 9.0), stages, chance.uniform(4.0, 20.0), chance.uniform(0.2, 2.0))


@pytest.mark.parametrize(("begin", "most", "mean"), [("even", 1.02, 1.001), ("last", 1.07, 1.002)])
def test_four_cuts_come_near_the_best_of_all(begin: str, most: float, mean: float) -> None:
    """Begun with equal numbers of units a stage, or with nearly all in the last stage."""
    ratios = []
    for seed in range(100):
        chain = random_chain(seed)
        count = len(chain.units)
        starts = [stage if begin == "last" else round(stage * count / chain.stages) for stage in range(1, chain.stages)]
        ratios.append(chain.search(tuple(chain.units[start] for start in starts), 4) / chain.least())
    assert min(ratios) >= 1.0 and max(ratios) <= most and sum(ratios) / len(ratios) <= mean


def test_nothing_follows_the_best_cut() -> None:
    chain = Chain(layers=6, head=3.0, stages=2, room=100.0, again=0.0)
    best = min(combinations(chain.units[1:], 1), key=chain.step)
    estimates = chain.estimates
    estimates.learn(best, chain.costs(best), TRANSFER)
    assert estimates.improve_cut(best, {best}) is None


def test_units_of_equal_operators_and_shapes_are_of_a_kind() -> None:
    graph = capture("llama", 1)[2]
    kinds = dict(zip(find_units(graph), find_kinds(graph), strict=True))
    layers = {kind for name, kind in kinds.items() if name.startswith("layers.")}
    others = [kind for name, kind in kinds.items() if not name.startswith("layers.")]
    assert len(layers) == 1 and len({*layers, *others}) == 1 + len(others) > 2
