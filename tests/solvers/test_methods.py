"""One list of problems, every method: agreement with brute force, or soundness where a method proves less."""

from __future__ import annotations

import dataclasses
import time

import numpy as np
import pytest

from autopar.solvers import METHODS, Problem, Status, array_program, auto, evaluate, solve
from autopar.solvers.incumbent import Incumbent
from autopar.solvers.message_search import MessageSearch
from tests.solvers.layered import layered
from tests.solvers.problems import brute_force, random_problem, unreduced

EXACT = {"auto": 1200, "highs": 1200, "pulp-highs": 700}
"""Exact methods and the number of random problems for each: together thousands."""


def test_every_method_is_tested():
    assert {*EXACT, "messages"} == set(METHODS)


@pytest.mark.parametrize(("method", "count"), EXACT.items(), ids=list(EXACT))
def test_brute_force_agrees(method, count):
    seen = set()
    for seed in range(count):
        problem = random_problem(seed)
        best, found = brute_force(problem), solve(problem, time_limit=600.0, method=method)
        seen.add(found.status)
        if best is None:
            assert (found.status, found.choices) == (Status.INFEASIBLE, None), seed
        else:
            assert (found.status, found.objective, found.bound) == (Status.OPTIMAL, best, best), seed
            assert evaluate(problem, found.choices) == (best, found.peak_usage, True), seed
    assert seen == {Status.INFEASIBLE, Status.OPTIMAL}


def test_cores_that_nothing_has_reduced_end_too():
    """A choice may have several items at one time there."""
    for seed in range(150):
        problem = random_problem(seed)
        incumbent = Incumbent(problem, 0.0, np.inf, 1e-6, 0)
        array_program.solve_core(incumbent, unreduced(problem))
        best = brute_force(problem)
        assert (incumbent.objective, incumbent.infeasible) == (best, best is None), seed
        assert best is None or incumbent.bound == best, seed


def test_messages_claim_no_more_than_is_true():
    optimal = 0
    for seed in range(150):
        problem = random_problem(seed, most_nodes=5)
        best, found = brute_force(problem), solve(problem, time_limit=0.05, method="messages")
        if best is None:
            assert found.choices is None and found.status in {Status.INFEASIBLE, Status.UNKNOWN}, seed
            continue
        assert found.bound <= best, seed
        assert found.status != Status.INFEASIBLE, seed
        if found.choices is not None:
            assert found.objective >= best, seed
            assert evaluate(problem, found.choices) == (found.objective, found.peak_usage, True), seed
        if found.status == Status.OPTIMAL:
            optimal += 1
            assert found.objective == best, seed
    assert optimal > 40


@pytest.mark.parametrize("method", ["auto", "highs", "pulp-highs", "messages"])
@pytest.mark.parametrize(
    ("problem", "cost"),
    [
        pytest.param(Problem.build([[7]]), 7, id="one node, one choice"),
        pytest.param(Problem.build([[3, 1], [2, 5]]), 3, id="isolated nodes"),
        pytest.param(Problem.build([[0, 0], [0, 0]], [(0, 1, [[0, 0], [0, 0]])]), 0, id="cost 0"),
        pytest.param(Problem.build([[0, 0], [0, 0]], [(0, 1, [[5, 1], [1, 5]]), (1, 0, [[0, 9], [2, 0]])]), 3, id="parallel edges, turned"),
        pytest.param(Problem.build([[1, 9]], items=[[[(0, 0, 99)], []]], limit=5), 1, id="a life of no length"),
        pytest.param(Problem.build([[1, 9]], items=[[[(4, 2, 99)], []]], limit=5), 1, id="a life that ends before it begins"),
        pytest.param(Problem.build([[1, 9]], items=[[[(0, 3, 3), (2, 5, 3)], [(0, 5, 5)]]], limit=5), 9, id="items of one choice overlap"),
        pytest.param(Problem.build([[1, 9]] * 2, items=[[[(0, 3, 3)], []], [[(3, 5, 3)], []]], limit=3), 2, id="one after the other"),
        pytest.param(Problem.build([[10**18, 4]], [], [[[], [(0, 1, 1)]]], limit=1), 4, id="a forbidden choice"),
    ],
)
def test_small_cases(method, problem, cost):
    found = solve(problem, time_limit=600.0, method=method)
    assert (found.status, found.objective, found.bound, found.gap) == (Status.OPTIMAL, cost, cost, 0.0)


@pytest.mark.parametrize("method", ["auto", "highs", "pulp-highs"])
@pytest.mark.parametrize(
    "problem",
    [
        pytest.param(Problem.build([[10**18]]), id="one forbidden choice"),
        pytest.param(Problem.build([[1], [1]], [(0, 1, [[10**17]])]), id="a forbidden pair"),
        pytest.param(Problem.build([[1, 1]], items=[[[(0, 1, 6)], [(0, 2, 7)]]], limit=5), id="too little memory"),
        pytest.param(Problem.build([[1]], limit=-1), id="a negative limit"),
    ],
)
def test_infeasible_is_proved(method, problem):
    found = solve(problem, time_limit=600.0, method=method)
    assert (found.status, found.choices, found.objective) == (Status.INFEASIBLE, None, None)


def test_smallest_known_limit_is_told_when_infeasible():
    problem = Problem.build([[1, 1]], items=[[[(0, 1, 6)], [(0, 2, 7)]]], limit=5)
    found = solve(problem)
    assert found.smallest_limit is not None
    assert "limit" in found.message and str(found.smallest_limit) in found.message
    again = solve(dataclasses.replace(problem, limit=found.smallest_limit))
    assert again.status == Status.OPTIMAL


def test_costs_near_the_range_stay_exact():
    big = 2**60
    problem = Problem.build([[10**16, 10**16 + 1], [10**16, 10**16]], [(0, 1, [[10**16, 10**16], [10**16 - 1, 10**16]])])
    assert brute_force(problem) == 3 * 10**16
    found = solve(problem)
    assert found.objective == 3 * 10**16 and found.bound <= 3 * 10**16 < big


@pytest.mark.parametrize("seed", range(40))
def test_more_memory_never_costs_more(seed):
    problem = random_problem(seed + 5000)
    costs = []
    for limit in (5, 15, 30, None):
        found = solve(dataclasses.replace(problem, limit=limit))
        costs.append(np.inf if found.objective is None else found.objective)
    assert costs == sorted(costs, reverse=True)


def _core_of(problem):
    incumbent = Incumbent(problem, time.perf_counter(), np.inf, 1e-6, 0)
    return incumbent, unreduced(problem)


def test_messages_settle_a_chain_without_a_search():
    rng = np.random.default_rng(1)
    tables = [(k, k + 1, rng.integers(0, 1000, (5, 5))) for k in range(30)]
    problem = Problem.build([rng.integers(0, 1000, 5) for _ in range(31)], tables)
    incumbent, core = _core_of(problem)
    search = MessageSearch(incumbent, core)
    search.run(1)
    assert incumbent.done and incumbent.objective == solve(problem).objective
    assert search.local.line is None, "no sweep was made"


def test_one_that_is_not_patient_ends_where_nothing_is_gained(monkeypatch):
    problem = dataclasses.replace(layered(6, 8, 10, seed=3), limit=None)
    looked = []
    monkeypatch.setattr(auto, "SETTINGS", dataclasses.replace(auto.SETTINGS, exact_entries=0))  # nothing else closes the gap
    zeros = np.zeros(96, np.int64)
    monkeypatch.setattr(MessageSearch, "run", lambda search, rounds: looked.append(rounds) or search.incumbent.offer(zeros))
    incumbent, core = _core_of(problem)
    incumbent.patient = False
    auto.AlternatingSolver(incumbent, core).run()
    assert looked == [1, 1] and not incumbent.over, "the second round gains nothing"
    patient, core = _core_of(problem)
    monkeypatch.setattr(Incumbent, "over", property(lambda incumbent: len(looked) >= 30))
    auto.AlternatingSolver(patient, core).run()
    assert len(looked) == 30 and set(looked[2:]) == {auto.SETTINGS.rounds_between_looks}


def test_one_that_is_not_patient_solves_exactly_what_little_is_left(monkeypatch):
    """Where messages leave a gap and hardly anything to choose, it does not end without the answer."""
    rng = np.random.default_rng(2)
    tables = [(one, other, rng.integers(0, 1000, (4, 4))) for other in range(12) for one in range(other)]
    problem = Problem.build([rng.integers(0, 1000, 4) for _ in range(12)], tables)
    tried = []
    exactly = auto.solve_core
    monkeypatch.setattr(auto, "solve_core", lambda incumbent, core, *rest: tried.append(core) or exactly(incumbent, core, *rest))
    incumbent, core = _core_of(problem)
    incumbent.patient = False
    auto.AlternatingSolver(incumbent, core).run()
    assert incumbent.done and incumbent.objective == solve(problem).objective
    assert tried
