"""The judge: cost, peak and feasibility of choices, from the problem alone. It shares no code with any solver."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from .arrays import Ints
from .errors import ProblemError
from .problem import INFINITE, Problem


def evaluate(problem: Problem, choices: ArrayLike) -> tuple[int, int, bool]:
    """Cost, largest usage at any time, and whether the choices are feasible.

    ``choices`` holds one index a node, shape [N]. Feasible means: no forbidden cost is chosen and the usage respects the limit.
    Raises ProblemError for a wrong number of choices or an index out of range.
    """
    chosen = np.asarray(choices)
    sizes = problem.sizes
    if chosen.shape != sizes.shape or not np.issubdtype(chosen.dtype, np.integer):
        raise ProblemError(f"choices have shape {chosen.shape}, the problem has {len(sizes)} nodes", "give one integer a node")
    wrong = (chosen < 0) | (chosen >= sizes)
    if wrong.any():
        node = int(np.argmax(wrong))
        raise ProblemError(f"node {node} has {sizes[node]} choices, choice {chosen[node]} is none of them", "count choices from 0")
    flat = problem.node_ptr[:-1] + chosen
    u, v = problem.edges[:, 0], problem.edges[:, 1]
    paid = np.concatenate([problem.costs[flat], problem.edge_costs[problem.edge_ptr[:-1] + chosen[u] * sizes[v] + chosen[v]]])
    peak = _peak(problem, flat)
    feasible = not bool((paid >= INFINITE).any()) and (problem.limit is None or peak <= problem.limit)
    return _exact_sum(paid), peak, feasible


def _peak(problem: Problem, flat: Ints) -> int:
    first, last = problem.item_ptr[flat], problem.item_ptr[flat + 1]
    counts = last - first
    items = np.repeat(first - np.concatenate([[0], np.cumsum(counts)[:-1]]), counts) + np.arange(counts.sum())
    items = items[problem.item_end[items] > problem.item_begin[items]]
    if len(items) == 0:
        return 0
    times = np.concatenate([problem.item_begin[items], problem.item_end[items]])
    change = np.concatenate([problem.item_usage[items], -problem.item_usage[items]])
    order = np.argsort(times, kind="stable")
    times, level = times[order], np.cumsum(change[order])
    settled = np.append(times[1:] != times[:-1], True)
    return int(level[settled].max(initial=0))


def _exact_sum(values: Ints) -> int:
    """A sum that cannot overflow, also where forbidden costs are among the values."""
    return (int((values >> 31).sum()) << 31) + int((values & (2**31 - 1)).sum())
