"""Candidates: the best distinct plans of a search, plans by hand among them, for runs that measure which is the fastest.

Two plans are alike where most bytes of weights and inputs lie alike, collectives move about the same, and compute takes as long.
Measuring two such plans of a search would tell little, so the one that is predicted to be faster stands for both. Plans by hand are few,
and people compare with them: one is left out only where a candidate is the same in all of this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TypeVar

from autopar.pricing import whole_axes
from autopar.schedule import Memory, Schedule
from autopar.schedule.freeing import free
from autopar.schedule.legality import check_legal
from autopar.schedule.scheduled_plan import ScheduledPlan

Plan = TypeVar("Plan")

ALIKE, SAME = 0.75, 0.99
"""Shares from which plans of a search are alike, and a plan by hand is the same: of bytes that lie alike and that move alike.

A search comes across dozens of plans within a tenth of its best one's collectives. At 0.9, three of five candidates were such plans of
GPT-2 on four ranks; at 0.75 one. A measured step of DDP took 0.9 of that of a plan with as many bytes.
"""
ALIKE_COMPUTE = 0.9
"""Share of compute seconds from which plans of a search are alike: a tenth of the compute is most of a tenth of the step."""
KEPT = 4
"""Plans that a search keeps for each candidate asked for: some no longer fit at full depth, or are alike there."""
SEARCHED = "search"
"""Name of a plan of the search; plans by hand have the name of their baseline."""


@dataclass(frozen=True)
class Candidate:
    """A plan that is worth measuring.

    Args:
        name: of the baseline, or ``SEARCHED``.
        schedule: what every rank runs.
        seconds: the objective of the whole step.
    """

    name: str
    schedule: Schedule
    seconds: float
    memory: Memory


@dataclass
class CandidatePool:
    """The best distinct plans that a search came across.

    Args:
        count: candidates asked for; up to 1 nothing is kept.
    """

    count: int
    plans: list[ScheduledPlan] = field(default_factory=list)

    def add(self, found: ScheduledPlan, limit: int) -> None:
        """Keeps a plan that fits in ``limit`` bytes a rank, unless a faster one is alike."""
        if self.count <= 1 or found.memory.peak > limit:
            return
        others = [plan for plan in self.plans if not are_alike(plan.schedule, found.schedule)]
        same = [plan for plan in self.plans if plan not in others]
        kept = sorted([*others, min([*same, found], key=lambda plan: plan.seconds)], key=lambda plan: plan.seconds)
        self.plans = kept[: KEPT * self.count]


def choose_candidates(
    pool: CandidatePool, best: ScheduledPlan, baselines: Mapping[str, ScheduledPlan], limit: int,
    schedule_at_full_depth: Callable[[ScheduledPlan], ScheduledPlan],
) -> tuple[Candidate, ...]:  # fmt: skip
    """The candidates of an ended search, the fastest first: plans of the search and by hand in turn, each at full depth.

    Half are by hand where there are enough, since prices that mislead one search mislead all of its plans.

    Args:
        best: the plan of the search, always a candidate.
        baselines: plans by hand, by name.
        limit: bytes per rank.
    """
    if pool.count <= 1:
        return ()
    by_hand = sorted(((name, plan) for name, plan in baselines.items() if plan.memory.peak <= limit), key=lambda item: item[1].seconds)
    searched = [(SEARCHED, plan) for plan in pool.plans if plan is not best]
    chosen = [(SEARCHED, best)]
    for name, plan in _in_turn(by_hand, searched):
        if len(chosen) == pool.count:
            break
        exact = schedule_at_full_depth(plan) if plan.estimated else plan
        if exact.memory.peak <= limit and _is_new(name, exact.schedule, [other.schedule for _, other in chosen]):
            chosen.append((name, exact))
    made = (_make_candidate(name, plan) for name, plan in chosen)
    return tuple(sorted(made, key=lambda candidate: candidate.seconds))


def _make_candidate(name: str, plan: ScheduledPlan) -> Candidate:
    schedule = check_legal(free(plan.schedule), "the search")
    return Candidate(name, schedule, schedule.graph.microbatches * plan.seconds, plan.memory)


def merge_candidates(candidates: Iterable[Candidate], count: int) -> tuple[Candidate, ...]:
    """The candidates of several searches, the fastest first: ``count`` of them, of the searches and by hand in turn."""
    ordered = sorted(candidates, key=lambda one: one.seconds)
    searched, by_hand = ([one for one in ordered if (one.name == SEARCHED) is own] for own in (True, False))
    chosen: list[Candidate] = []
    for candidate in _in_turn(searched, by_hand):
        if len(chosen) < count and _is_new(candidate.name, candidate.schedule, [other.schedule for other in chosen]):
            chosen.append(candidate)
    return tuple(sorted(chosen, key=lambda one: one.seconds))


def _in_turn(first: Sequence[Plan], second: Sequence[Plan]) -> Iterator[Plan]:
    return (one for pair in zip_longest(first, second) for one in pair if one is not None)


def _is_new(name: str, schedule: Schedule, chosen: Iterable[Schedule]) -> bool:
    """Whether measuring a candidate tells something beside those that are chosen."""
    shares = (ALIKE, ALIKE_COMPUTE) if name == SEARCHED else (SAME, SAME)
    return not any(are_alike(schedule, other, *shares) for other in chosen)


def are_alike(one: Schedule, other: Schedule, bytes_share: float = ALIKE, compute_share: float = ALIKE_COMPUTE) -> bool:
    """Whether two schedules have these shares of bytes, that lie and that move, and of compute seconds in common."""
    if one is other:
        return True
    setting = one.machine.mesh, one.graph.microbatches, len(one.graph.ops)
    if setting != (other.machine.mesh, other.graph.microbatches, len(other.graph.ops)):
        return False
    if not _agree(one.once(_moved_bytes), other.once(_moved_bytes), bytes_share):
        return False
    seconds = one.compute_seconds(), other.compute_seconds()
    if min(seconds) < compute_share * max(seconds):
        return False
    whole = {item.tensor: one.graph.tensors[item.tensor].bytes for item in one.graph.inputs}
    same = sum(size for name, size in whole.items() if one.specs[name] == other.specs[name])
    return same >= bytes_share * sum(whole.values())


def _agree(one: Mapping[object, float], other: Mapping[object, float], share: float) -> bool:
    common = sum(min(size, other.get(key, 0.0)) for key, size in one.items())
    return common >= share * max(sum(one.values()), sum(other.values()))


def _moved_bytes(schedule: Schedule) -> dict[object, float]:
    """Bytes of collectives by kind and axes, those inside operators included."""
    moved: dict[object, float] = {}
    for item in schedule.instructions:
        if item.kind == "start":
            collective = schedule.collectives[item.of]
            found = [((collective.kind, collective.axes), collective.full_bytes)]
        elif item.kind == "run":
            inside = schedule.operations[item.of].strategy.inner
            found = [((call.kind, whole_axes(call.axes, schedule.machine)), call.bytes) for call in inside]
        else:
            continue
        for key, size in found:
            moved[key] = moved.get(key, 0.0) + schedule.times(item) * size
    return moved
