"""Each step of the reduction, and all of them, against brute force: the best answer survives and undoing finds it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from autopar.solvers import Problem, evaluate
from autopar.solvers.kernels.constants import CONSTANT, INFEASIBLE, LOG, NEVER
from autopar.solvers.memory import Items, drop_too_large, heavy_nodes, memory, rebuild
from autopar.solvers.presolve_state import Network, undo
from autopar.solvers.reduction import Core, network, propagate, reduce, remove_dominated
from tests.solvers.problems import brute_force, random_problem


def _best(net: Network, problem: Problem) -> int | None:
    """The least feasible cost over what the network leaves, each answer undone and judged, its cost inside the network compared."""
    if net.scalars[INFEASIBLE]:
        return None
    present = np.flatnonzero(net.present)
    best = None
    for live in itertools.product(*[net.live[net.ptr[i] : net.ptr[i] + net.live_count[i]] for i in present]):
        choices = np.zeros(problem.num_nodes, dtype=np.int64)
        choices[present] = live
        cost, _, feasible = evaluate(problem, undo(net, choices))
        inside = int(net.scalars[CONSTANT]) + sum(int(net.cost[net.ptr[i] + choices[i]]) for i in present)
        for e in np.flatnonzero(net.edge_live):
            u, v = net.eu[e], net.ev[e]
            inside += int(net.pool[net.at[e] + choices[u] * (net.ptr[v + 1] - net.ptr[v]) + choices[v]])
        assert inside == cost or inside >= NEVER
        if feasible and inside < NEVER and (best is None or cost < best):
            best = cost
    return best


def _upper(best: int | None, slack: int) -> int:
    return NEVER if best is None or slack < 0 else best + slack


@pytest.mark.parametrize("slack", [-1, 1, 5])
def test_propagation_keeps_the_best(slack):
    """With every node allowed to be eliminated where there is no limit, else with none."""
    smaller = 0
    for seed in range(250):
        problem = random_problem(seed)
        best = brute_force(problem)
        heavy = np.full(problem.num_nodes, problem.limit is not None, dtype=np.uint8)
        net = propagate(network(problem, heavy, _upper(best, slack)))
        smaller += not net.scalars[INFEASIBLE] and int(net.present.sum()) < problem.num_nodes
        assert _best(net, problem) == best, seed
    assert smaller > 50


@pytest.mark.parametrize("slack", [-1, 1, 5])
def test_memory_and_dominance_keep_the_best(slack):
    dropped = dominated = 0
    for seed in range(400):
        problem = random_problem(seed)
        best = brute_force(problem)
        items = memory(problem)
        net = propagate(network(problem, heavy_nodes(problem.node_ptr, items), _upper(best, slack)))
        items = rebuild(net, items, 0)
        dropped += not net.scalars[INFEASIBLE] and drop_too_large(net, items)
        assert _best(net, problem) == best, seed
        if not net.scalars[INFEASIBLE]:
            dominated += _removed(net, items, problem)
            assert _best(net, problem) == best, seed
    assert dropped > 5 and dominated > 30


def _removed(net: Network, items: Items, problem: Problem) -> int:
    """How many choices dominance removes."""
    before = net.live_count.sum()
    remove_dominated(net, items)
    return int(before - net.live_count.sum())


def _best_of_core(core: Core, problem: Problem) -> int | None:
    """The least cost by the core's own arrays, its limits included; each feasible answer must be one of the problem, of that cost."""
    if core.infeasible:
        return None
    best = None
    for choices in itertools.product(*[range(size) for size in np.diff(core.node_ptr)]):
        flat = core.node_ptr[:-1] + np.array(choices, dtype=np.int64)
        cost = core.constant + int(core.costs[flat].sum())
        for e, (u, v) in enumerate(core.edges):
            cost += int(core.edge_costs[core.edge_ptr[e] + choices[u] * (core.node_ptr[v + 1] - core.node_ptr[v]) + choices[v]])
        used = np.zeros(len(core.items.capacity), dtype=np.int64)
        for c in flat:
            for item in range(core.items.ptr[c], core.items.ptr[c + 1]):
                used[core.items.begin[item] : core.items.end[item]] += core.items.usage[item]
        fits = bool((used <= core.items.capacity).all())
        full = core.expand(np.array(choices, dtype=np.int64))
        true_cost, _, feasible = evaluate(problem, full)
        assert feasible == (fits and cost < NEVER)
        if feasible:
            assert true_cost == cost
            assert core.restrict(full).tolist() == list(choices)
            best = cost if best is None else min(best, cost)
    return best


@pytest.mark.parametrize("slack", [-1, 1, 5])
def test_a_core_has_the_problem_s_best(slack):
    empty = 0
    for seed in range(400):
        problem = random_problem(seed)
        best = brute_force(problem)
        core = reduce(problem, _upper(best, slack))
        empty += core.num_nodes == 0
        assert _best_of_core(core, problem) == best, seed
    assert empty > 50


def test_reduction_leaves_the_problem_alone():
    for seed in range(30):
        problem = random_problem(seed)
        before = [getattr(problem, field).copy() for field in ("costs", "edges", "edge_ptr", "edge_costs", "node_ptr", "item_usage")]
        reduce(problem)
        after = [getattr(problem, field) for field in ("costs", "edges", "edge_ptr", "edge_costs", "node_ptr", "item_usage")]
        assert all((a == b).all() for a, b in zip(before, after, strict=True))


def test_what_was_logged_before_is_not_counted_twice():
    """A second rebuild carries only what merged since: the usage of a node fixed before stays in the capacity once."""
    problem = Problem.build([[1], [1, 2], [1, 2]], items=[[[(0, 4, 3)]], [[(0, 2, 4)], []], [[(1, 4, 5)], [(2, 3, 1)]]], limit=10)
    items = memory(problem)
    net = propagate(network(problem, heavy_nodes(problem.node_ptr, items), NEVER))
    once = rebuild(net, items, 0)
    twice = rebuild(net, once, int(net.scalars[LOG]))
    assert once.capacity.tolist() == twice.capacity.tolist() == [7]


def test_dominance_alone_keeps_the_best():
    """On networks that nothing else has simplified, where regrets over neighbours and usages both decide."""
    dominated = 0
    for seed in range(600):
        problem = random_problem(seed, most_nodes=4)
        best = brute_force(problem)
        items = memory(problem)
        net = network(problem, heavy_nodes(problem.node_ptr, items), NEVER)
        items = rebuild(net, items, 0)
        if not net.scalars[INFEASIBLE]:
            dominated += _removed(net, items, problem)
            assert _best(net, problem) == best, seed
    assert dominated > 100
