"""Bounds hold whatever the messages and prices are; eliminations find the least cost; what bounds rule out is not the best answer."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from autopar.solvers import dual_ascent, evaluate
from autopar.solvers.dual_ascent import MemoryDual, no_messages
from autopar.solvers.elimination_workspace import entries_visited, workspace
from autopar.solvers.kernels import certify, pass_both, plan_order, sweep
from autopar.solvers.pairwise import forbidding, pairs, total_cost
from autopar.solvers.reduced_cost_fixing import fix_by_reduced_cost, reduced_costs
from autopar.solvers.reduction import Core
from tests.solvers.problems import brute_force, random_problem, unreduced


def _cores(count, first=0):
    """Random problems with nothing reduced, as cores, with the best cost."""
    for seed in range(first, first + count):
        problem = random_problem(seed, most_nodes=5)
        core = unreduced(problem)
        if not core.infeasible:
            yield seed, problem, core, brute_force(problem)


def _priced(core: Core, prices: np.ndarray) -> np.ndarray:
    return dual_ascent.priced(forbidding(core.costs), core.items, prices)


def test_any_messages_and_prices_prove_a_bound():
    checked = 0
    for seed, _, core, best in _cores(400):
        rng = np.random.default_rng(seed)
        graph = pairs(core)
        prices = rng.exponential(0.5, len(core.items.capacity)) * (rng.random(len(core.items.capacity)) < 0.5)
        theta, messages = _priced(core, prices), no_messages(graph)
        messages += rng.normal(0, 3, len(messages))
        guess = np.zeros(core.num_nodes, dtype=np.int64)
        for _ in range(3):
            bound = core.constant + certify(graph, theta, messages) - float(prices @ core.items.capacity)
            if best is not None:
                assert bound <= best + 1e-6, seed
                checked += 1
            value = pass_both(graph, theta, messages, guess)
            assert best is None or value == pytest.approx(certify(graph, theta, messages), abs=1e-6), seed
    assert checked > 200


def test_the_ascent_never_passes_the_best_and_shrinking_keeps_better_answers():
    closed = kept = 0
    for seed, _, core, best in _cores(250):
        if best is None:
            continue
        graph = pairs(core)
        dual = MemoryDual(graph, core.items, forbidding(core.costs), lambda work: False)
        dual.warm_up()
        dual.ascend(20)
        bound = core.constant + dual.bound
        assert bound <= best + 1e-6, seed
        closed += bound > best - 0.5
        theta = _priced(core, dual.best_prices)
        choice, pair = reduced_costs(graph, theta, dual.best_messages)
        room = best + 1 - bound
        rest = fix_by_reduced_cost(core, graph, choice, pair, room + 1e-6)
        assert rest is not None, seed
        assert brute_force_of_rest(rest, core) == best, seed
        kept += len(rest.kept) < len(core.costs)
    assert closed > 50 and kept > 40


def brute_force_of_rest(rest, core):
    """The best cost among the remaining choices, by the rest's own problem."""
    best = None
    for choices in itertools.product(*[range(size) for size in rest.problem.sizes]):
        cost, _, feasible = evaluate(rest.problem, np.array(choices))
        if feasible and (best is None or cost < best):
            best = cost
    return None if best is None else best + core.constant


def _least(graph, theta, choices, held):
    """The least cost over the nodes that are not held."""
    sizes = np.diff(graph.ptr)
    ranges = [[choices[i]] if held[i] else range(sizes[i]) for i in range(len(sizes))]
    return min(total_cost(graph, theta, np.array(x, dtype=np.int64)) for x in itertools.product(*ranges))


def _sweep(graph, theta, choices, held, rng, largest):
    """One sweep, and the table entries that it says it looks at."""
    space = workspace(graph, 5_000_000)
    count = plan_order(graph, held, 1 + rng.random(len(held)), rng.random(len(held)), largest, 5_000_000, space)
    sweep(graph, theta, choices, count, space)
    return entries_visited(graph, count, space)


def test_elimination_finds_the_least_cost_given_what_is_held():
    seen = 0
    for seed, _, core, _ in _cores(250):
        rng = np.random.default_rng(seed)
        graph, theta = pairs(core), _priced(core, np.zeros(len(core.items.capacity)))
        held = (rng.random(core.num_nodes) < 0.2).astype(np.uint8)
        choices = rng.integers(0, np.diff(core.node_ptr))
        least = _least(graph, theta, choices, held)
        _sweep(graph, theta, choices, held, rng, 1e6)
        assert total_cost(graph, theta, choices) == least, seed
        seen += 1
    assert seen > 40


def test_small_tables_never_make_it_worse():
    for seed, _, core, _ in _cores(250, first=1000):
        rng = np.random.default_rng(seed)
        graph, theta = pairs(core), _priced(core, np.zeros(len(core.items.capacity)))
        choices = rng.integers(0, np.diff(core.node_ptr))
        before = total_cost(graph, theta, choices)
        visited = _sweep(graph, theta, choices, np.zeros(core.num_nodes, dtype=np.uint8), rng, 12.0)
        assert visited <= 12.0 * core.num_nodes * (1 + 1e-9) or np.diff(graph.ptr).max() > 12, seed
        assert total_cost(graph, theta, choices) <= before, seed
