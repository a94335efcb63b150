"""What a solver returns."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from .arrays import Ints

INTERRUPTED = "interrupted; this is the best so far"
"""The message of a solution after Ctrl-C."""


class Status(str, Enum):
    """What is proved of a Solution."""

    OPTIMAL = "optimal"
    """The bound proves that no choices cost less."""
    FEASIBLE = "feasible"
    """The choices respect the limit; cheaper ones may exist."""
    INFEASIBLE = "infeasible"
    """Proved: no choices respect the limit."""
    UNKNOWN = "unknown"
    """No feasible choices were found and none were ruled out."""


@dataclass(frozen=True, eq=False)
class Solution:
    """One choice a node with its proof: every feasible answer costs at least ``bound``.

    ``gap`` is (objective - bound) / objective, 0 for an objective of 0 and infinite without choices. ``peak_usage`` is the largest
    usage at any time. ``smallest_limit`` is the smallest limit known to be feasible where the given one was not met. ``work`` is what
    the solve spent, in units of about one CPU second; ``cut``: the time limit ended it, so that the answer may depend on the load.
    """

    choices: Ints | None
    objective: int | None
    bound: int | float
    gap: float
    status: Status
    peak_usage: int | None
    solve_seconds: float
    method: str
    message: str = ""
    smallest_limit: int | None = None
    work: float = 0.0
    cut: bool = False
