"""The mixes of modes worth taking for the layers of a chunk: none is at most another in all its seconds and bytes.

A chunk with fewer seconds and bytes of every kind runs in the same orders, and no later: such a mix dominates.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass

from .problem import Mode, PipelineProblem
from .settings import SETTINGS


@dataclass(frozen=True)
class Mix:
    """Modes of a chunk's layers, and the seconds and bytes of the chunk in them."""

    cost: Mode
    modes: tuple[int, ...]


class Intervals:
    """The mixes of any interval of layers, fastest first, made when they are asked for.

    ``complete``: whether all that no other dominates were kept.
    """

    def __init__(self, problem: PipelineProblem) -> None:
        self.costs = problem.costs
        self.complete = True
        self._rows: dict[int, list[list[Mix]]] = {}

    def mixes(self, first: int, last: int) -> list[Mix]:
        """The mixes of layers ``first <= l < last``."""
        row = self._rows.setdefault(first, [[Mix(Mode(), ())]])
        while len(row) <= last - first:
            row.append(self._with_layer(row[-1], self.costs[first + len(row) - 1]))
        return row[last - first]

    def _with_layer(self, mixes: list[Mix], layer: tuple[Mode, ...]) -> list[Mix]:
        longer = [Mix(mix.cost + mode, (*mix.modes, number)) for mix in mixes for number, mode in enumerate(layer)]
        if len(longer) == 1:
            return longer
        longer.sort(key=lambda mix: (mix.cost.seconds, astuple(mix.cost)))
        kept: list[Mix] = []
        for mix in longer:
            if not any(_at_most(other.cost, mix.cost) for other in kept):
                kept.append(mix)
        if len(kept) <= SETTINGS.most_options:
            return kept
        self.complete = False
        return [kept[at * (len(kept) - 1) // (SETTINGS.most_options - 1)] for at in range(SETTINGS.most_options)]


def _at_most(one: Mode, other: Mode) -> bool:
    return (
        one.forward <= other.forward
        and one.backward <= other.backward
        and one.weights <= other.weights
        and one.held <= other.held
        and one.rest <= other.rest
    )
