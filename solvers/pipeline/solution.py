"""What the search for a pipeline returns."""

from __future__ import annotations

from dataclasses import dataclass

from ..solution import Status
from .timetable import PipelinePlan


@dataclass(frozen=True)
class PipelineSolution:
    """A plan with its proof: every cut, mix of modes and order takes at least ``bound`` seconds.

    ``step`` is in seconds, None without a plan; ``gap`` is (step - bound) / step, 0 for a step of 0 and infinite without a plan. ``work``
    is what was spent, in units of about one CPU second; ``cut_off``: the time limit ended the search, so the answer may depend on the load.
    ``smallest_limit``: bytes known to be enough for some plan, where the given limit was not met.
    """

    plan: PipelinePlan | None
    step: float | None
    bound: float
    gap: float
    status: Status
    solve_seconds: float
    message: str = ""
    work: float = 0.0
    cut_off: bool = False
    smallest_limit: float | None = None
