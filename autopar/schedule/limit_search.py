"""The best schedule of an assignment: coordinate search over the limits of the passes, then local search.

More bytes ahead hide collectives and cost memory. Larger buckets save latency and start later. Deferred operators fill gaps and delay the
reductions of gradients. One limit is changed at a time, from the best so far, while that helps. In the end ``improve_order`` changes the
list itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from autopar.effort import Budget, unlimited
from autopar.graph import Graph
from autopar.schedule.assignment import Assignment
from autopar.schedule.in_place import assign_in_place, clear_in_place
from autopar.schedule.instructions import LEAN_LIMITS, Limits
from autopar.schedule.limit_ladders import effective_bytes, fit_ladder, neighbour_limits
from autopar.schedule.liveness import Memory, between, memory
from autopar.schedule.local_search import improve_order, saved_at_most, usual_moves
from autopar.schedule.passes import Placed, default_limits, ordered
from autopar.schedule.schedule import Schedule
from autopar.schedule.scheduled_plan import Sample, ScheduledPlan, sum_memory
from autopar.schedule.settings import (
    EQUAL_SECONDS,
    HOPELESS_FACTOR,
    LIMIT_LADDERS,
    LOCAL_SEARCH_FACTOR,
    MEMORY_WORK,
    MOVE_WORK,
    NEAREST_RUNGS,
    PLACING_WORK,
    TRAILING_FACTOR,
)
from autopar.schedule.simulation import simulated, step_seconds
from cost_models import Machine


@dataclass(frozen=True)
class Candidate:
    """Lists under some limits and their seconds. Their memory is not measured.

    Args:
        lists: of each sample, with its weight.
        seconds, step_seconds: see ``ScheduledPlan``.
    """

    limits: Limits
    lists: tuple[tuple[float, Schedule], ...]
    seconds: float
    step_seconds: float

    def same_lists(self, other: Candidate) -> bool:
        """Whether other limits have led to the same lists."""
        return all(mine.instructions == theirs.instructions for (_, mine), (_, theirs) in zip(self.lists, other.lists, strict=True))


class LimitSearch:
    """Coordinate search over the limits of the passes, for one assignment.

    Memory is measured only of candidates that are fast enough to be kept. Where all bytes that limits allow in flight fit beside the best
    plan, it is measured in the end: of several candidates that are each faster than the one before, only of the last.

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
        self.best_candidate: Candidate | None = None
        """The candidate of ``best``."""
        self.fastest: Candidate | None = None
        """The fastest candidate that should fit; ``best`` is an earlier one until its memory is measured."""
        self.tried: set[Limits] = set()
        self.measured: set[Limits] = set()
        """The limits whose memory was measured."""
        self.fastest_seconds = math.inf
        """Seconds of the fastest candidate, whether it fits or not."""
        self.incumbent_seconds = math.inf
        """``placed_seconds`` of the best schedule known, of any assignment."""
        self.trusts = True
        """Whether every candidate fitted that should."""
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
        """Whether the fastest candidate takes hardly longer than the operators alone."""
        return gain > 0.0 and self.fastest is not None and self.fastest.seconds * (1 - gain) <= self.operator_seconds

    def ladder(self, name: str) -> Sequence[int]:
        """The values that are tried for a limit."""
        return fit_ladder(LIMIT_LADDERS[name], self.effective_bytes[name], self.limit)

    def try_limits(self, limits: Limits) -> float:
        """Schedules under some limits and keeps the result if it is better; its seconds."""
        self.tried.add(limits)
        candidate = self._place(limits)
        self.fastest_seconds = min(self.fastest_seconds, candidate.seconds)
        self._offer(candidate)
        return candidate.seconds

    def _offer(self, candidate: Candidate) -> None:
        """Keeps a candidate that is faster than the fastest, or as fast with less in flight. Measures it where it may not fit."""
        limits = candidate.limits
        if self.best is None or self.fastest is None or self.best.memory.peak > self.limit:
            self._measure(candidate)
        elif candidate.seconds <= self.fastest.seconds * (1 - EQUAL_SECONDS):
            if self.trusts and self.best.memory.peak + _bytes_allowed(limits) <= self.limit:
                self.fastest = candidate
            else:
                self.measure_memory()
                self._measure(candidate)
        elif (
            candidate.seconds <= self.fastest.seconds * (1 + EQUAL_SECONDS)
            and _bytes_allowed(limits) < _bytes_allowed(self.fastest.limits)
            and candidate.seconds <= TRAILING_FACTOR * self.incumbent_seconds
        ):
            self.measure_memory()
            if not candidate.same_lists(self.fastest):
                self._measure(candidate)
            elif limits.aside_bytes < self.fastest.limits.aside_bytes:
                self.measured.add(limits)
                self.fastest, self.best_candidate, self.best = candidate, candidate, self.best.under(limits)

    def measure_memory(self) -> ScheduledPlan:
        """Measures the memory of the fastest candidate, and of the next fastest where it does not fit; the best plan."""
        while self.fastest is not None and self.fastest.limits not in self.measured:
            candidate = self.fastest
            self._measure(candidate)
            if self.best is None or self.best.memory.peak > self.limit or self.best.seconds > candidate.seconds:
                self.trusts = False
        assert self.best is not None
        return self.best

    def _place(self, limits: Limits) -> Candidate:
        lists = tuple(
            (weight, sample.under(_reduce_held(limits, left_out)))
            for (weight, sample), left_out in zip(self.samples, self.left_out, strict=True)
        )
        self.budget.charge(PLACING_WORK * sum(len(schedule.instructions) for _, schedule in lists))
        return self._simulate(limits, lists)

    def _simulate(self, limits: Limits, lists: tuple[tuple[float, Schedule], ...]) -> Candidate:
        step = sum(weight * step_seconds(schedule, self.optimizer) for weight, schedule in lists)
        objective = step
        if not self.machine.overlaps:
            objective = sum(weight * schedule.communication_seconds() for weight, schedule in lists)
        return Candidate(limits, lists, objective / lists[-1][1].graph.microbatches, step)

    def _measure(self, candidate: Candidate) -> None:
        """Measures the memory of a candidate and keeps it if it is better than the best. Tries smaller limits where it does not fit."""
        limits = candidate.limits
        self.measured.add(limits)
        plan, parts = self._plan(candidate)
        whole, held = plan.schedule, plan.memory
        self.left_out = [(held.peak - held.optimizer) - (part.peak - part.optimizer) for part in parts]
        if plan.better(self.best, self.limit):
            self.best, self.best_candidate = plan, candidate
        self.fastest = self.best_candidate
        excess = held.peak - self.limit
        if excess > 0 and limits.ahead_bytes and self.least_bytes <= self.limit:
            self._try_new(replace(limits, held_bytes=max(self.limit - held.optimizer, 1)))
        if excess > 0 and limits.summed_bytes and whole.sums and not plan.estimated:
            self._try_new(replace(limits, summed_bytes=max(_summed_bytes(whole) - excess, 0)))

    def _try_new(self, limits: Limits) -> None:
        if limits not in self.tried:
            self.try_limits(limits)

    def _plan(self, candidate: Candidate) -> tuple[ScheduledPlan, Sequence[Memory]]:
        """The plan of a candidate, and the memory of each sample."""
        self.budget.charge(MEMORY_WORK * sum(len(schedule.instructions) for _, schedule in candidate.lists))
        lists = tuple((weight, assign_in_place(schedule)) for weight, schedule in candidate.lists)
        parts = [memory(schedule, self.optimizer) for _, schedule in lists]
        held = sum_memory([(weight, part) for (weight, _), part in zip(lists, parts, strict=True)])
        whole = lists[-1][1] if len(lists) == 1 else replace(lists[-1][1], limits=candidate.limits)
        return ScheduledPlan(
            self.assignment, whole, candidate.limits, simulated(whole), candidate.seconds, candidate.step_seconds, candidate.seconds,
            held, lists,
        ), parts  # fmt: skip

    def improved(self) -> ScheduledPlan:
        """The best plan after local search, where the result fits."""
        assert self.best is not None and self.best_candidate is not None
        if self.best.estimated:
            return self.best
        if self._improved is None or self._improved[0] is not self.best:
            ((weight, placed),) = self.best_candidate.lists
            result = improve_order(placed.under(self.best_candidate.limits), self.optimizer, self.limit)
            self.budget.charge(MOVE_WORK * result.moves * len(result.schedule.instructions))
            candidate = self._simulate(self.best_candidate.limits, ((weight, result.schedule),))
            hopeful = candidate.seconds < self.best.seconds * (1 - EQUAL_SECONDS) or self.best.memory.peak > self.limit
            plan = self._plan(candidate)[0] if hopeful else self.best
            gains = plan.memory.peak <= self.limit and plan.better(self.best, self.limit)
            self._improved = self.best, replace(plan, placed_seconds=self.best.seconds) if gains else self.best
        return self._improved[1]

    def run(
        self, start: Limits | None, tries: int, incumbent_seconds: float = math.inf, gain: float = 0.0, *, improve: bool = True
    ) -> ScheduledPlan:  # fmt: skip
        """The best of the limits tried so far and a few more: see ``best_schedule``.

        Where a candidate did not fit that should, all is done again with each candidate measured at once.

        Args:
            gain: relative; a plan that could gain no more has no other limits tried, though some may hold less.
            improve: whether local search follows, where it may make this the best.
        """
        before, trusted = (self.best, self.fastest, self.best_candidate, set(self.measured), set(self.tried)), self.trusts
        plan = self._descend(start, tries, incumbent_seconds, gain)
        if self.trusts is not trusted:
            self.best, self.fastest, self.best_candidate, self.measured, self.tried = before
            plan = self._descend(start, tries, incumbent_seconds, gain)
        near = plan.seconds <= LOCAL_SEARCH_FACTOR * incumbent_seconds
        hopeful = near or plan.seconds - saved_at_most(plan.schedule, plan.step_seconds) <= incumbent_seconds
        return self.improved() if hopeful and improve else plan

    def _descend(self, start: Limits | None, tries: int, incumbent_seconds: float, gain: float) -> ScheduledPlan:
        before, trusted, self.incumbent_seconds = len(self.tried), self.trusts, incumbent_seconds
        overlaps = self.machine.overlaps
        first = LEAN_LIMITS if overlaps and self.least_bytes > self.limit else start or default_limits(self.machine)
        if first in self.tried:
            before -= 1
        else:
            self.try_limits(first)
        begun = self.measure_memory()
        if begun.memory.peak > self.limit and overlaps and LEAN_LIMITS not in self.tried:
            self.try_limits(LEAN_LIMITS)
            tries += 1
            begun = self.measure_memory()
        if (begun.memory.peak > self.limit and begun.limits == LEAN_LIMITS) or begun.seconds > HOPELESS_FACTOR * incumbent_seconds:
            return begun
        while overlaps and not self._is_optimal(gain):
            last = self.fastest
            for name in LIMIT_LADDERS:
                assert self.fastest is not None
                value, low, high = getattr(self.fastest.limits, name), -math.inf, math.inf
                for step, limits in enumerate(neighbour_limits(self.fastest.limits, name, self.ladder(name))):
                    rung, left = getattr(limits, name), len(self.tried) - before <= tries and not self.budget.over
                    new = left and low < rung < high and limits not in self.tried
                    if new and self.try_limits(limits) > TRAILING_FACTOR * self.fastest.seconds:
                        low, high = (max(low, rung), high) if rung < value else (low, min(high, rung))
                    now = self.fastest.seconds
                    slow = self.fastest_seconds > TRAILING_FACTOR * incumbent_seconds and begun.seconds - now < now - incumbent_seconds
                    trails = step + 1 >= NEAREST_RUNGS and slow
                    if self.trusts is not trusted or trails or self._is_optimal(gain):
                        return self.measure_memory()
            if self.fastest is last:
                break
        return self.measure_memory()


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


def improve_plan(plan: ScheduledPlan, machine: Machine, optimizer: str, limit: int, effort: int, budget: Budget) -> ScheduledPlan:
    """A plan after local search with more moves, where it is faster and fits. An estimated plan stays as it is.

    Args:
        limit: bytes of a rank.
        effort: times as many moves as usual.
    """
    if plan.estimated or not machine.overlaps:
        return plan
    before = clear_in_place(plan.schedule)
    result = improve_order(before, optimizer, limit, effort * usual_moves(before), keep_program_order=False)
    budget.charge(MOVE_WORK * result.moves * len(before.instructions))
    schedule = assign_in_place(result.schedule)
    step, held = step_seconds(schedule, optimizer), memory(schedule, optimizer)
    if step >= plan.step_seconds * (1 - EQUAL_SECONDS) or held.peak > limit:
        return plan
    return replace(
        plan, schedule=schedule, slots=simulated(schedule), seconds=step / schedule.graph.microbatches, step_seconds=step, memory=held,
        samples=((plan.samples[0][0], schedule),),
    )  # fmt: skip


def _reduce_held(limits: Limits, left_out: int) -> Limits:
    """The limits for a sample that holds ``left_out`` bytes less."""
    return replace(limits, held_bytes=max(limits.held_bytes - left_out, 1)) if limits.held_bytes else limits


def _summed_bytes(schedule: Schedule) -> int:
    """Bytes that sums hold beyond the gradients that leave."""
    leaving = {value for output, value in schedule.outputs if output.kind == "gradient"}
    sums, left = (sum(schedule.values[name].bytes for name in names) for names in (schedule.sums, leaving))
    return max(sums - left, 0)


def _bytes_allowed(limits: Limits) -> int:
    """The most bytes that some limits allow in buckets, in flight and deferred."""
    return limits.bucket_bytes + limits.ahead_bytes + limits.aside_bytes
