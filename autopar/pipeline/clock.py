"""How long a pipeline's step takes, and what its ranks hold: each action as long as its half of the stage's schedule.

A stage runs one action at a time. What crosses arrives ``transfer`` seconds after the sending action is over. The last microbatch's
backward ends with what a step does once: gradients are reduced then. The optimizer's step follows it in each stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.graph import Phase
from autopar.pipeline.cutting import Stages
from autopar.pipeline.timetable import Action
from autopar.schedule import Schedule, memory, simulate
from autopar.schedule.simulation import makespan
from autopar.schedule.storages import entering, storage_bytes


@dataclass(frozen=True)
class StageCosts:
    """One stage's figures for a microbatch on a rank.

    Args:
        forward, backward: seconds of the halves.
        last_backward: seconds of the last microbatch's backward, with what is done once a step.
        optimizer: seconds of the optimizer's step.
        held: bytes that a microbatch holds between its halves.
        peak: bytes at the peak, with one microbatch in flight.
    """

    forward: float
    backward: float
    last_backward: float
    optimizer: float
    held: int
    peak: int

    def peak_with(self, in_flight: int) -> int:
        """Peak bytes with ``in_flight`` microbatches: one is inside an action, the others are between halves."""
        return self.peak + (max(in_flight, 1) - 1) * self.held


def measure_stage(schedule: Schedule, optimizer: str) -> StageCosts:
    """The figures of a stage's schedule."""
    halves = [_halves(schedule, number) for number in (0, schedule.graph.microbatches - 1)]
    return StageCosts(
        halves[0][0],
        halves[0][1],
        halves[1][1],
        schedule.optimizer_seconds(optimizer),
        between_halves(schedule),
        memory(schedule, optimizer).peak,
    )


def _halves(schedule: Schedule, microbatch: int) -> tuple[float, float]:
    """Seconds of forward and of backward of a microbatch, each as if nothing ran beside it."""
    hardware, found = schedule.machine.hardware, list[float]()
    for half in ("forward", "backward"):
        items = [item for item in schedule.instructions if item.half == half and item.microbatch <= microbatch]
        slots = simulate(items, hardware.overlap_slowdown, overlaps=hardware.launch_overlaps, issue=schedule.machine.issue_seconds)
        found.append(makespan(slots))
    return found[0], found[1]


def between_halves(schedule: Schedule) -> int:
    """Bytes of one microbatch between its halves: what forward makes or receives, and backward reads."""
    root, received = schedule.storage, {item.tensor for item in schedule.graph.inputs if item.is_received and item.kind == "input"}
    came = entering(schedule).keys() - received
    made = received | {root[value] for item in schedule.instructions if item.half == "forward" for value in item.writes}
    wanted = {root[value] for item in schedule.instructions if item.half == "backward" for value in item.reads}
    return sum(storage_bytes(schedule, base) for base in (made & wanted) - came)


@dataclass(frozen=True)
class PipelineTimes:
    """A step over time.

    Args:
        step: seconds, the optimizer's step included.
        begins: of each action of the timetable, in its order.
        busy: seconds that each stage works.
        in_flight: the most microbatches that each stage holds at once.
    """

    step: float
    begins: tuple[float, ...]
    busy: tuple[float, ...]
    in_flight: tuple[int, ...]


def time_pipeline(stages: Stages, costs: Sequence[StageCosts], order: Sequence[Action], transfer: float) -> PipelineTimes:
    """The step that a total order of actions makes."""
    count, last = len(costs), max(action.microbatch for action in order)
    free, busy, begins = [0.0] * count, [0.0] * count, list[float]()
    flying, most = [0] * count, [0] * count
    ends: dict[tuple[int, Phase, int], float] = {}
    for action in order:
        stage, cost = action.stage, costs[action.stage]
        arrivals = [
            ends[one.source, one.half, action.microbatch] + transfer for one in stages.received(stage, action.half)
        ]  # fmt: skip
        begin = max(free[stage], *arrivals, 0.0)
        seconds = cost.forward if action.half == "forward" else cost.last_backward if action.microbatch == last else cost.backward
        free[stage] = ends[stage, action.half, action.microbatch] = begin + seconds
        begins.append(begin)
        busy[stage] += seconds
        flying[stage] += 1 if action.half == "forward" else -1
        most[stage] = max(most[stage], flying[stage])
    step = max(end + cost.optimizer for end, cost in zip(free, costs, strict=True))
    whole = tuple(seconds + cost.optimizer for seconds, cost in zip(busy, costs, strict=True))
    return PipelineTimes(step, tuple(begins), whole, tuple(most))
