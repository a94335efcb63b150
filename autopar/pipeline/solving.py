"""Solves of a pipeline's cut and orders: the one place from which a pipeline is planned that calls their solver."""

from __future__ import annotations

from autopar.solvers import INTERRUPTED
from autopar.solvers.pipeline import PipelineProblem, PipelineSolution, solve_pipeline


def solve(problem: PipelineProblem, work: float) -> PipelineSolution:
    """``solve_pipeline`` within that much work. Raises KeyboardInterrupt: after Ctrl-C, which ends all searches."""
    found = solve_pipeline(problem, work=work)
    if found.message == INTERRUPTED:
        raise KeyboardInterrupt
    return found
