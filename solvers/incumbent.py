"""What is known while solvers run: the best verified choices and the best proved bound. Every method writes here and nowhere else."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .arrays import Ints
from .evaluation import evaluate
from .problem import INFINITE, Problem
from .settings import SETTINGS
from .solution import Solution, Status

Progress = Callable[[int | None, float, float, float], None]
"""Called with (best cost or None, bound, gap, seconds) whenever one of them improves."""


@dataclass
class Incumbent:
    """The state of one solve. ``deadline`` and ``began`` are seconds of ``time.perf_counter``; not ``patient``: methods may end where
    going on has stopped to pay.

    ``allowed`` is the work that may be spent and ``spent`` what was: counted, the same on every machine, about one unit a CPU second.
    ``cut``: the deadline ended something that work did not.
    """

    problem: Problem
    began: float
    deadline: float
    gap: float
    seed: int = 0
    progress: Progress | None = None
    patient: bool = True
    allowed: float = math.inf
    spent: float = 0.0
    cut: bool = False
    choices: Ints | None = None
    objective: int | None = None
    peak: int | None = None
    bound: int = 0
    infeasible: bool = False
    smallest_limit: int | None = None
    message: str = ""

    def offer(self, choices: Ints) -> bool:
        """Keep the choices if the evaluator calls them feasible and cheaper; True when kept."""
        cost, peak, feasible = evaluate(self.problem, choices)
        if not feasible:
            if cost < INFINITE and (self.smallest_limit is None or peak < self.smallest_limit):
                self.smallest_limit = peak
            return False
        if self.objective is not None and cost >= self.objective:
            return False
        self.choices, self.objective, self.peak = np.array(choices, dtype=np.int64), cost, peak
        self._tell()
        return True

    def prove(self, bound: float) -> None:
        """Every feasible answer costs at least ``bound``; costs are integers, so the bound is rounded up."""
        whole = math.ceil(bound - SETTINGS.negligible) if math.isfinite(bound) else 0
        if whole > self.bound:
            self.bound = whole
            self._tell()

    def exhaust(self, excluded: float = math.inf) -> None:
        """No choices cost less than ``excluded``, a cost that is reached; by default no choices are feasible."""
        if math.isfinite(excluded):
            self.prove(excluded)
        else:
            self.infeasible = True

    @property
    def current_gap(self) -> float:
        if self.objective is None:
            return float("inf")
        return max(0.0, (self.objective - self.bound) / self.objective) if self.objective else 0.0

    @property
    def done(self) -> bool:
        """Nothing is left to do: gap reached or proved infeasible."""
        return self.infeasible or self.current_gap <= self.gap

    def spend(self, work: float) -> bool:
        """Count work that was done; True when the solve is over."""
        self.spent += work
        return self.over

    @property
    def work_left(self) -> float:
        return self.allowed - self.spent

    @property
    def seconds_left(self) -> float:
        return self.deadline - time.perf_counter()

    @property
    def late(self) -> bool:
        """Whether the deadline is past, which is noted as a cut."""
        self.cut = self.cut or self.seconds_left <= 0
        return self.cut

    @property
    def over(self) -> bool:
        return self.done or self.work_left <= 0 or self.late

    def solution(self, method: str) -> Solution:
        """The Solution that the incumbent supports, no more."""
        seconds = time.perf_counter() - self.began
        if self.objective is None:
            status = Status.INFEASIBLE if self.infeasible else Status.UNKNOWN
            lack, limit = self._lack(), self.smallest_limit
            return Solution(None, None, self.bound, float("inf"), status, None, seconds, method, lack, limit, self.spent, self.cut)
        bound = min(self.bound, self.objective)
        gap = (self.objective - bound) / self.objective if self.objective else 0.0
        status = Status.OPTIMAL if gap <= SETTINGS.negligible else Status.FEASIBLE
        message = self.message
        return Solution(self.choices, self.objective, bound, gap, status, self.peak, seconds, method, message, None, self.spent, self.cut)

    def _lack(self) -> str:
        limit = self.problem.limit
        what = f"no choices respect the limit {limit}" if self.infeasible else "no feasible choices were found in the time given"
        if limit is None and self.infeasible:
            what = "no choices avoid every forbidden cost"
        what = self.message or what
        known = "" if self.smallest_limit is None else f"; the smallest limit known to be feasible is {self.smallest_limit}"
        return what + known

    def _tell(self) -> None:
        if self.progress is not None:
            self.progress(self.objective, self.bound, self.current_gap, time.perf_counter() - self.began)
