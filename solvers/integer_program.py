"""The exact integer program in PuLP: the readable reference of tests, and the whole model in one page.

    minimise  sum c[i,k] x[i,k] + sum t[e,k,l] y[e,k,l]
    one choice a node       sum_k x[i,k] = 1
    edges follow their nodes  sum_l y[e,k,l] = x[u,k],  sum_k y[e,k,l] = x[v,l]
    memory at each time     sum usage x <= limit

y is continuous: for integer x the two families of rows leave it only one value. Forbidden choices and pairs have no variable at
all (PuLP resets the upper bound of a Binary from 0 to 1, so that a forbidden choice could come back).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .array_program import run_counted
from .arrays import Ints
from .incumbent import Incumbent
from .problem import INFINITE, Problem
from .settings import SETTINGS


def memory_times(problem: Problem) -> Ints:
    """Times that together imply the limit at every time: those at which something begins."""
    live = problem.item_end > problem.item_begin
    return np.unique(problem.item_begin[live])


def solve_pulp(incumbent: Incumbent) -> None:
    """Write the integer program with PuLP, and run HiGHS on it for the incumbent's work."""
    import pulp

    problem = incumbent.problem
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
    """Solve the relaxation, then the program: in an integer program HiGHS does not count the root relaxation."""
    import highspy

    tight, status = SETTINGS.tight, highspy.HighsModelStatus
    solver = pulp.HiGHS(
        mip=False, msg=False, threads=1, gapRel=tight, mip_feasibility_tolerance=tight, primal_feasibility_tolerance=tight
    )
    solver.createAndConfigureSolver(model)
    solver.buildSolverModel(model)
    highs = model.solverModel
    columns = np.array(sorted(variable.index for variable in x.values()), dtype=np.int32)
    for integral in (False, True):
        if integral:
            highs.changeColsIntegrality(len(columns), columns, np.ones(len(columns), dtype=np.uint8))
        run_counted(highs, incumbent, incumbent.allowed, integral)
        if highs.getModelStatus() in {status.kInfeasible, status.kUnboundedOrInfeasible, status.kModelEmpty}:  # empty: all is forbidden
            incumbent.infeasible = True
        if incumbent.over:
            break
    info, values = highs.getInfo(), highs.getSolution().col_value
    if integral:
        incumbent.prove(info.mip_dual_bound * scale * (1 - tight))
    if info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible:
        weight = np.zeros(len(incumbent.problem.costs))
        for c, variable in x.items():
            weight[c] = values[variable.index]
        incumbent.offer(np.array([int(np.argmax(piece)) for piece in np.split(weight, incumbent.problem.node_ptr[1:-1])]))
