"""Scaling: seconds become the integer costs of a problem."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from autopar.solvers import INFINITE
from autopar.solvers.arrays import offsets

Item = tuple[int, int, int]
"""Begin, end, bytes."""


def scale_to_integers(nodes: Sequence[np.ndarray], edges: Sequence[np.ndarray]) -> tuple[list[np.ndarray], list[np.ndarray], float]:
    """Integer costs of nodes, flat tables of edges, and their unit in seconds.

    Costs are rounded down to multiples of the unit, which lowers the bound. It keeps the sum of the largest finite entries under 2**52.

    Args:
        nodes: seconds of each node's choices.
        edges: seconds of each edge; equal tables are one object.
    """
    tables = {id(table): table.reshape(-1) for table in edges}
    costs, entries = np.concatenate(nodes), np.concatenate([np.zeros(0), *tables.values()])
    node_ptr, edge_ptr = offsets([len(cost) for cost in nodes]), offsets([len(table) for table in tables.values()])
    most = dict(zip(tables, _largest_of_each(entries, edge_ptr), strict=True))
    unit = max(sum(_largest_of_each(costs, node_ptr)) + sum(most[id(table)] for table in edges), 1e-30) / 2**52
    rounded = dict(zip(tables, _split(_integers(entries, unit), edge_ptr), strict=True))
    return _split(_integers(costs, unit), node_ptr), [rounded[id(table)] for table in edges], unit


def _largest_of_each(entries: np.ndarray, ptr: np.ndarray) -> list[float]:
    """The largest finite entry of each part, whose entries are ``ptr[i]:ptr[i + 1]``; 0 without one."""
    if len(ptr) == 1:
        return []
    most = np.maximum.reduceat(np.where(np.isfinite(entries), entries, -np.inf), ptr[:-1])
    found: list[float] = np.where(np.isfinite(most), most, 0.0).tolist()
    return found


def _split(entries: np.ndarray, ptr: np.ndarray) -> list[np.ndarray]:
    return [entries[begin:end] for begin, end in pairwise(ptr.tolist())]


def _integers(table: np.ndarray, unit: float) -> np.ndarray:
    """The largest multiple of ``unit`` at or below each entry, as an integer; infinite entries stay so."""
    finite = np.isfinite(table)
    return np.where(finite, np.floor(np.where(finite, table, 0.0) / unit), INFINITE).astype(np.int64)
