"""Solves within a budget of work: the one place from which a search calls the solvers."""

from __future__ import annotations

from typing import Any

from autopar import solvers
from autopar.effort import Budget
from autopar.search.settings import LEAST_SOLVE_SECONDS
from autopar.solvers import INTERRUPTED, Problem, Solution


def solve(problem: Problem, budget: Budget, **options: Any) -> Solution:
    """``autopar.solvers.solve`` within a budget, which is charged.

    Raises:
        KeyboardInterrupt: after Ctrl-C, which ends the phase that this solve belongs to.
    """
    found = solve_interruptibly(problem, budget, **options)
    if found.message == INTERRUPTED:
        raise KeyboardInterrupt
    return found


def solve_interruptibly(problem: Problem, budget: Budget, **options: Any) -> Solution:
    """``solve``, but after Ctrl-C the best solution so far, with ``INTERRUPTED`` as its message."""
    work = max(budget.ends - budget.meter.spent, 0.0)
    seconds = max(budget.meter.seconds_left, LEAST_SOLVE_SECONDS)
    found = solvers.solve(problem, work=work, time_limit=seconds, **options)
    budget.charge(found.work)
    budget.meter.cut |= found.cut
    return found
