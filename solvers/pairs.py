"""The pairwise part of a core as arrays of floats, as message passing and eliminations read it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from solvers.arrays import Floats, Ints, offsets
from solvers.compiled import kernel_or
from solvers.network import NEVER
from solvers.reduction import Core

FAR = 1e25
"""A forbidden cost among floats: far above every sum of costs, and small enough that adding costs to it stays exact in effect."""


class Pairs(NamedTuple):
    """The pairwise part of a core in floats. Edges have ``low < high``; ``table`` is laid out (low, high), ``turned`` (high, low)."""

    ptr: Ints  # [n + 1] choices of each node
    low: Ints  # [E]
    high: Ints  # [E]
    at: Ints  # [E + 1] tables
    table: Floats
    turned: Floats
    adj_ptr: Ints  # [n + 1] edges of each node, those to lower nodes first
    adj: Ints  # [2 E]
    split: Ints  # [n] where in adj the edges to higher nodes begin
    to_low: Ints  # [E] where the message to the lower node begins
    to_high: Ints  # [E]


def pairs(core: Core) -> Pairs:
    """The core's nodes and edges for message passing."""
    sizes = np.diff(core.node_ptr)
    u, v = core.edges[:, 0], core.edges[:, 1]
    low, high = np.minimum(u, v), np.maximum(u, v)
    costs = np.where(core.edge_costs >= NEVER, FAR, core.edge_costs.astype(np.float64))
    straight, turned = np.empty_like(costs), np.empty_like(costs)
    lay_out(costs, core.edge_ptr, sizes[u], sizes[v], u < v, straight, turned)
    ends = np.concatenate([low, high])
    other = np.concatenate([high, low])
    edge = np.tile(np.arange(len(low)), 2)
    order = np.lexsort((edge, other, ends))
    adj_ptr = offsets(np.bincount(ends, minlength=len(sizes)).astype(np.int64))
    split = adj_ptr[:-1] + np.bincount(high, minlength=len(sizes))
    lengths = np.stack([sizes[low], sizes[high]], axis=1).reshape(-1)
    places = offsets(lengths)
    return Pairs(
        core.node_ptr, low, high, core.edge_ptr, straight, turned, adj_ptr, edge[order], split, places[:-1:2].copy(), places[1:-1:2].copy()
    )


def _lay_out(costs: Floats, at: Ints, rows: Ints, columns: Ints, keep: NDArray[np.bool_], straight: Floats, turned: Floats) -> None:
    for e in range(len(rows)):
        place = slice(at[e], at[e + 1])
        table = costs[place].reshape(rows[e], columns[e])
        (straight if keep[e] else turned)[place] = costs[place]
        (turned if keep[e] else straight)[place] = table.T.reshape(-1)


@kernel_or(_lay_out)
def lay_out(costs: Floats, at: Ints, rows: Ints, columns: Ints, keep: NDArray[np.bool_], straight: Floats, turned: Floats) -> None:
    """Each table as (low, high) and as (high, low)."""
    for e in range(len(rows)):
        for k in range(rows[e]):
            for m in range(columns[e]):
                cost = costs[at[e] + k * columns[e] + m]
                other = at[e] + m * rows[e] + k
                if keep[e]:
                    straight[at[e] + k * columns[e] + m] = cost
                    turned[other] = cost
                else:
                    straight[other] = cost
                    turned[at[e] + k * columns[e] + m] = cost
