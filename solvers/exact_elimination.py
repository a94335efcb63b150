"""Exact by elimination alone: when every node can be eliminated with tables that fit, one sweep gives the best choices for given
prices of memory, and with them the best bound those prices have. Without binding memory that is the optimum.

Graphs of models are chains with a few long edges, so that this often works where the linear relaxation leaves a gap.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from solvers import elimination_numpy
from solvers.arrays import Floats, Ints
from solvers.compiled import runs_compiled
from solvers.desk import desk
from solvers.elimination import plan_order, sweep
from solvers.neighbourhood import total_cost
from solvers.network import NEVER
from solvers.pairs import FAR, Pairs, pairs
from solvers.record import Record
from solvers.reduction import Core

LARGEST = 4e7
"""Entries looked at for one node."""
POOL = 12 * 10**7
"""Entries of all tables: 8 bytes each, and in compiled code 2 for the choice behind it."""
ORDERS, FIRST = 16, 2
"""Orders of elimination tried; and those after which no other is where they all leave more than ``FEW`` nodes: others leave a few more or
less."""
FEW = 10
PACE, SHARE = 5e7, 0.25
"""Entries looked at in a second, about, and the share of the time left that the sweep may take."""
SAFETY = 1e-12
"""Share of the costs summed by which a bound is lowered for the rounding of floats."""


def solve_by_elimination(record: Record, core: Core) -> bool:
    """Offer the best choices at no price of memory and prove their cost as a bound; False when tables or time do not suffice."""
    if core.infeasible or core.num_nodes == 0:
        return False
    graph = pairs(core)
    costs: Floats = np.where(core.costs >= NEVER, FAR, core.costs.astype(np.float64))
    most = min(PACE * SHARE * record.seconds_left, float(POOL) * 8)
    choices = (_eliminate if runs_compiled() else _eliminate_plain)(graph, costs, record.seed, most)
    value = FAR if choices is None else total_cost(graph, costs, choices)
    if choices is None or value >= FAR:
        return False
    record.offer(core.expand(choices))
    record.prove(core.constant + value - SAFETY * abs(value) * core.num_nodes)
    return True


def _eliminate(graph: Pairs, costs: Floats, seed: int, most: float) -> Ints | None:
    """The best choices; None when no order of a few looks at ``most`` entries or less."""
    nodes = len(graph.split)
    nobody, choices = np.zeros(nodes, dtype=np.uint8), np.zeros(nodes, dtype=np.int64)
    work = desk(graph, 0)._replace(pool=np.empty(POOL), best=np.empty(0, dtype=np.int16))
    least = nodes
    for turn, jitter in enumerate(_jitters(nodes, seed)):
        count = plan_order(graph, nobody, jitter, LARGEST, work)
        least = min(least, nodes - count)
        if count == nodes:
            scopes = np.split(work.scope[: work.scope_ptr[nodes]], work.scope_ptr[1:nodes])
            if _entries(graph, work.order, scopes).sum() > most:
                return None
            sweep(graph, costs, choices, nobody, jitter, LARGEST, work._replace(best=np.empty(POOL, dtype=np.int16)))
            return choices
        if turn + 1 == FIRST and least > FEW:
            break
    return None


def _eliminate_plain(graph: Pairs, costs: Floats, seed: int, most: float) -> Ints | None:
    nodes = len(graph.split)
    nobody, choices = np.zeros(nodes, dtype=np.uint8), np.zeros(nodes, dtype=np.int64)
    least = nodes
    for turn, jitter in enumerate(_jitters(nodes, seed)):
        order, scopes = elimination_numpy.plan(graph, nobody, jitter, LARGEST)
        least = min(least, nodes - len(order))
        if len(order) == nodes:
            entries = _entries(graph, order, scopes)
            if entries.sum() > most or (entries / np.diff(graph.ptr)[order]).sum() > POOL:
                return None
            elimination_numpy.eliminate(graph, costs, choices, order, scopes)
            return choices
        if turn + 1 == FIRST and least > FEW:
            break
    return None


def _jitters(nodes: int, seed: int) -> Iterator[Floats]:
    """Factors of the nodes' priorities, which decide the order of elimination."""
    random = np.random.default_rng(seed)
    yield np.ones(nodes)
    for _ in range(ORDERS - 1):
        yield 1.0 + 0.3 * random.random(nodes)


def _entries(graph: Pairs, order: Sequence[int] | Ints, scopes: Sequence[Sequence[int] | Ints]) -> Floats:
    """Entries looked at for each node."""
    sizes = np.diff(graph.ptr).astype(np.float64)
    return np.array([sizes[i] * np.prod(sizes[np.asarray(scope, dtype=np.int64)]) for i, scope in zip(order, scopes, strict=True)])
