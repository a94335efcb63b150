"""The schedule of an assignment with its seconds and memory, and the graphs that are scheduled for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopar.graph import Graph
from autopar.schedule.assignment import Assignment
from autopar.schedule.instructions import Limits
from autopar.schedule.liveness import Memory
from autopar.schedule.schedule import Schedule
from autopar.schedule.settings import EQUAL_SECONDS
from autopar.schedule.simulation import Slot

SIZES = ("peak", "parameters", "gradients", "optimizer", "activations", "temporaries")
"""The sizes in ``Memory``."""


@dataclass(frozen=True)
class Sample:
    """A graph to schedule, with its assignment and the weight of its schedule.

    The graph that is planned has weight 1. Graphs with fewer of its equal layers have weights of both signs. Their weighted sum is the
    line through them at full depth.
    """

    weight: float
    graph: Graph
    assignment: Assignment


@dataclass(frozen=True)
class ScheduledPlan:
    """The schedule of an assignment with its seconds and memory.

    Args:
        assignment: of the graph that is searched.
        schedule, slots: of the graph that is planned; if ``estimated``, of one with fewer of its equal layers. It has no ``free`` yet.
        limits: those of the passes; the schedule's own allow for calls that were joined later.
        seconds: the objective of one microbatch: the step, or under the communication model the sum of its collectives.
        step_seconds: of the whole step.
        placed_seconds: the objective before local search. Limit searches compare by it.
        memory: of a rank.
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
        """Whether seconds and memory follow from graphs with fewer layers."""
        return len(self.samples) > 1

    def busiest_seconds(self) -> float:
        """Seconds of work of the busiest stream, without latencies, which buckets share. No order takes less."""
        busy: dict[str, float] = {}
        for weight, schedule in self.samples:
            calls = {call.id: call for call in schedule.calls}
            for item in schedule.instructions:
                call = calls[item.of] if item.kind == "start" else None
                latency = schedule.machine.latency_seconds(call.kind, call.axes) if call is not None else 0.0
                for stream in item.streams if item.kind in ("run", "add", "start") else ():
                    busy[stream] = busy.get(stream, 0.0) + weight * schedule.times(item) * max(item.seconds - latency, 0.0)
        return max(busy.values(), default=0.0)

    def better(self, other: ScheduledPlan | None, limit: int) -> bool:
        """Whether this plan is the one to keep under a limit of ``limit`` bytes a rank.

        A plan that fits comes first, then the faster, then the smaller, then the one that defers less. Deferred operators miss the
        cache.
        """
        if other is None:
            return True
        fits = self.memory.peak <= limit
        if fits != (other.memory.peak <= limit):
            return fits
        if fits and abs(self.seconds - other.seconds) > EQUAL_SECONDS * other.seconds:
            return self.seconds < other.seconds
        mine, theirs = ((plan.memory.peak, plan.limits.aside_bytes) for plan in (self, other))
        return mine < theirs


def sum_memory(parts: Sequence[tuple[float, Memory]]) -> Memory:
    """The weighted sum of the memory of samples; its largest items are those of the last."""
    if len(parts) == 1:
        return parts[0][1]
    sizes = {name: sum(weight * getattr(part, name) for weight, part in parts) for name in SIZES}
    return replace(parts[-1][1], **{name: max(round(size), 0) for name, size in sizes.items()})
