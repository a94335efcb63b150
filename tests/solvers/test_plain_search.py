"""The search in NumPy, for machines without compiled code, does what the kernels do."""

from __future__ import annotations

import numpy as np
import pytest

from solvers import elimination_numpy, messages, messages_numpy, neighbourhood, neighbourhood_numpy, prices
from solvers.desk import desk
from solvers.elimination import sweep
from solvers.items import Items
from solvers.layered import layered
from solvers.pairs import FAR, pairs
from solvers.reduction import unreduced
from tests.solvers.problems import random_problem


def _cases():
    """(seed, core, pairs, items, costs in floats), small and awkward or larger and layered."""
    problems = [random_problem(seed, most_nodes=8) for seed in range(400)] + [layered(2, 6, 8, seed=seed) for seed in range(3)]
    for seed, problem in enumerate(problems):
        core = unreduced(problem)
        if not core.infeasible:
            items = Items(core.item_ptr, core.item_begin, core.item_end, core.item_usage, core.capacity)
            yield seed, core, pairs(core), items, np.where(core.costs >= 2**62, FAR, core.costs.astype(np.float64))


def _same(one, other):
    near = np.minimum(np.abs(one), np.abs(other)) < FAR / 2
    assert np.allclose(one[near], other[near], rtol=1e-9, atol=1e-6)
    assert (np.abs(one[~near]) >= FAR / 2).all() and (np.abs(other[~near]) >= FAR / 2).all()


def test_passes_send_the_same_messages():
    for seed, core, graph, items, costs in _cases():
        random = np.random.default_rng(seed)
        theta, usage = [np.empty(len(costs)) for _ in range(2)], items.usage.astype(np.float64)
        price = random.exponential(0.3, len(core.capacity))
        for module, out in zip((messages, messages_numpy), theta, strict=True):
            module.priced(costs, items.ptr, items.begin, items.end, usage, price, out)
        assert np.allclose(*theta)
        sent = [messages.no_messages(graph) for _ in range(2)]
        before = [random.normal(0, 1, len(sent[0]))] * 2
        choices = [np.zeros(core.num_nodes, dtype=np.int64) for _ in range(2)]
        used = [np.empty(len(price)) for _ in range(2)]
        for share in (0.0, 0.5, 0.9):
            before = [part.copy() for part in before]
            prices.carry_on(sent[0], before[0], share)
            prices._carry_on(sent[1], before[1], share)
            bounds = []
            for module, out, guess in zip((messages, messages_numpy), sent, choices, strict=True):
                bounds.append(module.pass_both(graph, theta[0], out, guess))
            _same(*sent)
            _same(*before)
            assert bounds[0] == pytest.approx(bounds[1], rel=1e-9, abs=1e-6), seed
            _same(*(np.array([module.certify(graph, theta[0], sent[0])]) for module in (messages, messages_numpy)))
            same = neighbourhood.total_cost(graph, theta[0], choices[0]), neighbourhood.total_cost(graph, theta[0], choices[1])
            assert same[0] == pytest.approx(same[1], rel=1e-9, abs=1e-6)  # they may break ties differently
            prices.soft_use(graph, theta[0], sent[0], 3.0, items, usage, used[0])
            prices._soft_use(graph, theta[0], sent[0], 3.0, items, usage, used[1])
            assert np.allclose(*used)


def test_the_same_groups_of_changes_are_taken():
    taken = 0
    for seed, core, graph, items, costs in _cases():
        # The search's choices are allowed ones; differences of forbidden costs would depend on the order of summing.
        costs = np.minimum(costs, 50.0)
        graph = graph._replace(table=np.minimum(graph.table, 50.0), turned=np.minimum(graph.turned, 50.0))
        random = np.random.default_rng(seed)
        sizes = np.diff(core.node_ptr)
        price = random.exponential(0.3, len(core.capacity))
        choices = random.integers(0, sizes)
        proposal = np.where(random.random(len(sizes)) < 0.5, random.integers(0, sizes), choices)
        theta = costs + random.normal(0, 1, len(costs))
        results = []
        for module in (neighbourhood, neighbourhood_numpy):
            mine, pay, used, stops = choices.copy(), price.copy(), *np.zeros((2, len(price)), dtype=np.int64)
            module.count_use(graph, items, mine, used)
            cost = module.total_cost(graph, costs, mine)
            change = module.accept(graph, items, theta, costs, mine, proposal, used, stops)
            module.drift(items, pay, used, stops)
            results.append((mine, used, stops, pay, np.array([cost, change])))
        for one, other in zip(*results, strict=True):
            _same(one.astype(np.float64), other.astype(np.float64))
        taken += int((results[0][0] != choices).any())
    assert taken > 40


def test_a_sweep_that_holds_nothing_finds_the_least_cost_and_one_that_must_never_does_worse():
    for seed, core, graph, _, costs in _cases():
        nobody, jitter = np.zeros(core.num_nodes, dtype=np.uint8), np.ones(core.num_nodes)
        expected, found = np.zeros(core.num_nodes, dtype=np.int64), np.zeros(core.num_nodes, dtype=np.int64)
        if core.num_nodes < 15:
            sweep(graph, costs, expected, nobody, jitter, 1e6, desk(graph, 4_000_000))
            elimination_numpy.sweep(graph, costs, found, nobody, jitter, 1e6, desk(graph, 0))
            assert neighbourhood.total_cost(graph, costs, found) == neighbourhood.total_cost(graph, costs, expected), seed
        random = np.random.default_rng(seed)
        held = (random.random(core.num_nodes) < 0.2).astype(np.uint8)
        start = random.integers(0, np.diff(core.node_ptr))
        found = start.copy()
        elimination_numpy.sweep(graph, costs, found, held, 1 + random.random(core.num_nodes), 30.0, desk(graph, 0))
        assert (found[held == 1] == start[held == 1]).all()
        assert neighbourhood.total_cost(graph, costs, found) <= neighbourhood.total_cost(graph, costs, start) * (1 + 1e-12)


def test_waves_are_forgotten_with_their_graph():
    _, _, graph, _, _ = next(_cases())
    before = len(messages_numpy._known)
    messages_numpy.waves(graph, True)
    assert messages_numpy.waves(graph, True) is messages_numpy.waves(graph, True)
    assert len(messages_numpy._known) == before + 1
    del graph
    assert len(messages_numpy._known) == before
