"""The least memory a plan is known to need, for when nothing fits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from autopar.errors import InfeasibleError
from autopar.schedule import Limits, Memory
from autopar.search.extract import extract
from autopar.search.model import Model
from autopar.search.tuning import Timed, best_schedule
from solvers import INFINITE, Problem, solve

HALVINGS = 5
HALVING_SECONDS = 3.0
"""Tries, and seconds for each, of the search for the least memory that would do."""
LEAN_LIMITS = Limits(bucket_bytes=0, ahead_bytes=0)
"""What a schedule keeps to that is to need little memory."""


def smallest(model: Model, problem: Problem, limit: int, seed: int) -> Timed:
    """The plan of least peak memory found: first the least bytes times life, then lower and lower limits, halfway to ``limit``."""
    space = model.space

    def measure(choices: np.ndarray) -> Timed:
        return best_schedule(space.graph, extract(model, choices), space.machine, space.optimizer, limit, start=LEAN_LIMITS, tries=0)

    best = measure(_least_held(model, problem, seed))
    low = limit
    for _ in range(HALVINGS):
        if best.memory.peak <= limit:
            break
        middle = (low + best.memory.peak) // 2
        found = solve(replace(problem, limit=middle), time_limit=HALVING_SECONDS, gap=0.5, seed=seed).choices
        tried = None if found is None else measure(found)
        if tried is None or tried.memory.peak >= best.memory.peak:
            low = middle
        else:
            best = tried
    return best


def _least_held(model: Model, problem: Problem, seed: int) -> np.ndarray:
    """Choices of the least sum, over all memory items, of bytes times life."""
    weight = np.zeros(len(problem.costs))
    lives = (problem.item_end - problem.item_begin) * problem.item_usage.astype(np.float64)
    np.add.at(weight, np.repeat(np.arange(len(problem.costs)), np.diff(problem.item_ptr)), lives)
    scale = 2.0**50 / max(weight.max(), 1.0) / len(model.nodes)
    costs = [
        np.where(old >= INFINITE, INFINITE, np.rint(part * scale).astype(np.int64))
        for old, part in zip(np.split(problem.costs, problem.node_ptr[1:-1]), np.split(weight, problem.node_ptr[1:-1]), strict=True)
    ]
    edges = [(edge.source, edge.target, np.where(np.isfinite(edge.seconds), 0, INFINITE)) for edge in model.edges]
    found = solve(Problem.build(costs, edges, name="memory"), time_limit=HALVING_SECONDS, gap=1e-3, seed=seed).choices
    assert found is not None, "without a limit every graph has a plan"
    return found


def infeasible(least: Memory, limit: int, proved: bool) -> InfeasibleError:
    """Says the least memory that a plan is known to need, and what is biggest in it."""
    items = ", ".join(f"{name} {_readable(size)}" for name, size in least.biggest[:5])
    held = ("parameters", "gradients", "optimizer", "activations")
    parts = ", ".join(f"{name} {_readable(getattr(least, name))}" for name in held)
    return InfeasibleError(
        f"no plan {'fits' if proved else 'was found that fits'} in {_readable(limit)} a rank; the least known to do is "
        f"{_readable(least.peak)} ({parts}); biggest at its peak (at {least.at}): {items}",
        f"allow at least {least.peak} bytes (--memory), use a larger mesh, a smaller batch, or another optimizer",
    )


def _readable(size: int) -> str:
    """Bytes with a binary unit."""
    value, unit = float(size), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.3g} {unit}"
