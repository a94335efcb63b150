"""Solves on the way to an answer: Ctrl-C ends what they are part of, which would take the best so far for the answer."""

from __future__ import annotations

from typing import Any

import solvers
from solvers import INTERRUPTED, Problem, Solution


def solve(problem: Problem, **options: Any) -> Solution:
    """``solvers.solve``. Raises KeyboardInterrupt after Ctrl-C."""
    found = solvers.solve(problem, **options)
    if found.message == INTERRUPTED:
        raise KeyboardInterrupt
    return found
