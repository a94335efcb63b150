"""Exact by elimination alone: when every node can be eliminated with tables that fit, one sweep gives the best choices for given
prices of memory, and with them the best bound those prices have. Without binding memory that is the optimum.

Graphs of models are chains with a few long edges, so that this often works where the linear relaxation leaves a gap.
"""

from __future__ import annotations

import numpy as np

from solvers.elimination import Desk, desk, plan_order, sweep
from solvers.neighbourhood import total_cost
from solvers.network import NEVER
from solvers.pairs import FAR, Floats, Pairs, pairs
from solvers.record import Record
from solvers.reduction import Core

LARGEST = 4e7
"""Entries looked at for one node."""
POOL = 12 * 10**7
"""Entries of all tables (8 bytes each, and 2 for the choice behind it)."""
ORDERS = 16
"""Orders of elimination tried."""
SAFETY = 1e-12
"""Share of the costs summed by which a bound is lowered for the rounding of floats."""


def solve_by_elimination(record: Record, core: Core) -> bool:
    """Offer the best choices at no price of memory and prove their cost as a bound; False when the tables do not fit."""
    if core.infeasible or core.num_nodes == 0:
        return False
    graph: Pairs = pairs(core)
    found = _order(graph, record.seed)
    if found is None:
        return False
    work, jitter = found
    costs: Floats = np.where(core.costs >= NEVER, FAR, core.costs.astype(np.float64))
    choices = np.zeros(core.num_nodes, dtype=np.int64)
    sweep(graph, costs, choices, np.zeros(core.num_nodes, dtype=np.uint8), jitter, LARGEST, work)
    value = total_cost(graph, costs, choices)
    if value >= FAR:
        return False
    record.offer(core.expand(choices))
    record.prove(core.constant + value - SAFETY * abs(value) * core.num_nodes)
    return True


def _order(graph: Pairs, seed: int) -> tuple[Desk, Floats] | None:
    """Working space and node priorities under which nobody is held; None when none of a few tries has them."""
    nodes = len(graph.split)
    work = desk(graph, 0)._replace(pool=np.empty(POOL), best=np.empty(0, dtype=np.int16))
    random = np.random.default_rng(seed)
    held = np.zeros(nodes, dtype=np.uint8)
    for attempt in range(ORDERS):
        jitter = np.ones(nodes) if attempt == 0 else 1.0 + 0.3 * random.random(nodes)
        if plan_order(graph, held, jitter, LARGEST, work) == nodes:
            return work._replace(best=np.empty(POOL, dtype=np.int16)), jitter
    return None
