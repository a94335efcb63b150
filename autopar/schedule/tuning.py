"""The best schedule of an assignment: the limits of the passes are tried, since nobody knows them in advance.

What is gathered ahead hides collectives and costs memory; large buckets save latency and start late; operators set aside fill gaps and
delay the reductions of gradients. One limit is changed at a time, from the best so far, while that helps; in the end the list is changed
one move after another (``improve_order``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from autopar.effort import Budget, unlimited
from autopar.graph import Graph
from autopar.schedule import Assignment, Limits, Memory, Schedule, Slot, between, memory, ordered, simulated, step_seconds
from autopar.schedule.bucketing import size
from autopar.schedule.in_place import assign_in_place, clear_in_place
from autopar.schedule.local_search import improve_order, saved_at_most, usual_moves
from autopar.schedule.passes import Placed, default_limits
from cost_models import Machine

MIB = 2**20
LADDERS: tuple[tuple[str, tuple[int, ...]], ...] = (
    ("ahead_bytes", (0, 1, *(size * MIB for size in (25, 100, 400, 1600, 6400)))),
    ("aside_bytes", tuple(size * MIB for size in (0, 50, 200, 800))),
    ("bucket_bytes", tuple(size * MIB for size in (0, 1, 6, 25, 100))),
)
"""The values tried for each limit: from nothing, and one call at a time, to more than a large layer."""
HALVINGS = 7
"""Where the largest of them is more than the memory there is, each is half of the one above it, from all of the memory down: there some
calls may share their latency, and few bytes decide how many. The same where there is little to send or to set aside: of small models all
values would be one call, or each its own."""
LITTLE = 100 * MIB
"""Up to so many bytes it is."""
LEAN = Limits(bucket_bytes=0, ahead_bytes=0, aside_bytes=0, summed_bytes=0)
"""What a schedule keeps to that is to need little memory."""
HOPELESS = 1.5
"""Limits that are tried one by one gain less than this."""
NEAR = 1.02
"""What trails by more than this after a limit's nearest rungs were tried, and by more than that has gained, is left, unless it would not
with more memory; and beyond a rung that trails the best by as much no other is tried."""
BESIDE = 2
"""So many rungs are near."""
REORDERED = 1.1
"""What trails by more than this is not reordered (``improve_order``), unless fewer calls could save as much."""
PLACED, HELD, MOVED = 16e-6, 16e-6, 6e-9
"""Work seconds for each instruction that is placed and simulated; whose memory is asked; and for each that a judged move simulates."""
EQUAL = 1e-9
"""Relative difference of steps that are the same."""
SIZES = ("peak", "parameters", "gradients", "optimizer", "activations", "temporaries")
"""Of ``Memory``."""


@dataclass(frozen=True)
class Sample:
    """A graph to schedule, with its assignment, and how much of what its schedule takes counts: the graph that is planned counts whole;
    of shorter ones, with fewer of its equal layers, one counts negative, so that their sum is the line through them at full depth."""

    weight: float
    graph: Graph
    assignment: Assignment


@dataclass(frozen=True)
class ScheduledPlan:
    """The schedule of an assignment with what it costs.

    Args:
        assignment: of the graph that is searched.
        schedule, slots: of the graph that is planned; if ``estimated`` of one with fewer of its equal layers. The list does not say yet
            when values go (``free``).
        limits: what the passes kept to that placed everything; the schedule's own allow for calls that were joined later.
        seconds: the objective: the step, or under the communication model the sum of its collectives; of several microbatches the
            share of one.
        placed_seconds: as it was placed, before it was reordered: what others are compared with while limits are tried.
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
        """How long the operators or the busiest link have something to do, without latencies, which buckets share: whatever the order, what
        is done takes no less."""
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
        """Whether this is the one to keep: what fits before what does not, then the shorter, or where neither fits or both take as long
        the smaller, or where that is equal too the one that sets less aside: what is used soon is still in the cache."""
        if other is None:
            return True
        fits = self.memory.peak <= limit
        if fits != (other.memory.peak <= limit):
            return fits
        if fits and abs(self.seconds - other.seconds) > EQUAL * other.seconds:
            return self.seconds < other.seconds
        mine, theirs = ((item.memory.peak, item.limits.aside_bytes) for item in (self, other))
        return mine < theirs


@dataclass(frozen=True)
class _Looked:
    """Lists under some limits and how long they take; what they hold was not asked.

    Args:
        placed: of each sample, with its weight.
        seconds, step: see ``ScheduledPlan``.
    """

    limits: Limits
    placed: tuple[tuple[float, Schedule], ...]
    seconds: float
    step: float

    def same(self, other: _Looked) -> bool:
        """Whether other limits have led to the same lists."""
        return all(mine.instructions == theirs.instructions for (_, mine), (_, theirs) in zip(self.placed, other.placed, strict=True))


class LimitSearch:
    """One assignment under one limits after another.

    When values go, and so memory, is asked of what was fast enough to be kept, and where there is room for all that limits let be in
    flight only in the end: of many that are each faster than the one before, the last is asked.

    Args:
        samples: what is scheduled for it.
        limit: of bytes on a rank.
        budget: what counts the work; other limits are tried while it lasts.
    """

    def __init__(
        self, assignment: Assignment, samples: Sequence[Sample], machine: Machine, optimizer: str, limit: int,
        budget: Budget | None = None,
    ) -> None:  # fmt: skip
        self.budget = budget or unlimited()
        self.samples = [(one.weight, Placed(ordered(one.graph, one.assignment, machine))) for one in samples]
        self.assignment, self.machine, self.optimizer, self.limit = assignment, machine, optimizer, limit
        self.best: ScheduledPlan | None = None
        self.ahead: _Looked | None = None
        """The fastest so far; ``best`` is this one's or, until it is asked what it holds, an earlier one's: that of ``kept``."""
        self.kept: _Looked | None = None
        self.asked: set[Limits] = set()
        """Those that were asked what they hold."""
        self.looked: set[Limits] = set()
        self.hoped = math.inf
        """Seconds of the fastest looked at, whatever it holds."""
        self.beside = math.inf
        """``placed_seconds`` of the best schedule known, of whatever assignment: what trails does not have to hold less as well."""
        self.trusts = True
        """Whether nothing that should have fit did not."""
        self._hurried: tuple[ScheduledPlan, ScheduledPlan] | None = None
        """The best that was hurried last, and what became of it."""
        self.left_out = [0] * len(samples)
        """What layers that a sample does not have hold at the peak."""

    @cached_property
    def least(self) -> int:
        """Bytes that it holds under any limits."""
        return round(sum(weight * between(sample.first, self.optimizer) for weight, sample in self.samples))

    @cached_property
    def most(self) -> Mapping[str, int]:
        """Bytes beyond which a limit is none: of all calls of the half of a step that has more of them, and of all that is made."""
        first, sent = self.samples[-1][1].first, dict[str, int]()
        for item in first.instructions:
            if item.kind == "start":
                sent[item.half] = sent.get(item.half, 0) + size(first.collectives[item.of])
        made = sum(value.bytes for value in first.values.values())
        calls = max(sent.values(), default=0)
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
        """Whether the fastest so far takes hardly longer than its operators alone."""
        return gain > 0.0 and self.ahead is not None and self.ahead.seconds * (1 - gain) <= self.working

    def _ladder(self, name: str, rungs: Sequence[int]) -> Sequence[int]:
        """The values that are tried for a limit: where there is little, the same whatever memory there is, as long as that is enough."""
        if self.most[name] > LITTLE:
            return _within(rungs, self.limit)
        return tuple(value for value in _within(rungs, self.most[name]) if value <= self.limit)

    def look(self, limits: Limits) -> float:
        """Takes a schedule in if it is better; its seconds."""
        self.looked.add(limits)
        one = self._placed(limits)
        self.hoped = min(self.hoped, one.seconds)
        self._take(limits, one)
        return one.seconds

    def _take(self, limits: Limits, one: _Looked) -> None:
        if self.best is None or self.ahead is None or self.best.memory.peak > self.limit:
            self._ask(one)
        elif one.seconds <= self.ahead.seconds * (1 - EQUAL):
            if self.trusts and self.best.memory.peak + _in_flight(limits) <= self.limit:
                self.ahead = one
            else:
                self.settle()
                self._ask(one)
        elif one.seconds <= self.ahead.seconds * (1 + EQUAL) and _in_flight(limits) < _in_flight(self.ahead.limits):
            if one.seconds > NEAR * self.beside:
                return
            self.settle()
            if not one.same(self.ahead):
                self._ask(one)
            elif limits.aside_bytes < self.ahead.limits.aside_bytes:
                self.asked.add(limits)
                self.ahead, self.kept, self.best = one, one, _under(self.best, limits)

    def settle(self) -> ScheduledPlan:
        """Asks the fastest what it holds; the best."""
        while self.ahead is not None and self.ahead.limits not in self.asked:
            one = self.ahead
            self._ask(one)
            if self.best is None or self.best.memory.peak > self.limit or self.best.seconds > one.seconds:
                self.trusts = False
        assert self.best is not None
        return self.best

    def _placed(self, limits: Limits) -> _Looked:
        placed = tuple(
            (weight, sample.under(_without(limits, left_out)))
            for (weight, sample), left_out in zip(self.samples, self.left_out, strict=True)
        )
        self.budget.charge(PLACED * sum(len(one.instructions) for _, one in placed))
        return self._looked(limits, placed)

    def _looked(self, limits: Limits, placed: tuple[tuple[float, Schedule], ...]) -> _Looked:
        step = sum(weight * step_seconds(one, self.optimizer) for weight, one in placed)
        whole_seconds = step
        if not self.machine.overlaps:
            whole_seconds = sum(weight * one.communication_seconds() for weight, one in placed)
        return _Looked(limits, placed, whole_seconds / placed[-1][1].graph.microbatches, step)

    def _ask(self, one: _Looked) -> None:
        """What it holds; it is kept if it is better than the best."""
        limits = one.limits
        self.asked.add(limits)
        found, parts = self._timed(one)
        whole, held = found.schedule, found.memory
        self.left_out = [(held.peak - held.optimizer) - (part.peak - part.optimizer) for part in parts]
        if found.better(self.best, self.limit):
            self.best, self.kept = found, one
        self.ahead = self.kept
        if found.memory.peak > self.limit and limits.ahead_bytes and self.least <= self.limit:
            within = replace(limits, held_bytes=max(self.limit - found.memory.optimizer, 1))
            if within not in self.looked:
                self.look(within)
        if found.memory.peak > self.limit and limits.summed_bytes and whole.sums and not found.estimated:
            excess = found.memory.peak - self.limit
            less = replace(limits, summed_bytes=max(_summed(whole) - excess, 0))
            if less not in self.looked:
                self.look(less)

    def _timed(self, one: _Looked) -> tuple[ScheduledPlan, Sequence[Memory]]:
        """With what is written over, and what each sample holds."""
        self.budget.charge(HELD * sum(len(schedule.instructions) for _, schedule in one.placed))
        reused = [(weight, assign_in_place(schedule)) for weight, schedule in one.placed]
        parts = [memory(schedule, self.optimizer) for _, schedule in reused]
        held = _sum_of([(weight, part) for (weight, _), part in zip(reused, parts, strict=True)])
        whole = reused[-1][1] if len(reused) == 1 else replace(reused[-1][1], limits=one.limits)
        return ScheduledPlan(
            self.assignment, whole, one.limits, simulated(whole), one.seconds, one.step, one.seconds, held, tuple(reused)
        ), parts

    def hurried(self) -> ScheduledPlan:
        """The best reordered, where that fits."""
        assert self.best is not None and self.kept is not None
        if self.best.estimated:
            return self.best
        if self._hurried is None or self._hurried[0] is not self.best:
            ((weight, placed),) = self.kept.placed
            improved = improve_order(placed.under(self.kept.limits), self.optimizer, self.limit)
            changed = improved.schedule
            self.budget.charge(MOVED * improved.moves * len(changed.instructions))
            one = self._looked(self.kept.limits, ((weight, changed),))
            hopeful = one.seconds < self.best.seconds * (1 - EQUAL) or self.best.memory.peak > self.limit
            made = self._timed(one)[0] if hopeful else self.best
            gains = made.memory.peak <= self.limit and made.better(self.best, self.limit)
            self._hurried = self.best, replace(made, placed_seconds=self.best.seconds) if gains else self.best
        return self._hurried[1]

    def run(self, start: Limits | None, tries: int, beside: float = math.inf, gain: float = 0.0, *, improve: bool = True) -> ScheduledPlan:
        """The best of those looked at before and a few more: see ``best_schedule``. Where what should have had room had none, the same
        again with each asked at once.

        Args:
            gain: the relative one for which no other limits are tried, though some of them may hold less.
            improve: whether local search follows, where it may make this the best.
        """
        before, trusted = (self.best, self.ahead, self.kept, set(self.asked), set(self.looked)), self.trusts
        found = self._run(start, tries, beside, gain)
        if self.trusts is not trusted:
            self.best, self.ahead, self.kept, self.asked, self.looked = before
            found = self._run(start, tries, beside, gain)
        hopeful = found.seconds <= REORDERED * beside or found.seconds - saved_at_most(found.schedule, found.step_seconds) <= beside
        return self.hurried() if hopeful and improve else found

    def _run(self, start: Limits | None, tries: int, beside: float, gain: float) -> ScheduledPlan:
        before, trusted, self.beside = len(self.looked), self.trusts, beside
        timed = self.machine.overlaps
        first = LEAN if timed and self.least > self.limit else start or default_limits(self.machine)
        if first in self.looked:
            before -= 1
        else:
            self.look(first)
        best = self.settle()
        if best.memory.peak > self.limit and timed and LEAN not in self.looked:
            self.look(LEAN)
            tries += 1
            best = self.settle()
        if (best.memory.peak > self.limit and best.limits == LEAN) or best.seconds > HOPELESS * beside:
            return best
        while timed and not self._at_best(gain):
            last = self.ahead
            for name, ladder in LADDERS:
                assert self.ahead is not None
                begun, low, high = getattr(self.ahead.limits, name), -math.inf, math.inf
                for step, limits in enumerate(_steps(self.ahead.limits, name, self._ladder(name, ladder))):
                    value, left = getattr(limits, name), len(self.looked) - before <= tries and not self.budget.over
                    if limits not in self.looked and low < value < high and left and self.look(limits) > NEAR * self.ahead.seconds:
                        low, high = (max(low, value), high) if value < begun else (low, min(high, value))
                    now = self.ahead.seconds
                    trails = step + 1 >= BESIDE and self.hoped > NEAR * beside and best.seconds - now < now - beside
                    if self.trusts is not trusted or trails or self._at_best(gain):
                        return self.settle()
            if self.ahead is last:
                break
        return self.settle()


def _under(found: ScheduledPlan, limits: Limits) -> ScheduledPlan:
    """The same, found under other limits."""
    whole = found.schedule.under(limits)
    return replace(found, schedule=whole, limits=limits, samples=found.samples if found.estimated else ((found.samples[0][0], whole),))


def _without(limits: Limits, left_out: int) -> Limits:
    """The limits for a graph that holds so many bytes less."""
    return replace(limits, held_bytes=max(limits.held_bytes - left_out, 1)) if limits.held_bytes else limits


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
        samples: what is scheduled for it, where that is not the assignment of ``graph`` itself.
        start: the limits to begin from.
        tries: how many others are looked at, at most, beside the leanest where the first needs too much memory; none under the
            communication model, where nothing overlaps.
        beside: ``placed_seconds`` of the best schedule known; of what takes ``HOPELESS`` times as long at first nothing more is looked at,
            and of what then trails by more than it gains little (``NEAR``).
        budget: see ``LimitSearch``.
    """
    tuning = LimitSearch(assignment, samples or (Sample(1.0, graph, assignment),), machine, optimizer, limit, budget=budget)
    return tuning.run(start, tries, beside)


def reordered(found: ScheduledPlan, machine: Machine, optimizer: str, limit: int, effort: int, budget: Budget) -> ScheduledPlan:
    """The same reordered with more effort (``improve_order``), where it takes less and fits; not what is estimated."""
    if found.estimated or not machine.overlaps:
        return found
    before = clear_in_place(found.schedule)
    changed = improve_order(before, optimizer, limit, effort * usual_moves(before), keep_program_order=False)
    budget.charge(MOVED * changed.moves * len(before.instructions))
    made = assign_in_place(changed.schedule)
    step, held = step_seconds(made, optimizer), memory(made, optimizer)
    if step >= found.step_seconds * (1 - EQUAL) or held.peak > limit:
        return found
    seconds = step / made.graph.microbatches
    return replace(
        found, schedule=made, slots=simulated(made), seconds=seconds, step_seconds=step, memory=held, samples=((found.samples[0][0], made),)
    )  # fmt: skip


def _summed(schedule: Schedule) -> int:
    """Bytes that sums hold beyond the gradients that leave."""
    leaving = {value for output, value in schedule.outputs if output.kind == "gradient"}
    sizes = (sum(schedule.values[name].bytes for name in names) for names in (schedule.sums, leaving))
    return max(next(sizes) - next(sizes), 0)


def _in_flight(limits: Limits) -> int:
    return limits.bucket_bytes + limits.ahead_bytes + limits.aside_bytes


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
