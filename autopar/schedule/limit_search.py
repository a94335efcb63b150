"""The best schedule of an assignment: coordinate search over the limits of the passes, then local search.

More bytes ahead hide collectives and cost memory. Larger buckets save latency and start later. Deferred operators fill gaps and delay the
reductions of gradients. One limit is changed at a time, from the best so far, while that helps. In the end ``improve_order`` changes the
list itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from autopar.cost_models import Machine
from autopar.effort import Budget, unlimited
from autopar.graph import Graph
from autopar.schedule.accumulating import least_summed
from autopar.schedule.assignment import Assignment
from autopar.schedule.expanding import expand_as_read
from autopar.schedule.in_place import assign_in_place, clear_in_place
from autopar.schedule.instructions import LEAN_LIMITS, Limits
from autopar.schedule.limit_ladders import effective_bytes, fit_ladder, neighbour_limits
from autopar.schedule.liveness import between, memory
from autopar.schedule.local_search import improve_order
from autopar.schedule.passes import Placed, default_limits, ordered
from autopar.schedule.schedule import Schedule
from autopar.schedule.scheduled_plan import Sample, ScheduledPlan, sum_memory
from autopar.schedule.settings import (
    EQUAL_SECONDS,
    HOPELESS_FACTOR,
    LIMIT_LADDERS,
    LIST_WORK,
    LOCAL_SEARCH_FACTOR,
    MOVE_WORK,
    NEAREST_RUNGS,
    TRAILING_FACTOR,
)
from autopar.schedule.simulation import simulated, step_seconds


class LimitSearch:
    """Coordinate search over the limits of the passes, for one assignment.

    Memory is measured only of lists that are at least as fast as the best.

    Args:
        samples: the graphs that are scheduled for it.
        limit: bytes of a rank.
        budget: counts the work; other limits are tried while it lasts.
    """

    def __init__(
        self, assignment: Assignment, samples: Sequence[Sample], machine: Machine, optimizer: str, limit: int,
        budget: Budget | None = None,
    ) -> None:  # fmt: skip
        self.budget = budget or unlimited()
        self.samples = [(sample.weight, Placed(ordered(sample.graph, sample.assignment, machine))) for sample in samples]
        self.assignment, self.machine, self.optimizer, self.limit = assignment, machine, optimizer, limit
        self.best: ScheduledPlan | None = None
        self.tried: set[Limits] = set()
        self.fastest_seconds = math.inf
        """Seconds of the fastest list, whether it fits or not."""
        self._improved: tuple[ScheduledPlan, ScheduledPlan] | None = None
        """The best plan that local search was last given, and its result."""
        self.left_out = [0] * len(samples)
        """Bytes at the peak of layers that a sample does not have."""

    @cached_property
    def least_bytes(self) -> int:
        """Bytes that a rank holds under any limits."""
        return round(sum(weight * between(sample.first, self.optimizer) for weight, sample in self.samples))

    @cached_property
    def effective_bytes(self) -> Mapping[str, int]:
        """See ``limit_ladders.effective_bytes``."""
        return effective_bytes(self.samples[-1][1].first)

    @cached_property
    def operator_seconds(self) -> float:
        """Seconds that the operators alone take, under any limits."""
        total = 0.0
        for weight, sample in self.samples:
            runs = sum(item.seconds for item in sample.first.instructions if item.kind == "run")
            total += weight * (runs + sample.first.optimizer_seconds(self.optimizer) / sample.first.graph.microbatches)
        return total

    def _is_optimal(self, gain: float) -> bool:
        """Whether the best plan takes hardly longer than the operators alone."""
        return gain > 0.0 and self.best is not None and self.best.seconds * (1 - gain) <= self.operator_seconds

    def ladder(self, name: str) -> Sequence[int]:
        """The values that are tried for a limit."""
        return fit_ladder(LIMIT_LADDERS[name], self.effective_bytes[name], self.limit)

    def try_limits(self, limits: Limits) -> float:
        """Schedules under some limits and keeps the result if it is better; its seconds."""
        self.tried.add(limits)
        lists = tuple(
            (weight, sample.under(_reduce_held(limits, left_out)))
            for (weight, sample), left_out in zip(self.samples, self.left_out, strict=True)
        )
        self.budget.charge(LIST_WORK * sum(len(schedule.instructions) for _, schedule in lists))
        step = sum(weight * step_seconds(schedule, self.optimizer) for weight, schedule in lists)
        objective = step if self.machine.overlaps else sum(weight * schedule.communication_seconds() for weight, schedule in lists)
        seconds = objective / lists[-1][1].graph.microbatches
        self.fastest_seconds = min(self.fastest_seconds, seconds)
        best = self.best
        if best is None or best.memory.peak > self.limit or seconds <= best.seconds * (1 + EQUAL_SECONDS):
            self._offer(self._measure(limits, lists, seconds, step))
        return seconds

    def _offer(self, plan: ScheduledPlan) -> None:
        """Keeps a plan if it is better than the best. Tries smaller limits where it does not fit, and one under the least would."""
        if plan.better(self.best, self.limit):
            self.best = plan
        limits, excess = plan.limits, plan.memory.peak - self.limit
        if excess > 0 and not self._may_fit():
            return
        if excess > 0 and limits.ahead_bytes and self.least_bytes <= self.limit:
            self._try_new(replace(limits, held_bytes=max(self.limit - plan.memory.optimizer, 1)))
        if excess > 0 and limits.summed_bytes and plan.schedule.sums and not plan.estimated:
            self._try_new(replace(limits, summed_bytes=max(_summed_bytes(plan.schedule) - excess, 0)))

    def _may_fit(self) -> bool:
        """Whether any limits do: those that hold least are tried, if none has fitted yet."""
        if self.machine.overlaps and self.best is not None and self.best.memory.peak > self.limit:
            self._try_new(LEAN_LIMITS)
            return self.best.memory.peak <= self.limit
        return True

    def _try_new(self, limits: Limits) -> None:
        if limits not in self.tried:
            self.try_limits(limits)

    def _measure(self, limits: Limits, placed: Sequence[tuple[float, Schedule]], seconds: float, step: float) -> ScheduledPlan:
        """The plan of placed lists, with their memory."""
        self.budget.charge(LIST_WORK * sum(len(schedule.instructions) for _, schedule in placed))
        lists = tuple((weight, schedule.once(assign_in_place).under(schedule.limits)) for weight, schedule in placed)
        parts = [memory(schedule, self.optimizer) for _, schedule in lists]
        held = sum_memory([(weight, part) for (weight, _), part in zip(lists, parts, strict=True)])
        self.left_out = [(held.peak - held.optimizer) - (part.peak - part.optimizer) for part in parts]
        whole = lists[-1][1].under(limits)
        return ScheduledPlan(self.assignment, whole, limits, whole.once(simulated), seconds, step, seconds, held, lists)

    def run(
        self, start: Limits | None, tries: int, incumbent_seconds: float = math.inf, gain: float = 0.0, *, improve: bool = True
    ) -> ScheduledPlan:  # fmt: skip
        """The best of the limits tried so far and a few more: see ``best_schedule``.

        Args:
            gain: relative; a plan that could gain no more has no other limits tried, though some may hold less.
            improve: whether local search follows, where it may make this the best.
        """
        plan = self._descend(start, tries, incumbent_seconds, gain)
        if not improve or plan.seconds > LOCAL_SEARCH_FACTOR * incumbent_seconds:
            return plan
        if self._improved is None or self._improved[0] is not plan:
            self._improved = plan, improve_plan(plan, self.optimizer, self.limit, self.budget)
        return self._improved[1]

    def _descend(self, start: Limits | None, tries: int, incumbent_seconds: float, gain: float) -> ScheduledPlan:
        before, overlaps, knew_least = len(self.tried), self.machine.overlaps, LEAN_LIMITS in self.tried
        first = LEAN_LIMITS if overlaps and self.least_bytes > self.limit else start or default_limits(self.machine)
        if first in self.tried:
            before -= 1
        else:
            self.try_limits(first)
        assert self.best is not None
        tries += LEAN_LIMITS in self.tried and not knew_least and first != LEAN_LIMITS
        begun = self.best
        if (begun.memory.peak > self.limit and begun.limits == LEAN_LIMITS) or begun.seconds > HOPELESS_FACTOR * incumbent_seconds:
            return begun
        while overlaps and not self._is_optimal(gain):
            last = self.best
            for name in LIMIT_LADDERS:
                value, low, high = getattr(self.best.limits, name), -math.inf, math.inf
                for step, limits in enumerate(neighbour_limits(self.best.limits, name, self.ladder(name))):
                    rung, left = getattr(limits, name), len(self.tried) - before <= tries and not self.budget.over
                    new = left and low < rung < high and limits not in self.tried
                    if new and self.try_limits(limits) > TRAILING_FACTOR * self.best.seconds:
                        low, high = (max(low, rung), high) if rung < value else (low, min(high, rung))
                    now = self.best.seconds
                    slow = self.fastest_seconds > TRAILING_FACTOR * incumbent_seconds and begun.seconds - now < now - incumbent_seconds
                    if (step + 1 >= NEAREST_RUNGS and slow) or self._is_optimal(gain):
                        return self.best
            if self.best is last:
                break
        return self.best


def best_schedule(
    graph: Graph, assignment: Assignment, machine: Machine, optimizer: str, limit: int, *, start: Limits | None = None, tries: int = 100,
    incumbent_seconds: float = math.inf, samples: Sequence[Sample] = (), budget: Budget | None = None,
) -> ScheduledPlan:  # fmt: skip
    """The best schedule found for an assignment within ``limit`` bytes a rank.

    Args:
        start: the limits to begin from.
        tries: other limits that are tried at most, beside the leanest where the first needs too much memory. None are tried under the
            communication model, where nothing overlaps.
        incumbent_seconds: ``placed_seconds`` of the best schedule known. The search ends early for a plan that trails it by more than
            ``HOPELESS_FACTOR``, or by more than ``TRAILING_FACTOR`` and its gain.
        samples: the graphs that are scheduled, where that is not ``graph`` itself.
        budget: see ``LimitSearch``.
    """
    search = LimitSearch(assignment, samples or (Sample(1.0, graph, assignment),), machine, optimizer, limit, budget=budget)
    return search.run(start, tries, incumbent_seconds)


def improve_plan(
    plan: ScheduledPlan, optimizer: str, limit: int, budget: Budget, effort: int = 1, *, keep_program_order: bool = True
) -> ScheduledPlan:  # fmt: skip
    """A plan after local search (``improve_order``), where the result fits and is better. An estimated plan stays as it is.

    Args:
        limit: bytes of a rank.
        effort, keep_program_order: see ``improve_order``.
    """
    if plan.estimated or not plan.schedule.machine.overlaps:
        return plan
    before = clear_in_place(plan.schedule)
    result = improve_order(before, optimizer, limit, effort, keep_program_order=keep_program_order)
    budget.charge(MOVE_WORK * result.moves * len(before.instructions))
    step = step_seconds(result.schedule, optimizer)
    if step >= plan.step_seconds * (1 - EQUAL_SECONDS) and plan.memory.peak <= limit:
        return plan
    schedule = assign_in_place(result.schedule)
    improved = replace(
        plan, schedule=schedule, slots=simulated(schedule), seconds=step / schedule.graph.microbatches, step_seconds=step,
        memory=memory(schedule, optimizer), samples=((plan.samples[0][0], schedule),),
    )  # fmt: skip
    return improved if improved.memory.peak <= limit and improved.better(plan, limit) else plan


def expand_plan(plan: ScheduledPlan, optimizer: str) -> ScheduledPlan:
    """A plan whose expansions make at once what is read of them (``expand_as_read``). An estimated plan stays as it is."""
    before = clear_in_place(plan.schedule)
    made = before if plan.estimated else expand_as_read(before)
    if made is before:
        return plan
    schedule = assign_in_place(made)
    return replace(
        plan, schedule=schedule, slots=simulated(schedule), memory=memory(schedule, optimizer), samples=((plan.samples[0][0], schedule),)
    )


def _reduce_held(limits: Limits, left_out: int) -> Limits:
    """The limits for a sample that holds ``left_out`` bytes less."""
    return replace(limits, held_bytes=max(limits.held_bytes - left_out, 1)) if limits.held_bytes else limits


def _summed_bytes(schedule: Schedule) -> int:
    """Bytes that sums hold beyond the least."""
    leaving = {value for output, value in schedule.outputs if output.kind == "gradient"}
    sums = sum(schedule.values[name].bytes for name in schedule.sums)
    return max(sums - sum(least_summed(schedule, value) for value in leaving), 0)
