"""Exact reduction of a problem to its core, and the way back.

The steps are in ``kernels.presolve``, ``kernels.dominance`` and ``memory``; this page is their order. A core's best answer, undone, is a
best answer of the problem; answers that cost ``upper`` or more may be lost on the way, which is how a known answer sharpens the reduction.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .arrays import Bytes, Ints, offsets
from .kernels import compact_tables, dominate, link, run_queues, wake
from .kernels.constants import CONSTANT, INFEASIBLE, LOG, NEVER, POOL, SCALARS, UPPER, VISITED
from .memory import Items, drop_too_large, heavy_nodes, memory, rebuild
from .presolve_state import Network, grown, undo
from .problem import INFINITE, Problem
from .settings import SETTINGS


@dataclass(frozen=True, eq=False)
class Core:
    """What reduction leaves: the arrays of a Problem, items with room by time, and a constant cost.

    ``work`` is what the reduction took. Costs of ``NEVER`` (2^62) are forbidden. ``expand`` turns choices of the core, shape [n], into
    choices of the problem; ``restrict`` goes back, with -1 where a choice is gone.
    """

    node_ptr: Ints
    costs: Ints
    edges: Ints
    edge_ptr: Ints
    edge_costs: Ints
    items: Items
    constant: int
    infeasible: bool
    work: float
    expand: Callable[[Ints], Ints]
    restrict: Callable[[Ints], Ints]

    @property
    def num_nodes(self) -> int:
        return len(self.node_ptr) - 1

    @property
    def num_entries(self) -> int:
        return len(self.edge_costs)


def reduce(problem: Problem, upper: int = NEVER) -> Core:
    """The core of the problem, for answers that cost less than ``upper``."""
    items = memory(problem)
    net = network(problem, heavy_nodes(problem.node_ptr, items), upper)
    logged, removed = 0, True
    for turn in range(SETTINGS.presolve_rounds):
        net = propagate(net)
        if net.scalars[INFEASIBLE]:
            break
        if len(items.capacity) > 0:
            items, logged, before = rebuild(net, items, logged), int(net.scalars[LOG]), net.heavy.copy()
            net.heavy[:] = heavy_nodes(net.ptr, items)
            wake(net, np.flatnonzero((net.heavy == 0) & (before > 0)), 0)
        dropped = "oversized" not in SETTINGS.skip and drop_too_large(net, items)
        if net.scalars[INFEASIBLE] or turn == SETTINGS.presolve_rounds - 1 or not (removed or dropped):
            break
        removed = "dominance" not in SETTINGS.skip and remove_dominated(net, items)
    return compact(net, items)


def propagate(net: Network) -> Network:
    """Run all steps of ``kernels.presolve`` to their fixed point; the network may come back with larger arrays."""
    while run_queues(net, SETTINGS.largest_presolve_table):
        net = grown(net)
    return net


def remove_dominated(net: Network, items: Items) -> bool:
    """Remove dominated choices; True where any went. A node is looked at again when something has changed at it, or in memory."""
    nodes = np.flatnonzero((net.present > 0) & (net.live_count > 1) & ((net.touched > 0) | (net.heavy > 0)))
    lost = np.zeros(len(nodes), dtype=np.uint8)
    net.touched[:] = 0
    dominate(net, items, nodes, lost)
    wake(net, nodes[lost > 0], 1)
    return bool(lost.any())


def network(problem: Problem, heavy: Bytes, upper: int) -> Network:
    """The problem as a Network in which everything waits to be looked at; answers that cost ``upper`` or more may be lost."""
    nodes, edges, sizes = problem.num_nodes, len(problem.edges), problem.sizes
    scalars = np.zeros(SCALARS, dtype=np.int64)
    scalars[POOL], scalars[UPPER] = len(problem.edge_costs), upper
    pool = np.zeros(2 * len(problem.edge_costs), dtype=np.int64)  # eliminations seldom fill the second half
    tables = pool[: len(problem.edge_costs)]
    tables[:] = problem.edge_costs
    tables[problem.edge_costs >= INFINITE] = NEVER
    result = Network(
        ptr=problem.node_ptr,
        live=np.arange(len(problem.costs), dtype=np.int64) - np.repeat(problem.node_ptr[:-1], sizes),
        live_count=sizes.astype(np.int64),
        cost=np.where(problem.costs >= INFINITE, NEVER, problem.costs),
        present=np.ones(nodes, dtype=np.uint8),
        heavy=heavy.astype(np.uint8),
        degree=np.zeros(nodes, dtype=np.int64),
        head=np.full(nodes, -1, dtype=np.int64),
        following=np.full(2 * edges, -1, dtype=np.int64),
        eu=problem.edges[:, 0].copy(),
        ev=problem.edges[:, 1].copy(),
        at=problem.edge_ptr[:-1].copy(),
        edge_live=np.ones(edges, dtype=np.uint8),
        pool=pool,
        edge_queue=np.zeros(edges + 1, dtype=np.int64),
        edge_waits=np.zeros(edges, dtype=np.uint8),
        node_queue=np.zeros(nodes + 1, dtype=np.int64),
        node_waits=np.zeros(nodes, dtype=np.uint8),
        touched=np.ones(nodes, dtype=np.uint8),
        log=np.zeros((nodes, 5), dtype=np.int64),
        log_data=np.zeros(len(problem.edge_costs) + len(problem.costs), dtype=np.int64),
        mark=np.full(nodes, -1, dtype=np.int64),
        scalars=scalars,
    )
    link(result)
    return result


def compact(net: Network, items: Items) -> Core:
    """What is present, numbered anew."""
    infeasible = bool(net.scalars[INFEASIBLE])
    nodes = np.zeros(0, dtype=np.int64) if infeasible else np.flatnonzero(net.present)
    edges = np.zeros(0, dtype=np.int64) if infeasible else np.flatnonzero(net.edge_live)
    number = np.full(len(net.present), -1, dtype=np.int64)
    number[nodes] = np.arange(len(nodes))
    node_ptr = offsets(net.live_count[nodes])
    places = np.repeat(net.ptr[nodes] - node_ptr[:-1], net.live_count[nodes]) + np.arange(node_ptr[-1])
    original = net.live[places]
    flat = np.repeat(net.ptr[nodes], net.live_count[nodes]) + original
    u, v = net.eu[edges], net.ev[edges]
    edge_ptr = offsets(net.live_count[u] * net.live_count[v])
    edge_costs = np.empty(edge_ptr[-1], dtype=np.int64)
    compact_tables(net, edges, edge_costs)
    _, item = items.of(flat)

    def expand(choices: Ints) -> Ints:
        full = np.zeros(len(net.present), dtype=np.int64)
        full[nodes] = original[node_ptr[:-1] + choices]
        return undo(net, full)

    def restrict(choices: Ints) -> Ints:
        match = original == np.repeat(choices[nodes], np.diff(node_ptr))
        found = np.full(len(nodes), -1, dtype=np.int64)
        owner = np.repeat(np.arange(len(nodes)), np.diff(node_ptr))
        found[owner[match]] = np.flatnonzero(match) - node_ptr[owner[match]]
        return found

    return Core(
        node_ptr=node_ptr,
        costs=net.cost[flat],
        edges=np.stack([number[u], number[v]], axis=1),
        edge_ptr=edge_ptr,
        edge_costs=edge_costs,
        items=items._replace(ptr=offsets(np.diff(items.ptr)[flat]), begin=items.begin[item], end=items.end[item], usage=items.usage[item]),
        constant=int(net.scalars[CONSTANT]),
        infeasible=infeasible,
        work=SETTINGS.entry_work * int(net.scalars[VISITED]),
        expand=expand,
        restrict=restrict,
    )
