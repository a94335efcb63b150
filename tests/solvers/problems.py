"""Random small problems and brute force, for every test of solvers."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import numpy as np
import pytest

from autopar.solvers import Problem, evaluate
from autopar.solvers.kernels.constants import NEVER
from autopar.solvers.memory import heavy_nodes, memory
from autopar.solvers.reduction import Core, compact, network

FORBIDDEN = 10**18


def random_problem(seed: int, most_nodes: int = 6, most_choices: int = 4) -> Problem:
    """Few nodes, and whatever is awkward: forbidden costs, parallel edges, isolated nodes, one choice, empty lives, no limit."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, most_choices + 1, rng.integers(1, most_nodes + 1)).tolist()
    costs = [_costs(rng, (size,), 0.1) for size in sizes]
    edges = []
    for _ in range(int(rng.integers(0, 2 * len(sizes) + 1)) if len(sizes) > 1 else 0):
        u, v = rng.choice(len(sizes), 2, replace=False).tolist()
        table = _costs(rng, (sizes[u], sizes[v]), float(rng.choice([0.0, 0.2, 0.5, 0.7])))
        kind = rng.random()
        if kind < 0.3:  # the second follows the first, as layouts do through a pointwise operator
            table = np.where(np.eye(sizes[u], sizes[v]) > 0, table, FORBIDDEN)
        elif kind < 0.45:
            table = np.zeros_like(table)
        edges.append((u, v, table))
    items = [[_items(rng) for _ in range(size)] for size in sizes] if rng.random() < 0.8 else None
    limit = int(rng.integers(-1, 40)) if rng.random() < 0.85 else None
    return Problem.build(costs, edges, items, limit, name=f"random-{seed}")


def _costs(rng: np.random.Generator, shape: tuple[int, ...], forbidden: float) -> np.ndarray:
    costs = rng.integers(0, 20, shape)
    costs[rng.random(shape) < forbidden] = FORBIDDEN
    return costs


def _items(rng: np.random.Generator) -> list[tuple[int, int, int]]:
    return [(int(begin), int(begin + rng.integers(0, 5)), int(rng.integers(0, 10))) for begin in rng.integers(0, 8, rng.integers(0, 3))]


def brute_force(problem: Problem) -> int | None:
    """The least cost of feasible choices, or None, by trying all."""
    best = None
    for choices in itertools.product(*[range(size) for size in problem.sizes]):
        cost, _, feasible = evaluate(problem, np.array(choices))
        if feasible and (best is None or cost < best):
            best = cost
    return best


def unreduced(problem: Problem) -> Core:
    """The problem itself as a core: parallel edges added together, forbidden choices gone, nothing else done."""
    items = memory(problem)
    return compact(network(problem, heavy_nodes(problem.node_ptr, items), NEVER), items)


def shared_folder() -> Path:
    """The folder of data beside the checkout; skips the test where there is none."""
    folder = Path(os.environ.get("AUTOPAR_SHARED", Path(__file__).resolve().parents[3] / "shared"))
    if not folder.is_dir():
        pytest.skip(f"{folder} is absent: set AUTOPAR_SHARED to the folder with iopddl/ and facts/")
    return folder
