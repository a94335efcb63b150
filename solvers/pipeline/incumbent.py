"""What is known while the search runs: the best plan, the best proved bound, and the work that is left. Nothing else writes them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..arrays import Ints
from ..kernels import run_orders
from ..settings import SETTINGS as SOLVERS
from ..solution import Status
from .bounds import round_up, step_unit
from .chain import Clock, decoded, make_chain, make_clock
from .intervals import Mix
from .problem import PipelineProblem
from .solution import PipelineSolution
from .timetable import PipelinePlan, check_legal

Progress = Callable[[float | None, float, float, float], None]
"""Called with (best step or None, bound, gap, seconds) whenever one of them improves."""


@dataclass
class PipelineIncumbent:
    """The state of one solve. ``began`` and ``deadline`` are seconds of ``time.perf_counter``; ``allowed`` and ``spent`` are work."""

    problem: PipelineProblem
    began: float
    deadline: float
    allowed: float
    gap: float = SOLVERS.negligible
    progress: Progress | None = None
    spent: float = 0.0
    cut_off: bool = False
    bound: float = 0.0
    step: float = math.inf
    cut: tuple[int, ...] = ()
    mixes: tuple[Mix, ...] = ()
    orders: Ints | None = None
    infeasible: bool = False
    smallest_limit: float | None = None
    message: str = ""
    clock: Clock = field(init=False)

    def __post_init__(self) -> None:
        self.clock, self.unit = make_clock(self.problem), step_unit(self.problem)

    def offer(self, ends: Sequence[int], mixes: Sequence[Mix], orders: Ints) -> bool:
        """Keep a plan if the clock says that it is shorter; True when kept. ``ends``: where each chunk ends, in layers."""
        chain = make_chain(self.problem, [mix.cost for mix in mixes])
        step = float(run_orders(chain, orders, self.clock))
        if step >= self.step * (1.0 - SOLVERS.tight):
            return False
        self.step, self.mixes, self.orders = step, tuple(mixes), orders.copy()
        self.cut = tuple(end - begin for begin, end in zip((0, *ends), ends, strict=False))
        self._tell()
        return True

    def prove(self, bound: float) -> None:
        """No answer takes less than ``bound`` seconds, rounded up to what a step can be; infinite: there is no answer."""
        if math.isinf(bound):
            self.infeasible = math.isinf(self.step)
        elif round_up(bound, self.unit) > self.bound:
            self.bound = round_up(bound, self.unit)
            self._tell()

    @property
    def current_gap(self) -> float:
        if math.isinf(self.step):
            return math.inf
        return (self.step - self.bound) / self.step if self.step else 0.0

    @property
    def done(self) -> bool:
        """Nothing is left to do: the gap is reached, or no answer exists."""
        return self.infeasible or self.current_gap <= self.gap

    def spend(self, work: float) -> bool:
        """Count work that was done; True when the solve is over."""
        self.spent += work
        return self.over

    @property
    def over(self) -> bool:
        self.cut_off = self.cut_off or time.perf_counter() >= self.deadline
        return self.done or self.cut_off or self.spent >= self.allowed

    def solution(self) -> PipelineSolution:
        """The solution that the incumbent supports, no more. Raises ProblemError if the plan were not legal, which is a mistake here."""
        seconds = time.perf_counter() - self.began
        if self.orders is None:
            status = Status.INFEASIBLE if self.infeasible else Status.UNKNOWN
            return PipelineSolution(
                None, None, self.bound, math.inf, status, seconds, self._lack(), self.spent, self.cut_off, self.smallest_limit
            )  # fmt: skip
        modes = tuple(mode for mix in self.mixes for mode in mix.modes)
        plan = check_legal(self.problem, PipelinePlan(self.cut, modes, decoded(self.orders, self.problem)))
        gap = self.current_gap
        bound = self.step if gap <= SOLVERS.tight else self.bound
        status = Status.OPTIMAL if gap <= SOLVERS.negligible else Status.FEASIBLE
        gap = (self.step - bound) / self.step if self.step else 0.0
        return PipelineSolution(plan, self.step, bound, gap, status, seconds, self.message, self.spent, self.cut_off)

    def _lack(self) -> str:
        if self.message:
            return self.message
        if self.infeasible:
            return f"no cut lets a device hold one microbatch within the limit {self.problem.limit:g}"
        return "no pipeline within the limit was found in the time given"

    def _tell(self) -> None:
        assert self.bound <= self.step * (1.0 + 2 * SOLVERS.tight), "a bound is above a step that was found"
        self.bound = min(self.bound, self.step)
        if self.progress is not None:
            step = None if math.isinf(self.step) else self.step
            self.progress(step, self.bound, self.current_gap, time.perf_counter() - self.began)
