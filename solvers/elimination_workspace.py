"""The working space of elimination sweeps, allocated once and used again by every sweep."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .arrays import VIEWS, Floats, Ints, offsets
from .kernels import views
from .kernels.constants import FACTORS, GONE, MEMBERS
from .pairwise import Pairs
from .settings import SETTINGS


class Workspace(NamedTuple):
    """Working space of one sweep."""

    pool: Floats  # tables of eliminated nodes
    best: NDArray[np.int16]  # the choice behind each entry of pool
    near_ptr: Ints  # [n + 1]
    near: Ints  # neighbours that are still active
    near_count: Ints  # [n]
    state: Ints  # [n]
    key: Floats  # [n] priority
    order: Ints  # [n]
    position: Ints  # [n]
    scope_ptr: Ints  # [n + 1] by position
    scope: Ints
    table_at: Ints  # [n] by node
    bucket: Ints  # [n] first factor of a node
    bucket_next: Ints  # [n]
    entries: Floats  # [n] looked at when the node is eliminated
    heap_key: Floats  # nodes by priority; more of them than can ever wait
    heap_node: Ints
    sums: Floats  # [MEMBERS + 2, most choices of a node]
    ints: Ints  # [3, MEMBERS] a scope's nodes, their sizes, and the choices that are looked at
    stride: Ints  # [FACTORS, MEMBERS]
    level: Ints  # [2, FACTORS] the last member that a factor depends on, and where it begins
    label: Ints  # [n] group of changed nodes
    queue: Ints  # [n] nodes by group
    starts: Ints  # [n + 1] where a group begins in queue


VIEWS[Workspace] = views.Workspace


def workspace(graph: Pairs, entries: int) -> Workspace:
    """Space for tables of ``entries`` entries in all, and the choices behind them."""
    nodes = len(graph.split)
    near_ptr = offsets(np.diff(graph.adj_ptr) + SETTINGS.spare_neighbours)
    scopes = int(near_ptr[-1])

    def ints(size: int) -> Ints:
        return np.empty(size, dtype=np.int64)

    return Workspace(
        pool=np.empty(entries),
        best=np.empty(entries, dtype=np.int16),
        near_ptr=near_ptr,
        near=ints(scopes),
        near_count=ints(nodes),
        state=ints(nodes),
        key=np.empty(nodes),
        order=ints(nodes),
        position=ints(nodes),
        scope_ptr=ints(nodes + 1),
        scope=ints(scopes),
        table_at=ints(nodes),
        bucket=ints(nodes),
        bucket_next=ints(nodes),
        entries=np.empty(nodes),
        heap_key=np.empty(2 * nodes + scopes),
        heap_node=ints(2 * nodes + scopes),
        sums=np.empty((MEMBERS + 2) * (len(graph.scratch) // 4)),
        ints=ints(3 * MEMBERS),
        stride=ints(FACTORS * MEMBERS),
        level=ints(2 * FACTORS),
        label=ints(nodes),
        queue=ints(nodes),
        starts=ints(nodes + 1),
    )


def entries_visited(graph: Pairs, count: int, work: Workspace) -> float:
    """Table entries that a sweep over the first ``count`` nodes of the order looks at."""
    scopes, sizes = np.diff(work.scope_ptr[: count + 1]), np.log2(np.diff(graph.ptr).astype(np.float64))
    eliminated = work.state == GONE
    members = work.scope[: work.scope_ptr[count]]
    owner = np.repeat(np.arange(count), scopes)
    logs = sizes[work.order[:count]] + np.bincount(owner, sizes[members] * eliminated[members], count)
    return float(np.exp2(logs).sum())
