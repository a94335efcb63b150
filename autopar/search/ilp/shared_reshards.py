"""Exact prices of reshards that several readers share, by lazy constraints.

Where three or more readers take one tensor, an edge for each is inexact. Either it counts equal reshards as often as they are read, which
is too much. Or it counts a share of each that holds for any plan, which is too little. Of n readers with a reshard each, at most n - 1
reshard to the same spec, else all would share a layout. So each pays at least 1 / (n - 1) of the price.

Here the problem begins with shares. A reshard for which a solution pays too little gets a node of its own: made or not made, at its whole
price, and its readers need it made. The problem is solved until no reshard is underpaid. That solution is optimal.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from autopar.search.ilp.model import InSequence, Model
from autopar.sharding import ShardingSpec
from autopar.solvers import INFINITE, Problem

FEW = 2
"""Readers up to which one edge for each is exact: one of them may read the shared layout itself."""


class SharedReshard(NamedTuple):
    """A reshard of one tensor to one spec that gets a node.

    Args:
        edges: numbers of the edges to the readers that may share it.
    """

    edges: tuple[int, ...]
    spec: ShardingSpec


class SharingProblem:
    """The problem with nodes for some shared reshards, numbered after those of the model.

    Args:
        model: without folded layers: the problem has one node and one edge for each of the model's.
        limit: bytes per rank.
    """

    def __init__(self, model: Model, limit: int) -> None:
        self.model = model
        self.priced, self.unit = model.problem(limit, InSequence())
        """Every reader pays the whole price."""
        self.costs = self.priced.edge_costs.copy()
        """Edge costs when every reader pays its share."""
        self.exact: list[SharedReshard] = []
        groups: dict[Hashable, list[int]] = defaultdict(list)
        for number, edge in enumerate(model.edges):
            if edge.tensor is not None and edge.readers > FEW:
                groups[edge.source, edge.phase, edge.share, edge.tensor.name].append(number)
                mine = self._table(self.costs, number)
                mine[:] = np.where(mine >= INFINITE, INFINITE, mine // (edge.readers - 1))
        self.groups = [tuple(numbers) for numbers in groups.values()]

    def _table(self, costs: np.ndarray, edge: int) -> np.ndarray:
        """An edge's costs, a view of shape [source's choices, target's choices]."""
        one, first, last = self.model.edges[edge], self.priced.edge_ptr[edge], self.priced.edge_ptr[edge + 1]
        shape = len(self.model.nodes[one.source].seconds), len(self.model.nodes[one.target].seconds)
        found: np.ndarray = costs[first:last].reshape(shape)
        return found

    def underpaid(self, choices: np.ndarray) -> list[SharedReshard]:
        """Reshards for which a solution pays less than their price."""
        return [reshard for group in self.groups for reshard in self._underpaid(group, choices)]

    def _underpaid(self, group: tuple[int, ...], choices: np.ndarray) -> Iterator[SharedReshard]:
        edges = self.model.edges
        paid: dict[ShardingSpec, int] = defaultdict(int)
        price: dict[ShardingSpec, int] = defaultdict(int)
        for number in group:
            source, target = int(choices[edges[number].source]), int(choices[edges[number].target])
            spec = edges[number].targets[target]
            paid[spec] += int(self._table(self.costs, number)[source, target])
            price[spec] = max(price[spec], int(self._table(self.priced.edge_costs, number)[source, target]))
        for spec in price:
            if paid[spec] < price[spec] and SharedReshard(group, spec) not in self.exact:
                yield SharedReshard(group, spec)

    def problem(self) -> Problem:
        """The problem with a node of two choices, not made and made, for each exact reshard."""
        if not self.exact:
            return replace(self.priced, edge_costs=self.costs)
        base, costs = self.priced, self.costs.copy()
        edges = list[tuple[int, int, np.ndarray]]()
        for node, (group, spec) in enumerate(self.exact, base.num_nodes):
            price = np.full(len(self.model.nodes[self.model.edges[group[0]].source].seconds), INFINITE, dtype=np.int64)
            for number in group:
                edge, mine, whole = self.model.edges[number], self._table(costs, number), self._table(base.edge_costs, number)
                wants = np.array([target == spec for target in edge.targets])
                if not wants.any():
                    continue
                price = np.minimum(price, whole[:, wants].min(axis=1))
                mine[:, wants] = np.where(mine[:, wants] >= INFINITE, INFINITE, 0)
                needs = np.stack([np.where(wants, INFINITE, 0), np.zeros(len(wants), dtype=np.int64)], axis=1)
                edges.append((edge.target, node, needs))
            edges.append((self.model.edges[group[0]].source, node, np.stack([np.zeros_like(price), price], axis=1)))
        return replace(base, edge_costs=costs).extended([[0, 0]] * len(self.exact), edges)

    def completed(self, choices: np.ndarray) -> np.ndarray:
        """The choices with those of the exact reshards: made where a reader needs it."""
        edges = self.model.edges
        made = [any(edges[number].targets[choices[edges[number].target]] == spec for number in group) for group, spec in self.exact]
        return np.append(choices, np.array(made, dtype=np.int64))
