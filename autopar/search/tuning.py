"""The best schedule of an assignment: the limits of the passes are tried, since nobody knows them in advance.

What is gathered ahead hides collectives and costs memory; large buckets save latency and start late; operators set aside fill gaps and
delay the reductions of gradients. One limit is changed at a time, from the best so far, while that helps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from autopar.graph import Graph
from autopar.schedule import Assignment, Limits, Memory, Schedule, Slot, makespan, memory, ordered, run_passes, simulate
from autopar.schedule.passes import default_limits
from cost_models import Machine

MIB = 2**20
LADDERS: tuple[tuple[str, tuple[int, ...]], ...] = (
    ("ahead_bytes", tuple(size * MIB for size in (0, 25, 100, 400, 1600))),
    ("aside_bytes", tuple(size * MIB for size in (0, 50, 200, 800))),
    ("bucket_bytes", tuple(size * MIB for size in (1, 6, 25, 100))),
)
"""The values tried for each limit: from nothing to more than a large layer."""


@dataclass(frozen=True)
class Timed:
    """The schedule of an assignment with what it costs. ``seconds`` is the objective: the step, or under the communication model the sum of its collectives."""

    assignment: Assignment
    schedule: Schedule
    slots: tuple[Slot, ...]
    seconds: float
    step_seconds: float
    memory: Memory

    def better(self, other: Timed | None, limit: int) -> bool:
        """Whether this is the one to keep: what fits before what does not, then the shorter, or the smaller where neither fits."""
        if other is None:
            return True
        mine, theirs = self.memory.peak <= limit, other.memory.peak <= limit
        if mine != theirs:
            return mine
        return self.seconds < other.seconds if mine else self.memory.peak < other.memory.peak


def timed(assignment: Assignment, schedule: Schedule, optimizer: str) -> Timed:
    """A schedule of an assignment with what it costs."""
    slots = simulate(schedule.instructions, schedule.machine.hardware.overlap_slowdown)
    step = makespan(slots) + schedule.optimizer_seconds(optimizer)
    seconds = schedule.communication_seconds() if schedule.machine.cost_model == "communication" else step
    return Timed(assignment, schedule, slots, seconds, step, memory(schedule, optimizer))


def best_schedule(
    graph: Graph, assignment: Assignment, machine: Machine, optimizer: str, limit: int, *, start: Limits | None = None, tries: int = 100
) -> Timed:  # fmt: skip
    """The best schedule found for an assignment within ``limit`` bytes a rank.

    Args:
        start: the limits to begin from.
        tries: how many others are looked at, at most; none under the communication model, where nothing overlaps.
    """
    first = ordered(graph, assignment, machine)
    best = timed(assignment, run_passes(replace(first, limits=start or default_limits(machine))), optimizer)
    if machine.cost_model == "communication":
        return best
    looked = {best.schedule.limits}
    for _ in range(len(LADDERS)):
        before = best
        for name, ladder in LADDERS:
            for limits in _steps(best.schedule.limits, name, ladder):
                if limits in looked or len(looked) > tries:
                    continue
                looked.add(limits)
                found = timed(assignment, run_passes(replace(first, limits=limits)), optimizer)
                if found.better(best, limit):
                    best = found
        if best is before:
            break
    return best


def _steps(limits: Limits, name: str, ladder: Sequence[int]) -> Iterator[Limits]:
    """The same with one limit one rung or two up or down."""
    value = getattr(limits, name)
    place = min(range(len(ladder)), key=lambda index: abs(ladder[index] - value))
    for rung in (place + 1, place - 1, place + 2, place - 2):
        if 0 <= rung < len(ladder):
            yield replace(limits, **{name: ladder[rung]})
