"""Sparse elimination finds the least cost and proves it, whatever the messages are; with few rows it claims no more than is true."""

from __future__ import annotations

import dataclasses
import math
import time

import numpy as np
import pytest

from autopar.solvers import Problem, evaluate, solve
from autopar.solvers.dual_ascent import MemoryDual
from autopar.solvers.incumbent import Incumbent
from autopar.solvers.kernels import add_least
from autopar.solvers.kernels.constants import FAR
from autopar.solvers.message_search import MessageSearch
from autopar.solvers.pairwise import forbidding, pairs, total_cost
from autopar.solvers.reduction import Core
from autopar.solvers.settings import SETTINGS
from autopar.solvers.sparse_elimination import SparseElimination, TooMuchWorkError, eliminate, tables_of
from tests.solvers.problems import brute_force, random_problem, unreduced

SEEDS = range(150)


def problem_and_core(seed: int) -> tuple[Problem, Core]:
    """A random problem without memory, and it as a core that nothing has reduced."""
    problem = dataclasses.replace(random_problem(seed), limit=None)
    return problem, unreduced(problem)


def frustrated(seed: int, nodes: int = 6, choices: int = 3, reach: int = 2) -> Problem:
    """A band of nodes in which neighbours want other choices than one another: the linear relaxation is far below the optimum."""
    rng = np.random.default_rng(seed)
    costs = [rng.integers(0, 3, choices) for _ in range(nodes)]
    clash = np.where(np.eye(choices) > 0, 40, 0)
    pairs_of = [(at, at + step) for at in range(nodes) for step in range(1, reach + 1) if at + step < nodes]
    return Problem.build(costs, [(u, v, clash + rng.integers(0, 30, clash.shape)) for u, v in pairs_of], None, None)


def answers(core: Core) -> list[tuple[float, np.ndarray]]:
    """The cost of all choices of a core that are not forbidden."""
    graph, costs = pairs(core), forbidding(core.costs)
    every = [np.array(choices) for choices in np.ndindex(*np.diff(core.node_ptr))]
    return [(cost, choices) for choices in every if (cost := total_cost(graph, costs, choices)) < FAR / 2]


def messages_of(core: Core, passes: int) -> tuple[object, np.ndarray, np.ndarray]:
    graph, costs = pairs(core), forbidding(core.costs)
    dual = MemoryDual(graph, core.items, costs, lambda work: False)
    for _ in range(passes):
        dual._pass()
    return graph, costs, dual.best_messages


@pytest.mark.parametrize("passes", [0, 1, 9])
def test_bound_and_tables_add_up_to_the_cost_of_every_answer(passes: int) -> None:
    checked = 0
    for seed in SEEDS:
        _, core = problem_and_core(seed)
        if core.infeasible or core.num_nodes == 0:
            continue
        graph, costs, messages = messages_of(core, passes)
        known = answers(core)
        if not known:
            continue
        bound, tables = tables_of(graph, costs, messages, math.inf)
        for cost, choices in known:
            rows = [table.costs[(table.rows == choices[list(table.nodes)][:, None]).all(axis=0)] for table in tables]
            assert all(len(row) == 1 and row[0] >= -1e-9 for row in rows)
            assert bound + sum(float(row[0]) for row in rows) == pytest.approx(cost)
            checked += 1
    assert checked > 1000


@pytest.mark.parametrize("share", [0.3, 1.0, 1.5])
def test_all_rows_below_the_room_give_the_optimum_or_prove_that_it_is_not_below(share: float) -> None:
    found_some = proved_some = 0
    for seed in SEEDS:
        _, core = problem_and_core(seed)
        known = [] if core.infeasible or core.num_nodes == 0 else answers(core)
        if not known:
            continue
        best = min(cost for cost, _ in known)
        graph, costs, messages = messages_of(core, 3)
        bound, _ = tables_of(graph, costs, messages, math.inf)
        room = share * (best - bound) + (1.0 if share >= 1 else 0.0)
        elimination = SparseElimination(np.diff(core.node_ptr), tables_of(graph, costs, messages, room)[1], room, 1000)
        choices = elimination.run(math.inf)
        if best < bound + room:
            assert choices is not None
            assert total_cost(graph, costs, choices) == pytest.approx(best) == bound + elimination.bound
            found_some += 1
        else:
            assert choices is None
            assert bound + elimination.bound == pytest.approx(bound + room)
            proved_some += 1
    assert (found_some if share >= 1 else proved_some) > 50


@pytest.mark.parametrize("most_rows", [1, 4, 30])
def test_with_few_rows_answers_are_true_and_bounds_hold(most_rows: int) -> None:
    short = proved = 0
    for seed in range(40):
        problem = frustrated(seed, choices=2 + seed % 3)
        core = unreduced(problem)
        incumbent = Incumbent(problem, 0.0, time.perf_counter() + 1000, 0.0, allowed=1000.0)
        search = MessageSearch(incumbent, core)
        search.run(1)
        best = brute_force(problem)
        assert best is not None
        assert eliminate(incumbent, search, most_rows)
        assert incumbent.objective is not None
        assert incumbent.choices is not None
        assert incumbent.bound <= best <= incumbent.objective
        assert evaluate(problem, incumbent.choices)[0] == incumbent.objective
        short += incumbent.bound < best
        proved += incumbent.bound == best
    assert short > 10 if most_rows == 1 else proved > 10


@pytest.mark.parametrize("most_rows", [1, 3, 10])
def test_a_later_drop_of_rows_does_not_lift_the_bound_of_an_earlier_one(most_rows: int) -> None:
    """Each of these eliminations drops rows several times, some of them just any."""
    dropped = 0
    for seed in range(60):
        core = unreduced(frustrated(seed, nodes=9, choices=3))
        graph, costs, messages = messages_of(core, seed % 4)
        _, tables = tables_of(graph, costs, messages, 1e6)
        whole = SparseElimination(np.diff(core.node_ptr), tables, 1e6, 10_000)
        whole.run(math.inf)
        room = 1.5 * whole.least + 1
        few = SparseElimination(np.diff(core.node_ptr), tables_of(graph, costs, messages, room)[1], room, most_rows)
        few.run(math.inf)
        assert few.bound <= whole.least + 1e-9
        dropped += few.dropped < room
    assert dropped > 10


def test_tables_elsewhere_rule_rows_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain whose one end asks for any choice of the middle but the first, and whose other end lets it pay 5 for each number."""
    choices = np.arange(6)
    first, second = np.where(choices == 0, 8, 0) + 0 * choices[:, None], 5 * choices[:, None] + 0 * choices
    core = unreduced(Problem.build([0 * choices] * 3, [(0, 1, first), (1, 2, second)], None, None))
    graph, costs, messages = messages_of(core, 0)
    elimination = SparseElimination(np.diff(core.node_ptr), tables_of(graph, costs, messages, 6.0)[1], 6.0, 100)
    elimination.given = 0  # look into the tables that messages have mended as well: here they have not
    made, add = list[list[int]](), elimination._add
    monkeypatch.setattr(elimination, "_add", lambda table: (made.append(table.rows.ravel().tolist()), add(table)))
    found = elimination.run(math.inf)
    assert found is not None
    assert found[1] == 1
    assert elimination.bound == 5.0
    assert made[0] == [1]  # of the middle's choices: 0 costs 8 here, 2 costs 10 there


def test_rows_that_agree_with_none_are_ruled_out() -> None:
    total = np.array([1.0, 2.0, 3.0, 4.0])
    key, others, cost = np.array([7, 5, 6, 7]), np.array([5, 7, 7, 5]), np.array([0.5, 4.0, 2.0, 0.25])
    add_least(total, key, others, cost, np.empty(8, dtype=np.int64), np.empty(4, dtype=np.int64))
    assert total.tolist() == [3.0, 2.25, 3.0 + FAR, 6.0]


@pytest.mark.parametrize("most_rows", [20, 2000])
def test_a_node_may_have_more_neighbours_than_a_number_has_bits_for(most_rows: int) -> None:
    """29 neighbours of 8 choices are 87 bits."""
    problem = frustrated(5, nodes=30, choices=8, reach=29)
    found = solve(problem, work=1.0)
    core = unreduced(problem)
    graph, costs, messages = messages_of(core, 30)
    bound, tables = tables_of(graph, costs, messages, found.objective + 1.0)
    elimination = SparseElimination(np.diff(core.node_ptr), tables, found.objective + 1.0 - bound, most_rows)
    choices = elimination.run(math.inf)
    assert found.objective is not None
    assert bound + elimination.bound <= found.objective
    assert choices is None or total_cost(graph, costs, choices) == pytest.approx(bound + elimination.least)


def test_work_ends_an_elimination() -> None:
    costs = [np.zeros(30, dtype=np.int64)] * 6
    edges = [(u, v, np.arange(900).reshape(30, 30) % (7 + u + v)) for u in range(6) for v in range(u)]
    core = unreduced(Problem.build(costs, edges, None, None))
    graph, theta, messages = messages_of(core, 5)
    elimination = SparseElimination(np.diff(core.node_ptr), tables_of(graph, theta, messages, 50.0)[1], 50.0, 1000)
    with pytest.raises(TooMuchWorkError):
        elimination.run(1e-9)


def test_frustrated_cycles_are_proved() -> None:
    found = solve(frustrated(0, nodes=40, choices=8, reach=4), work=20.0)
    assert found.gap <= SETTINGS.negligible
