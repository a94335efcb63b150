"""Scaling: seconds become the integer costs of a problem."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autopar.solvers import INFINITE, Problem

Item = tuple[int, int, int]
"""Begin, end, bytes."""


def scale_to_integers(
    costs: Sequence[np.ndarray], edges: Sequence[tuple[int, int, np.ndarray]], items: Sequence[list[list[Item]]] | None, limit: int | None
) -> tuple[Problem, float]:
    """The integer problem of costs in seconds, and its unit in seconds (``Model.problem``)."""
    tables = {id(table): table for _, _, table in edges}
    most = {key: largest(table) for key, table in tables.items()}
    unit = max(sum(map(largest, costs)) + sum(most[id(table)] for _, _, table in edges), 1e-30) / 2**52
    rounded = {key: integers(table, unit) for key, table in tables.items()}
    numbered = [(source, target, rounded[id(table)]) for source, target, table in edges]
    return Problem.build([integers(cost, unit) for cost in costs], numbered, items=items, limit=limit, name="plan"), unit


def largest(table: np.ndarray) -> float:
    """The largest finite entry; 0 without one."""
    finite = table[np.isfinite(table)]
    return float(finite.max()) if finite.size else 0.0


def largest_of_each(entries: np.ndarray, begins: np.ndarray) -> list[float]:
    """The largest finite entry of each table; 0 without one.

    Args:
        entries: of all tables, one after another.
        begins: of each table the place of its first entry.
    """
    if not len(begins):
        return []
    most = np.maximum.reduceat(np.where(np.isfinite(entries), entries, -np.inf), begins)
    found: list[float] = np.where(np.isfinite(most), most, 0.0).tolist()
    return found


def integers(table: np.ndarray, unit: float) -> np.ndarray:
    """The largest multiple of ``unit`` at or below each entry, as an integer; infinite entries stay so."""
    finite = np.isfinite(table)
    return np.where(finite, np.floor(np.where(finite, table, 0.0) / unit), INFINITE).astype(np.int64)
