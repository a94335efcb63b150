# cython: infer_types=True, annotation_typing=False, boundscheck=False, wraparound=False, initializedcheck=False, cdivision=True
"""The arrays of a graph, of memory, of a sweep and of a presolve as kernels read them.

A view is made of a memoryview of each array, in the order of the NamedTuple that it stands for: see ``arrays.on_arrays``.
"""

from __future__ import annotations

from typing import Any


class Graph:
    """See ``pairwise.Pairs``."""

    def __init__(self, *arrays: Any) -> None:
        self.ptr, self.low, self.high, self.at, self.table, self.turned, *rest = arrays
        self.adj_ptr, self.adj, self.split, self.to_low, self.to_high, self.scratch = rest


class Items:
    """See ``memory.Items``."""

    def __init__(self, *arrays: Any) -> None:
        self.ptr, self.begin, self.end, self.usage, self.capacity, _ = arrays


class Workspace:
    """See ``elimination_workspace.Workspace``."""

    def __init__(self, *arrays: Any) -> None:
        self.pool, self.best, self.near_ptr, self.near, self.near_count, self.state, self.key, self.order, *rest = arrays
        self.position, self.scope_ptr, self.scope, self.table_at, self.bucket, self.bucket_next, self.entries, *rest = rest
        self.heap_key, self.heap_node, self.sums, self.ints, self.stride, self.level, self.label, self.queue, self.starts = rest


class Network:
    """See ``presolve_state.Network``."""

    def __init__(self, *arrays: Any) -> None:
        self.ptr, self.live, self.live_count, self.cost, self.present, self.heavy, *rest = arrays
        self.degree, self.head, self.following, self.eu, self.ev, self.at, self.edge_live, self.pool, *rest = rest
        self.edge_queue, self.edge_waits, self.node_queue, self.node_waits, self.touched, *rest = rest
        self.log, self.log_data, self.mark, self.scalars = rest


class Chain:
    """See ``pipeline.chain.Chain``."""

    def __init__(self, *arrays: Any) -> None:
        self.seconds, self.hop, self.held, self.room, self.place, self.sizes = arrays


class Clock:
    """See ``pipeline.chain.Clock``."""

    def __init__(self, *arrays: Any) -> None:
        self.ends, self.ready, self.usage, self.count, self.at, self.queue, self.waits = arrays


class OrderTree:
    """See ``pipeline.exact_orders.OrderTree``."""

    def __init__(self, *arrays: Any) -> None:
        self.ends, self.ready, self.usage, self.tails, self.heads, self.begins, self.saved, self.until, self.vectors, *rest = arrays
        self.best, self.count, self.flight, self.tight, self.blocked, self.open, self.width, self.lines, self.kept_back, *rest = rest
        self.by_tail, self.line_ptr, self.scalars, self.bucket, self.following, self.keys, self.orders = rest
