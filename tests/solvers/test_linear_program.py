"""Small linear programs straight into HiGHS, against the same program in PuLP."""

from __future__ import annotations

import numpy as np
import pulp
import pytest

from autopar.solvers.linear_program import Range, minimise


def random_program(seed: int) -> tuple[np.ndarray, Range, np.ndarray, Range]:
    """A program with an answer: costs, variables, table, rows. Some coefficients are 0, some rows are equations, some sides are open."""
    rng = np.random.default_rng(seed)
    rows, columns = rng.integers(1, 6), rng.integers(1, 8)
    table = rng.normal(size=(rows, columns)) * (rng.random((rows, columns)) < 0.7)
    middle, slack = table @ rng.random(columns), rng.random((2, rows))
    equal, open_below = rng.random((2, rows)) < 0.2
    slack[:, equal] = 0.0
    least = np.where(open_below & ~equal, -np.inf, middle - slack[0])
    return rng.normal(size=columns), Range(np.zeros(columns), np.full(columns, 2.0)), table, Range(least, middle + slack[1])


@pytest.mark.parametrize("seed", range(40))
def test_values_and_duals_are_those_of_pulp(seed: int) -> None:
    costs, variables, table, rows = random_program(seed)
    problem = pulp.LpProblem("small", pulp.LpMinimize)
    x = [problem.add_variable(f"x{number}", low, high) for number, (low, high) in enumerate(zip(*variables, strict=True))]
    problem += pulp.lpSum(each * cost for each, cost in zip(x, costs.tolist(), strict=True))
    sums = [pulp.lpSum(each * factor for each, factor in zip(x, row, strict=True)) for row in table.tolist()]
    for total, least in zip(sums, rows.least, strict=True):
        if np.isfinite(least):
            problem += total >= float(least)
    for total, most in zip(sums, rows.most, strict=True):
        problem += total <= float(most)
    problem.solve(pulp.HiGHS(msg=False))
    values, duals = minimise(costs, variables, table, rows)
    assert float(costs @ values) == pytest.approx(pulp.value(problem.objective), abs=1e-7)
    reached = table @ values
    assert np.all(reached >= rows.least - 1e-6) and np.all(reached <= rows.most + 1e-6)
    free = costs - duals @ table  # what a variable costs beside what the rows pay for it: 0 between its ends
    assert np.all((np.abs(free) < 1e-6) | ((free > 0) & (values < 1e-6)) | ((free < 0) & (values > 2.0 - 1e-6)))
