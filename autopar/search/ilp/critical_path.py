"""Critical path: the longest chain of dependencies in a phase, which runs in sequence in every plan and every order.

Between two of its places a chain takes as long as its own edges and operators. It also takes as long as all operators between them, on any
branch, since there is one compute stream. So a chain may have a *span* in place of a part of its own: queries, keys and values run one
after another though none depends on another. Likewise all that leads to its first place comes before, and all that follows its last comes
after.

Only places in one repeat of equal layers, or outside of all, have spans here: the operators between them are the same in every repeat.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from autopar.search.settings import SPAN_NODES

if TYPE_CHECKING:
    from autopar.graph import Phase
    from autopar.search.ilp.model import Model


@dataclass(frozen=True)
class Path:
    """A chain of data dependencies.

    Args:
        nodes: numbers of the operators' nodes on it and in its spans.
        edges: numbers of the model's edges on it.
    """

    nodes: tuple[int, ...]
    edges: tuple[int, ...]


class Step(NamedTuple):
    """How a chain comes to a place: by an edge, by a span from ``source`` (without an edge), or as its first place (without either)."""

    edge: int | None
    source: int | None


class Dependencies:
    """Dependencies between the nodes of a phase that hold for all choices."""

    def __init__(self, model: Model, phase: Phase) -> None:
        self.order = model.nodes_in_order(phase)
        place = {number: here for here, number in enumerate(self.order)}
        self.is_op = np.array([model.nodes[number].kind == "op" for number in self.order], dtype=bool)
        self.incoming: list[list[tuple[int, int | None]]] = []
        """Edges that lead to each place, with the place of their source; None where the source exists when the phase begins."""
        for here, number in enumerate(self.order):
            indices = [index for index in model.incoming[number] if model.edges[index].phase == phase]
            sources = [place.get(model.edges[index].source, here) for index in indices]
            self.incoming.append([(index, source if source < here else None) for index, source in zip(indices, sources, strict=True)])
        homes = [model.repeat_of_node[number] for number in self.order]
        self.counted_once = model.node_counts[self.order] == 1.0 if self.order else np.zeros(0, dtype=bool)
        """Places that count once in the planned graph. These alone may have a span from the phase's begin, or to its end."""
        self._find_reachable(homes)

    def _find_reachable(self, homes: Sequence[int | None]) -> None:
        """Finds ``reaches[i, j]``: place j depends on place i, through operators of their repeat alone.

        A span from a place with one follower is no longer than the way over the follower; likewise to a place that follows one alone. So
        spans go from ``forks`` to ``joins``.
        """
        count = len(self.order) if len(self.order) <= SPAN_NODES else 0
        self.reaches = np.zeros((count, count), dtype=bool)
        followers, follows = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
        for here in range(count):
            for source in {source for _, source in self.incoming[here] if source is not None and homes[source] == homes[here]}:
                self.reaches[:, here] |= self.reaches[:, source]
                self.reaches[source, here] = True
                followers[source] += 1
                follows[here] += 1
        self.forks, self.joins = np.flatnonzero(followers > 1), np.flatnonzero(follows > 1)
        self.column = {int(join): column for column, join in enumerate(self.joins)}

    def longest_path(self, seconds: np.ndarray, edges: np.ndarray, spans: bool = True) -> Path:
        """The chain that takes longest.

        Args:
            seconds, edges: seconds of each node and edge of the model, as often as a chain passes it.
            spans: whether the chain may have spans.
        """
        count = len(self.order)
        if not count:
            return Path((), ())
        taken = np.where(self.is_op, seconds[self.order], 0.0)
        before, after, along = np.zeros(count), np.zeros(count), np.zeros((0, 0))
        if spans and len(self.reaches):
            before, after = np.where(self.counted_once, taken @ self.reaches, 0.0), np.where(self.counted_once, self.reaches @ taken, 0.0)
            along = (self.reaches[self.forks] * taken) @ self.reaches[:, self.joins].astype(float)
            along = np.where(self.reaches[np.ix_(self.forks, self.joins)], along, -np.inf)
        ends, via = np.zeros(count), list[Step]()
        for here in range(count):
            best, how = before[here], Step(None, None)
            for index, source in self.incoming[here]:
                reached = edges[index] + (ends[source] if source is not None else 0.0)
                if reached > best:
                    best, how = reached, Step(index, source)
            if along.size and here in self.column:
                by_span = ends[self.forks] + along[:, self.column[here]]
                fork = int(np.argmax(by_span))
                if by_span[fork] > best:
                    best, how = by_span[fork], Step(None, int(self.forks[fork]))
            ends[here] = best + taken[here]
            via.append(how)
        return self._trace_back(int(np.argmax(ends + after)), after, before, via)

    def _trace_back(self, last: int, after: np.ndarray, before: np.ndarray, via: Sequence[Step]) -> Path:
        nodes, edges = set[int](), list[int]()
        if after[last]:
            nodes.update(np.flatnonzero(self.reaches[last]))
        here: int | None = last
        while here is not None:
            nodes.add(here)
            index, source = via[here].edge, via[here].source
            if index is not None:
                edges.append(index)
            elif source is not None:
                nodes.update(np.flatnonzero(self.reaches[source] & self.reaches[:, here]))
            elif before[here]:
                nodes.update(np.flatnonzero(self.reaches[:, here]))
            here = source
        return Path(tuple(sorted(self.order[place] for place in nodes if self.is_op[place])), tuple(edges))
