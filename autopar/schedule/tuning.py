"""The best schedule of an assignment: coordinate search over the limits of the passes, then local search.

More bytes ahead hide collectives and cost memory. Larger buckets save latency and start later. Deferred operators fill gaps and delay the
reductions of gradients. One limit is changed at a time, from the best so far, while that helps. In the end ``improve_order`` changes the
list itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from autopar.effort import Budget, unlimited
from autopar.graph import Graph
from autopar.schedule import Assignment, Limits, Memory, Schedule, Segment, Slot, between, memory, ordered, simulated, step_seconds
from autopar.schedule.bucketing import size
from autopar.schedule.in_place import assign_in_place, clear_in_place
from autopar.schedule.local_search import improve_order, saved_at_most, usual_moves
from autopar.schedule.passes import Placed, default_limits
from autopar.schedule.settings import BESIDE, EQUAL, HALVINGS, HOPELESS, LADDERS, LITTLE, MOVED, NEAR, PLACED, REORDERED
from cost_models import Machine

LEAN = Limits(bucket_bytes=0, ahead_bytes=0, aside_bytes=0, summed_bytes=0)
"""The limits under which a schedule needs least memory."""
SIZES = ("peak", "parameters", "gradients", "optimizer", "activations", "temporaries")
"""The sizes in ``Memory``."""
Placements = tuple[tuple[float, Schedule], ...]
"""Lists of samples, with their weights."""


@dataclass(frozen=True)
class Sample:
    """A graph to schedule, with its assignment and the weight of its schedule.

    The graph that is planned has weight 1. Graphs with fewer of its equal layers have weights of both signs: their sum is the line through
    them at full depth.
    """

    weight: float
    graph: Graph
    assignment: Assignment


@dataclass(frozen=True)
class ScheduledPlan:
    """The schedule of an assignment with what it costs.

    Args:
        assignment: of the graph that is searched.
        schedule, slots: of the graph that is planned; if ``estimated`` of one with fewer of its equal layers. The list has no ``free``
            yet.
        limits: those of the passes; the schedule's own allow for calls that were joined later.
        seconds: the objective: the step, or under the communication model the sum of its collectives; of several microbatches the
            share of one.
        placed_seconds: before local search: others are compared with it while limits are tried.
        samples: the schedules from which seconds and memory follow, with their weights: see ``Sample``.
    """

    assignment: Assignment
    schedule: Schedule
    limits: Limits
    slots: tuple[Slot, ...]
    seconds: float
    step_seconds: float
    placed_seconds: float
    memory: Memory
    samples: tuple[tuple[float, Schedule], ...]

    @property
    def estimated(self) -> bool:
        """Whether seconds and memory follow from those of graphs with fewer layers."""
        return len(self.samples) > 1

    def busiest_seconds(self) -> float:
        """Seconds of work of the busiest stream, without latencies, which buckets share. No order takes less."""
        found: dict[str, float] = {}
        for weight, schedule in self.samples:
            calls = {call.id: call for call in schedule.calls}
            for item in schedule.instructions:
                call = calls[item.of] if item.kind == "start" else None
                shared = schedule.machine.latency_seconds(call.kind, call.axes) if call is not None else 0.0
                for stream in item.streams if item.kind in ("run", "add", "start") else ():
                    found[stream] = found.get(stream, 0.0) + weight * schedule.times(item) * max(item.seconds - shared, 0.0)
        return max(found.values(), default=0.0)

    def better(self, other: ScheduledPlan | None, limit: int) -> bool:
        """Whether this plan is the one to keep.

        A plan that fits comes first, then the faster one, then the one of less memory, then the one that defers less: its operators read
        what is still in the cache.
        """
        if other is None:
            return True
        fits = self.memory.peak <= limit
        if fits != (other.memory.peak <= limit):
            return fits
        if fits and abs(self.seconds - other.seconds) > EQUAL * other.seconds:
            return self.seconds < other.seconds
        mine, theirs = ((item.memory.peak, item.limits.aside_bytes) for item in (self, other))
        return mine < theirs


class LimitSearch:
    """Coordinate search over the limits of the passes, for one assignment.

    Memory is counted only for lists that are fast enough to be kept.

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
        self.samples = [(one.weight, Placed(ordered(one.graph, one.assignment, machine))) for one in samples]
        self.assignment, self.machine, self.optimizer, self.limit = assignment, machine, optimizer, limit
        self.best: ScheduledPlan | None = None
        self.looked: set[Limits] = set()
        self.least_seconds = math.inf
        """Seconds of the fastest list, whether it fits or not."""
        self._improved: tuple[ScheduledPlan, ScheduledPlan] | None = None
        """The best plan that local search was last given, and its result."""

    @cached_property
    def least(self) -> int:
        """Bytes that it holds under any limits."""
        return round(sum(weight * between(sample.first, self.optimizer) for weight, sample in self.samples))

    @cached_property
    def most(self) -> Mapping[str, int]:
        """The bytes beyond which a limit changes nothing: of all calls of the segment that has most, and of all values."""
        first, sent = self.samples[-1][1].first, dict[Segment, int]()
        for item in first.instructions:
            if item.kind == "start":
                sent[item.segment] = sent.get(item.segment, 0) + size(first.collectives[item.of])
        calls, made = max(sent.values(), default=0), sum(value.bytes for value in first.values.values())
        return {"ahead_bytes": calls, "aside_bytes": made, "bucket_bytes": calls}

    @cached_property
    def working(self) -> float:
        """Seconds that its operators alone take, under any limits."""
        found = 0.0
        for weight, sample in self.samples:
            runs = sum(item.seconds for item in sample.first.instructions if item.kind == "run")
            found += weight * (runs + sample.first.optimizer_seconds(self.optimizer) / sample.first.graph.microbatches)
        return found

    def _at_best(self, gain: float) -> bool:
        """Whether the best takes hardly longer than its operators alone."""
        return gain > 0.0 and self.best is not None and self.best.seconds * (1 - gain) <= self.working

    def _ladder(self, name: str, rungs: Sequence[int]) -> Sequence[int]:
        """The values that are tried for a limit. A small model has the same under every memory limit that is enough for them."""
        if self.most[name] > LITTLE:
            return _within(rungs, self.limit)
        return tuple(value for value in _within(rungs, self.most[name]) if value <= self.limit)

    def look(self, limits: Limits) -> float:
        """Schedules under some limits and keeps the result if it is better; its seconds."""
        self.looked.add(limits)
        placed = tuple((weight, sample.under(limits)) for weight, sample in self.samples)
        self.budget.charge(PLACED * sum(len(one.instructions) for _, one in placed))
        step, seconds = self._seconds(placed)
        self.least_seconds = min(self.least_seconds, seconds)
        best = self.best
        if best is None or best.memory.peak > self.limit or seconds <= best.seconds * (1 + EQUAL):
            self._keep(self._timed(limits, placed, step, seconds))
        return seconds

    def _keep(self, found: ScheduledPlan) -> None:
        """Takes a plan in if it is better. One of several microbatches that does not fit is tried with smaller sums."""
        if found.better(self.best, self.limit):
            self.best = found
        excess = found.memory.peak - self.limit
        if excess > 0 and found.limits.summed_bytes and found.schedule.sums and not found.estimated:
            less = replace(found.limits, summed_bytes=max(_summed(found.schedule) - excess, 0))
            if less not in self.looked:
                self.look(less)

    def _seconds(self, placed: Placements) -> tuple[float, float]:
        """Seconds of the step, and of the objective."""
        step = sum(weight * step_seconds(one, self.optimizer) for weight, one in placed)
        whole = step if self.machine.overlaps else sum(weight * one.communication_seconds() for weight, one in placed)
        return step, whole / placed[-1][1].graph.microbatches

    def _timed(self, limits: Limits, placed: Placements, step: float, seconds: float) -> ScheduledPlan:
        """The plan of lists in which everything has its place."""
        self.budget.charge(PLACED * sum(len(schedule.instructions) for _, schedule in placed))
        made = tuple((weight, assign_in_place(schedule)) for weight, schedule in placed)
        held = _sum_of([(weight, memory(schedule, self.optimizer)) for weight, schedule in made])
        whole = made[-1][1]
        return ScheduledPlan(self.assignment, whole, limits, simulated(whole), seconds, step, seconds, held, made)

    def run(self, start: Limits | None, tries: int, beside: float = math.inf, gain: float = 0.0, *, improve: bool = True) -> ScheduledPlan:
        """The best of the limits tried so far and a few more: see ``best_schedule``.

        Args:
            gain: relative; a plan that could gain no more has no other limits tried, though some may hold less.
            improve: whether local search follows, where it may make this the best.
        """
        found = self._run(start, tries, beside, gain)
        hopeful = found.seconds <= REORDERED * beside or found.seconds - saved_at_most(found.schedule, found.step_seconds) <= beside
        if not (hopeful and improve):
            return found
        if self._improved is None or self._improved[0] is not found:
            self._improved = found, improved(found, self.optimizer, self.limit, self.budget)
        return self._improved[1]

    def _run(self, start: Limits | None, tries: int, beside: float, gain: float) -> ScheduledPlan:
        before, timed = len(self.looked), self.machine.overlaps
        first = LEAN if timed and self.least > self.limit else start or default_limits(self.machine)
        if first in self.looked:
            before -= 1
        else:
            self.look(first)
        assert self.best is not None
        if self.best.memory.peak > self.limit and timed and LEAN not in self.looked:
            self.look(LEAN)
            tries += 1
        begun = self.best
        if (begun.memory.peak > self.limit and begun.limits == LEAN) or begun.seconds > HOPELESS * beside:
            return begun
        while timed and not self._at_best(gain):
            last = self.best
            for name, ladder in LADDERS.items():
                value, low, high = getattr(self.best.limits, name), -math.inf, math.inf
                for step, limits in enumerate(_steps(self.best.limits, name, self._ladder(name, ladder))):
                    rung, left = getattr(limits, name), len(self.looked) - before <= tries and not self.budget.over
                    if limits not in self.looked and low < rung < high and left and self.look(limits) > NEAR * self.best.seconds:
                        low, high = (max(low, rung), high) if rung < value else (low, min(high, rung))
                    now = self.best.seconds
                    trails = step + 1 >= BESIDE and self.least_seconds > NEAR * beside and begun.seconds - now < now - beside
                    if trails or self._at_best(gain):
                        return self.best
            if self.best is last:
                break
        return self.best


def _sum_of(found: Sequence[tuple[float, Memory]]) -> Memory:
    """Memory by the weights of samples; its biggest items are the last one's."""
    if len(found) == 1:
        return found[0][1]
    sizes = {name: sum(weight * getattr(one, name) for weight, one in found) for name in SIZES}
    return replace(found[-1][1], **{name: max(round(size), 0) for name, size in sizes.items()})


def best_schedule(
    graph: Graph, assignment: Assignment, machine: Machine, optimizer: str, limit: int, *, start: Limits | None = None, tries: int = 100,
    beside: float = math.inf, samples: Sequence[Sample] = (), budget: Budget | None = None,
) -> ScheduledPlan:  # fmt: skip
    """The best schedule found for an assignment within ``limit`` bytes a rank.

    Args:
        samples: the graphs scheduled for it, where that is not the assignment of ``graph`` itself.
        start: the limits to begin from.
        tries: how many others are looked at, at most, beside the leanest where the first needs too much memory; none under the
            communication model, where nothing overlaps.
        beside: ``placed_seconds`` of the best schedule known. A plan that takes ``HOPELESS`` times as long has no other limits tried. One
            that trails by more than it gains is left early (``NEAR``).
        budget: see ``LimitSearch``.
    """
    tuning = LimitSearch(assignment, samples or (Sample(1.0, graph, assignment),), machine, optimizer, limit, budget=budget)
    return tuning.run(start, tries, beside)


def improved(
    found: ScheduledPlan, optimizer: str, limit: int, budget: Budget, effort: int = 1, *, keep_program_order: bool = True
) -> ScheduledPlan:  # fmt: skip
    """A plan after local search (``improve_order``) where the result fits and is better; an estimated plan as it is.

    Args:
        effort: times as many moves as usual.
    """
    if found.estimated or not found.schedule.machine.overlaps:
        return found
    before = clear_in_place(found.schedule)
    changed = improve_order(before, optimizer, limit, effort * usual_moves(before), keep_program_order=keep_program_order)
    budget.charge(MOVED * changed.moves * len(before.instructions))
    step = step_seconds(changed.schedule, optimizer)
    seconds = step / changed.schedule.graph.microbatches
    if seconds >= found.seconds * (1 - EQUAL) and found.memory.peak <= limit:
        return found
    made = assign_in_place(changed.schedule)
    weight = found.samples[0][0]
    plan = replace(
        found, schedule=made, slots=simulated(made), seconds=seconds, step_seconds=step, memory=memory(made, optimizer),
        samples=((weight, made),),
    )  # fmt: skip
    return plan if plan.memory.peak <= limit and plan.better(found, limit) else found


def _summed(schedule: Schedule) -> int:
    """Bytes that sums hold beyond the gradients that leave."""
    leaving = {value for output, value in schedule.outputs if output.kind == "gradient"}
    sizes = (sum(schedule.values[name].bytes for name in names) for names in (schedule.sums, leaving))
    return max(next(sizes) - next(sizes), 0)


def _within(ladder: Sequence[int], most: int) -> Sequence[int]:
    """The values that are tried where none beyond ``most`` bytes is another: see ``HALVINGS``."""
    if ladder[-1] <= most:
        return ladder
    halves = [most >> power for power in range(HALVINGS, -1, -1)]
    return tuple(sorted({value for value in ladder if value <= 1}.union(halves)))


def _steps(limits: Limits, name: str, ladder: Sequence[int]) -> Iterator[Limits]:
    """The same with one limit on another rung: a few near ones, then at nothing, since where all values are small those between are alike,
    then the others. What is beyond the last is as that."""
    value = getattr(limits, name)
    place = min(range(len(ladder)), key=lambda index: abs(ladder[index] - value))
    near = sorted(range(len(ladder)), key=lambda rung: (abs(rung - place), -rung))
    for rung in dict.fromkeys((*near[:5], 0, *near)):
        changed: dict[str, Any] = {name: ladder[rung]}
        if ladder[rung] != min(value, ladder[-1]):
            yield replace(limits, **changed)
