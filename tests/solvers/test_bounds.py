"""Bounds hold whatever the messages and prices are; eliminations find the least cost; what bounds rule out is not the best answer."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from solvers import evaluate
from solvers.desk import desk
from solvers.elimination import sweep
from solvers.items import Items
from solvers.messages import certify, no_messages, pass_both, priced
from solvers.neighbourhood import seed_thread, total_cost
from solvers.pairs import pairs
from solvers.prices import Dual
from solvers.reduction import Core, unreduced
from solvers.shrinking import shrink, slacks
from tests.solvers.problems import brute_force, random_problem


def _cores(count, first=0):
    """Random problems with nothing reduced, as cores, with the best cost."""
    for seed in range(first, first + count):
        problem = random_problem(seed, most_nodes=5)
        core = unreduced(problem)
        if not core.infeasible:
            yield seed, problem, core, brute_force(problem)


def _floats(core: Core) -> np.ndarray:
    return np.where(core.costs >= 2**62, 1e25, core.costs.astype(np.float64))


def _priced(core: Core, prices: np.ndarray) -> np.ndarray:
    theta = np.empty(len(core.costs))
    usage = core.item_usage.astype(np.float64)
    priced(_floats(core), core.item_ptr, core.item_begin, core.item_end, usage, prices, theta)
    return theta


def test_any_messages_and_prices_prove_a_bound():
    checked = 0
    for seed, _, core, best in _cores(400):
        rng = np.random.default_rng(seed)
        graph = pairs(core)
        prices = rng.exponential(0.5, len(core.capacity)) * (rng.random(len(core.capacity)) < 0.5)
        theta, messages = _priced(core, prices), no_messages(graph)
        messages += rng.normal(0, 3, len(messages))
        guess = np.zeros(core.num_nodes, dtype=np.int64)
        for _ in range(3):
            bound = core.constant + certify(graph, theta, messages) - float(prices @ core.capacity)
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
        items = Items(core.item_ptr, core.item_begin, core.item_end, core.item_usage, core.capacity)
        dual = Dual(graph, items, _floats(core))
        dual.warm_up()
        dual.ascend(20, lambda: False)
        bound = core.constant + dual.bound
        assert bound <= best + 1e-6, seed
        closed += bound > best - 0.5
        theta = _priced(core, dual.best_prices)
        choice, pair = slacks(graph, theta, dual.best_messages)
        room = best + 1 - bound
        rest = shrink(core, graph, choice, pair, room + 1e-6)
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


def test_elimination_finds_the_least_cost_given_what_is_held():
    seed_thread(3)
    seen = 0
    for seed, _, core, _ in _cores(250):
        rng = np.random.default_rng(seed)
        graph, theta = pairs(core), _priced(core, np.zeros(len(core.capacity)))
        held = (rng.random(core.num_nodes) < 0.2).astype(np.uint8)
        choices = rng.integers(0, np.diff(core.node_ptr))
        least = _least(graph, theta, choices, held)
        sweep(graph, theta, choices, held, 1 + rng.random(core.num_nodes), 1e6, desk(graph, 10_000_000))
        assert total_cost(graph, theta, choices) == least, seed
        seen += 1
    assert seen > 40


def test_small_tables_never_make_it_worse():
    seed_thread(4)
    for seed, _, core, _ in _cores(250, first=1000):
        rng = np.random.default_rng(seed)
        graph, theta = pairs(core), _priced(core, np.zeros(len(core.capacity)))
        choices = rng.integers(0, np.diff(core.node_ptr))
        before = total_cost(graph, theta, choices)
        sweep(graph, theta, choices, np.zeros(core.num_nodes, dtype=np.uint8), np.ones(core.num_nodes), 12.0, desk(graph, 100_000))
        assert total_cost(graph, theta, choices) <= before, seed
