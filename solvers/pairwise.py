"""The pairwise part of a core as arrays of floats, as message passing and eliminations read it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .arrays import VIEWS, Floats, Ints, offsets
from .kernels import orient_tables, views
from .kernels.constants import FAR, NEVER
from .reduction import Core


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
    scratch: Floats  # [4, most choices of a node]


VIEWS[Pairs] = views.Graph


def pairs(core: Core) -> Pairs:
    """Lay out the core's nodes and edges for message passing."""
    sizes = np.diff(core.node_ptr)
    u, v = core.edges[:, 0], core.edges[:, 1]
    low, high = np.minimum(u, v), np.maximum(u, v)
    table, turned = np.empty(core.num_entries), np.empty(core.num_entries)
    orient_tables(core.node_ptr, u.copy(), v.copy(), core.edge_ptr, core.edge_costs, table, turned)
    ends = np.concatenate([low, high])
    other = np.concatenate([high, low])
    incident = np.tile(np.arange(len(low)), 2)
    order = np.lexsort((incident, other, ends))
    adj_ptr = offsets(np.bincount(ends, minlength=len(sizes)).astype(np.int64))
    lengths = np.stack([sizes[low], sizes[high]], axis=1).reshape(-1)
    places = offsets(lengths)
    return Pairs(
        ptr=core.node_ptr,
        low=low,
        high=high,
        at=core.edge_ptr,
        table=table,
        turned=turned,
        adj_ptr=adj_ptr,
        adj=incident[order],
        split=adj_ptr[:-1] + np.bincount(high, minlength=len(sizes)),
        to_low=places[:-1:2].copy(),
        to_high=places[1:-1:2].copy(),
        scratch=np.empty(4 * int(sizes.max(initial=1))),
    )


def forbidding(costs: Ints) -> Floats:
    """Turn integer costs into floats."""
    return np.where(costs >= NEVER, FAR, costs.astype(np.float64))


def total_cost(graph: Pairs, costs: Floats, choices: Ints) -> float:
    """Sum what choices cost, without the price of memory."""
    entries = graph.at[:-1] + choices[graph.low] * np.diff(graph.ptr)[graph.high] + choices[graph.high]
    return float(costs[graph.ptr[:-1] + choices].sum() + graph.table[entries].sum())
