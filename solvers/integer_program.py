"""The exact integer program in PuLP: the readable reference of tests, and the whole model in one page.

    minimise  sum c[i,k] x[i,k] + sum t[e,k,l] y[e,k,l]
    one choice a node       sum_k x[i,k] = 1
    edges follow their nodes  sum_l y[e,k,l] = x[u,k],  sum_k y[e,k,l] = x[v,l]
    memory at each time     sum usage x <= limit

y is continuous: for integer x the two families of rows leave it only one value. Forbidden choices and pairs have no variable at
all (PuLP resets the upper bound of a Binary from 0 to 1, so that a forbidden choice could come back).
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

from solvers.arrays import Ints
from solvers.incumbent import Incumbent
from solvers.problem import INFINITE, Problem
from solvers.settings import SETTINGS


def memory_times(problem: Problem) -> Ints:
    """Times that together imply the limit at every time: those at which something begins."""
    live = problem.item_end > problem.item_begin
    return np.unique(problem.item_begin[live])


def solve_pulp(incumbent: Incumbent) -> None:
    """The integer program by PuLP and HiGHS. Its time is limited, not its work."""
    import pulp

    problem = incumbent.problem
    logging.getLogger("pulp").setLevel(logging.ERROR)
    model = pulp.LpProblem("choices", pulp.LpMinimize)
    finite = np.concatenate([problem.costs[problem.costs < INFINITE], problem.edge_costs[problem.edge_costs < INFINITE], [1]])
    scale = max(1.0, float(finite.max()) / SETTINGS.largest_coefficient)
    x: dict[int, Any] = {
        c: model.add_variable(f"x{c}", 0, 1, cat="Integer") for c in range(len(problem.costs)) if problem.costs[c] < INFINITE
    }
    objective = [(x[c], float(problem.costs[c]) / scale) for c in x if problem.costs[c]]
    for node in range(problem.num_nodes):
        model += pulp.lpSum(x[c] for c in range(problem.node_ptr[node], problem.node_ptr[node + 1]) if c in x) == 1
    for edge, (u, v) in enumerate(problem.edges.tolist()):
        objective += _edge_rows(pulp, model, problem, edge, u, v, x, scale)
    model.setObjective(pulp.LpAffineExpression(objective))
    _memory_rows(pulp, model, problem, x)
    _run(pulp, model, incumbent, x, scale)


def _edge_rows(
    pulp: Any, model: Any, problem: Problem, edge: int, u: int, v: int, x: dict[int, Any], scale: float
) -> list[tuple[Any, float]]:
    first, second = range(*problem.node_ptr[u : u + 2]), range(*problem.node_ptr[v : v + 2])
    table = problem.edge_costs[problem.edge_ptr[edge] : problem.edge_ptr[edge + 1]].reshape(len(first), len(second))
    y = {
        (k, m): model.add_variable(f"y{edge}_{k}_{m}", 0, 1)
        for k in range(len(first))
        for m in range(len(second))
        if first[k] in x and second[m] in x and table[k, m] < INFINITE
    }
    for k, c in enumerate(first):
        if c in x:
            model.addConstraint(pulp.lpSum(y[k, m] for m in range(len(second)) if (k, m) in y) == x[c])
    for m, c in enumerate(second):
        if c in x:
            model.addConstraint(pulp.lpSum(y[k, m] for k in range(len(first)) if (k, m) in y) == x[c])
    return [(variable, float(table[place]) / scale) for place, variable in y.items() if table[place]]


def _memory_rows(pulp: Any, model: Any, problem: Problem, x: dict[int, Any]) -> None:
    if problem.limit is None:
        return
    if problem.limit < 0:
        model.addConstraint(pulp.lpSum([]) <= problem.limit)
    owner = np.repeat(np.arange(len(problem.costs)), np.diff(problem.item_ptr))
    for time in memory_times(problem):
        live = np.flatnonzero((problem.item_begin <= time) & (time < problem.item_end) & (problem.item_usage > 0))
        terms = [(x[owner[i]], int(problem.item_usage[i]) / max(1, problem.limit)) for i in live.tolist() if owner[i] in x]
        if terms:
            model.addConstraint(pulp.lpSum(variable * factor for variable, factor in terms) <= problem.limit / max(1, problem.limit))


def _run(pulp: Any, model: Any, incumbent: Incumbent, x: dict[int, Any], scale: float) -> None:
    limit = max(0.1, incumbent.seconds_left)
    solver = pulp.HiGHS(msg=False, timeLimit=limit, gapRel=1e-9, mip_feasibility_tolerance=1e-9, primal_feasibility_tolerance=1e-9)
    model.solve(solver)
    if model.status == pulp.LpStatusInfeasible:
        incumbent.infeasible = True
        return
    incumbent.prove(float(model.solverModel.getInfo().mip_dual_bound) * scale * (1 - 1e-9))
    if model.sol_status not in {pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible}:
        return
    problem = incumbent.problem
    weight = np.zeros(len(problem.costs))
    for c, variable in x.items():
        weight[c] = variable.varValue or 0.0
    pieces = np.split(weight, problem.node_ptr[1:-1])
    incumbent.offer(np.array([int(np.argmax(piece)) for piece in pieces]))
