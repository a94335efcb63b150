"""Exact elimination: one sweep over all nodes, where their tables fit.

It gives the best choices at no price of memory. Without binding memory they are the optimum. Graphs of models are chains with a few long
edges, so tables often fit where the linear relaxation leaves a gap: 12 equal layers of an MLP on 4x8 are proved in 1 CPU second.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .arrays import Floats, Ints
from .elimination_workspace import entries_visited, workspace
from .incumbent import Incumbent
from .kernels import plan_order, sweep
from .kernels.constants import FAR
from .pairwise import Pairs, forbidding, pairs, total_cost
from .reduction import Core
from .settings import SETTINGS


def solve_by_elimination(incumbent: Incumbent, core: Core) -> bool:
    """Offer the best choices at no price of memory, and prove their cost as a bound. False when tables or work do not suffice."""
    if core.infeasible or core.num_nodes == 0:
        return False
    graph, costs = pairs(core), forbidding(core.costs)
    choices = _eliminate(incumbent, graph, costs)
    value = FAR if choices is None else total_cost(graph, costs, choices)
    if choices is None or value >= FAR:
        return False
    incumbent.offer(core.expand(choices))
    incumbent.prove(core.constant + value - SETTINGS.safety * abs(value) * core.num_nodes)
    return True


def _eliminate(incumbent: Incumbent, graph: Pairs, costs: Floats) -> Ints | None:
    """The best choices; None when no order of elimination stays within the work allowed."""
    nodes = len(graph.split)
    nobody, choices = np.zeros(nodes, dtype=np.uint8), np.zeros(nodes, dtype=np.int64)
    space, most = workspace(graph, SETTINGS.table_entries), SETTINGS.exact_share * incumbent.work_left
    for jitter, points in _orders(nodes, incumbent.seed):
        count = plan_order(graph, nobody, jitter, points, SETTINGS.table_entries / 3, SETTINGS.table_entries, space)
        incumbent.spend(SETTINGS.node_work * nodes)
        if count == nodes:
            work = SETTINGS.entry_work * entries_visited(graph, count, space)
            if work > most:
                return None
            sweep(graph, costs, choices, count, space)
            incumbent.spend(work)
            return choices
    return None


def _orders(nodes: int, seed: int) -> Iterator[tuple[Floats, Floats]]:
    """Factors on the priorities of nodes, which give the order of elimination, and random numbers for held nodes."""
    random = np.random.default_rng(seed)
    yield np.ones(nodes), random.random(nodes)
    for _ in range(SETTINGS.exact_orders - 1):
        yield 1.0 + SETTINGS.jitter * random.random(nodes), random.random(nodes)
