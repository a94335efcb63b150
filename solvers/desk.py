"""The working space of elimination sweeps, allocated once and used again by every sweep of a thread."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from solvers.arrays import Floats, Ints, offsets
from solvers.pairs import Pairs

SPARE_NEIGHBOURS = 24
"""How many neighbours more than it begins with a node may get from eliminations before one is held instead."""


class Desk(NamedTuple):
    """Working space of one sweep, to be used by one thread at a time."""

    pool: Floats  # tables of eliminated nodes
    best: NDArray[np.int16]  # the choice behind each entry of pool
    near_ptr: Ints  # [n + 1]
    near: Ints  # neighbours that are still active
    near_count: Ints  # [n]
    state: Ints  # [n]
    key: Floats  # [n]
    order: Ints  # [n]
    position: Ints  # [n]
    scope_ptr: Ints  # [n + 1] by position
    scope: Ints
    table_at: Ints  # [n] by node
    bucket: Ints  # [n] first factor of a node
    bucket_next: Ints  # [n]


def desk(graph: Pairs, entries: int) -> Desk:
    """Space for tables of ``entries`` entries in all."""
    nodes = len(graph.split)
    near_ptr = offsets(np.diff(graph.adj_ptr) + SPARE_NEIGHBOURS)

    def empty(size: int) -> Ints:
        return np.empty(size, dtype=np.int64)

    return Desk(
        pool=np.empty(entries),
        best=np.empty(entries, dtype=np.int16),
        near_ptr=near_ptr,
        near=empty(int(near_ptr[-1])),
        near_count=empty(nodes),
        state=empty(nodes),
        key=np.empty(nodes),
        order=empty(nodes),
        position=empty(nodes),
        scope_ptr=empty(nodes + 1),
        scope=empty(int(near_ptr[-1])),
        table_at=empty(nodes),
        bucket=empty(nodes),
        bucket_next=empty(nodes),
    )
