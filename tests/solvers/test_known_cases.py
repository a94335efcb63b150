"""Cases with known answers: the ILP tests of a production compiler, rebuilt here, and the contest's example."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from autopar.solvers import Problem, ProblemError, Status, evaluate, solve
from tests.solvers.problems import shared_folder

NO = 10**18
METHODS = ["auto", "highs", "pulp-highs", "messages"]


def compiler_problem(follow=False, collapse=False, forbidden_edge=False, forbidden_costs=False) -> Problem:
    """Five nodes, four edges; the compiler's default test problem and its variations."""
    costs = [[110, 121, 132, 143], [220, 231, 242], [330, 341, 352, 363], [440, 451, 462, 473], [550, 561, 572]]
    if forbidden_costs:
        costs[0] = [NO, NO, NO, 143]
    usages = [[100000, 110000, 990000, 130000], [200000, 210000, 220000], [300000, 310000, 320000, 330000]]
    usages += [[400000, 410000, 420000, 430000], [500000, 510000, 520000]]
    lives = [(0, 5), (0, 5), (2, 4), (3, 5), (0, 0)]
    rising = np.array([[1000 * k + 100 * m for m in range(4)] for k in range(1, 5)])
    if forbidden_edge:
        rising = rising.astype(np.int64)
        rising[0, 0] = NO
    other = np.array([[1000 * k + 100 * m for m in range(4)] for k in range(5, 8)])
    edges = [(0, 2, rising), (1, 2, other), (1, 4, np.where(np.eye(3) > 0, 0, NO)), (2, 3, np.where(np.eye(4) > 0, 0, NO))]
    if follow:
        edges.append((1, 3, other))
    if collapse:
        falling = [[1000 * k + 100 * m for m in range(4)] for k in range(5, 9)]
        falling[0][0] = 9000
        edges.append((2, 3, np.array(falling)))
    items = [[[(*life, usage)] for usage in row] for life, row in zip(lives, usages, strict=True)]
    return Problem.build(costs, edges, items, limit=1500000)


def contest_example(limit: int | None) -> Problem:
    lives = [(30, 70), (40, 70), (50, 120), (110, 140), (110, 150)]
    costs = [[15], [55, 65], [25, 45, 35], [85, 75], [95]]
    usages = [[10], [25, 25], [15, 20, 15], [10, 10], [15]]
    edges = [(0, 1, [30, 40]), (0, 2, [50, 10, 40]), (1, 3, [90, 10, 20, 80]), (2, 4, [60, 20, 30]), (3, 4, [70, 60])]
    items = [[[(*life, usage)] for usage in row] for life, row in zip(lives, usages, strict=True)]
    return Problem.build(costs, edges, items, limit=limit)


CASES = [
    pytest.param(compiler_problem(), 7650, [0, 0, 0, 0, 0], id="X15 solves optimally"),
    pytest.param(compiler_problem(forbidden_edge=True), 7872, [0, 0, 1, 1, 0], id="X15 forbidden edge"),
    pytest.param(compiler_problem(forbidden_costs=True), 10683, [3, 0, 0, 0, 0], id="X15 forbidden costs"),
    pytest.param(compiler_problem(follow=True), 12650, [0, 0, 0, 0, 0], id="X15 followed edge"),
    pytest.param(compiler_problem(collapse=True), 13972, [0, 0, 1, 1, 0], id="X15 collapsed edge"),
    pytest.param(contest_example(50), 445, [0, 0, 2, 1, 0], id="X16 limit 50"),
    pytest.param(contest_example(None), 415, [0, 0, 1, 1, 0], id="X16 no limit"),
]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("problem", "cost", "choices"), CASES)
def test_known_optimum(problem, cost, choices, method):
    found = solve(problem, time_limit=600.0, method=method)
    assert (found.objective, found.choices.tolist(), found.status) == (cost, choices, Status.OPTIMAL)


@pytest.mark.parametrize("method", METHODS)
def test_a_limit_of_0_is_infeasible(method):
    found = solve(contest_example(0), time_limit=600.0, method=method)
    assert (found.status, found.choices) == (Status.INFEASIBLE, None)
    assert found.smallest_limit == 50


def test_the_judge_on_the_example():
    problem = contest_example(50)
    assert evaluate(problem, [0, 0, 2, 1, 0]) == (445, 50, True)
    assert evaluate(problem, [0, 0, 1, 1, 0]) == (415, 55, False)
    with pytest.raises(ProblemError, match="5 nodes"):
        evaluate(problem, [0, 0, 1])
    for wrong in (-1, 4):
        with pytest.raises(ProblemError, match=f"node 2 has 3 choices, choice {wrong} is none of them"):
            evaluate(problem, [0, 0, wrong, 1, 0])


def test_cases_of_the_shared_file():
    """The same cases and more, as data."""
    for case in json.loads((shared_folder() / "facts" / "solver_cases.json").read_text()):
        body = case["problem"]
        nodes = body["nodes"]
        items = [[[(*node["interval"], usage)] for usage in node["usage"]] for node in nodes]
        costs = [[NO if c is None or c >= 10**12 else c for c in node["cost"]] for node in nodes]
        edges = [(*edge["nodes"], np.array([NO if c is None else c for c in edge["cost"]])) for edge in body["edges"]]
        problem = Problem.build(costs, edges, items, limit=case["limit"])
        found = solve(problem)
        known = case["enumerated"]
        if known is None:
            assert found.status == Status.INFEASIBLE, case["case"]
        else:
            assert (found.objective, found.status) == (known["cost"], Status.OPTIMAL), case["case"]
            assert evaluate(problem, known["solution"]) == (known["cost"], evaluate(problem, known["solution"])[1], True)


def test_a_choice_whose_usage_never_fits_is_not_chosen():
    problem = dataclasses.replace(contest_example(50), limit=45)
    found = solve(problem)
    assert found.status == Status.INFEASIBLE and found.smallest_limit == 50
