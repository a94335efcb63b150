"""How long a pipeline's step takes, and what its ranks hold: each action as long as its part of the stage's schedule.

A stage runs one action at a time; the first begins behind what is done once before all (weights are gathered that are kept). What crosses
arrives ``transfer`` seconds after the sending action is over. The last microbatch's last part ends with what a step does once: gradients
are reduced then, behind what is sent where the list has it so (``schedule.splitting``). The optimizer's step follows it in each stage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from autopar.pipeline.cutting import Stages
from autopar.pipeline.timetable import Action, Part, stages_split
from autopar.pipeline_plan import PipelinePlan
from autopar.schedule import Instruction, Schedule, memory, simulate
from autopar.schedule.instructions import BEFORE_ALL
from autopar.schedule.simulation import makespan
from autopar.schedule.splitting import find_once_part, find_weight_part
from autopar.schedule.storages import entering, storage_bytes


@dataclass(frozen=True)
class StageCosts:
    """One stage's figures for a microbatch on a rank.

    Args:
        forward, backward: seconds of the parts.
        last_backward: seconds of the last microbatch's backward, with what is done once a step.
        optimizer: seconds of the optimizer's step.
        held: bytes that a microbatch holds between forward and backward.
        peak: bytes at the peak, with one microbatch in flight.
        last_sent: seconds until the last microbatch's backward has made what it sends.
        weights, last_weights: seconds of gradients of weights, where they are a part of their own; backward is then without them.
        held_for_weights: bytes that a microbatch holds between backward and that part.
        begin: seconds of what runs once, before the first microbatch.
    """

    forward: float
    backward: float
    last_backward: float
    optimizer: float
    held: int
    peak: int
    last_sent: float
    weights: float = 0.0
    last_weights: float = 0.0
    held_for_weights: int = 0
    begin: float = 0.0

    def seconds(self, part: Part, *, last: bool) -> float:
        """Of a part of a microbatch, the ``last`` one or not."""
        if part == "forward":
            return self.forward
        if part == "backward":
            return self.last_backward if last else self.backward
        return self.last_weights if last else self.weights

    def seconds_to_send(self, part: Part, *, last: bool) -> float:
        """Until a part of a microbatch, the ``last`` one or not, has made what it sends."""
        return self.last_sent if part == "backward" and last else self.seconds(part, last=last)

    @property
    def busy(self) -> float:
        """Seconds of all parts of a microbatch."""
        return self.forward + self.backward + self.weights

    @property
    def most_held(self) -> int:
        """Bytes that a microbatch holds between its parts, at most."""
        return max(self.held, self.held_for_weights)

    def peak_with(self, in_flight: int) -> int:
        """Peak bytes with ``in_flight`` microbatches: one is inside an action, the others are between parts."""
        return self.peak + (max(in_flight, 1) - 1) * self.most_held


def measure_stage(schedule: Schedule, optimizer: str, *, split: bool = False) -> StageCosts:
    """The figures of a stage's schedule.

    Args:
        split: whether gradients of weights are a part of their own (see ``schedule.splitting``).
    """
    items = schedule.instructions
    first = next((index for index, item in enumerate(items) if item.half == "backward"), len(items))
    second = find_weight_part(schedule) if split else len(items)
    last = schedule.graph.microbatches - 1
    spans = [items[:first], items[first:second], items[second:]]
    begin = _seconds(schedule, items, BEFORE_ALL)
    forward, backward, weights = (_seconds(schedule, span, 0) for span in spans)
    _, last_backward, last_weights = (_seconds(schedule, span, last) for span in spans)
    last_sent = backward if find_once_part(schedule) < len(items) else last_backward
    return StageCosts(
        forward, backward, last_backward, schedule.optimizer_seconds(optimizer), held_between(schedule, first, ("input",)),
        memory(schedule, optimizer).peak, last_sent, weights, last_weights,
        held_between(schedule, second, ("input", "tangent")) if split else 0, begin,
    )  # fmt: skip


def recorded_costs(plan: PipelinePlan) -> list[StageCosts]:
    """The figures of each stage as the plan file has them."""
    return [
        StageCosts(
            row.forward_seconds, row.backward_seconds, row.last_backward_seconds, row.optimizer_seconds, row.held_bytes_per_rank,
            row.plan.predicted.peak_memory_bytes_per_rank,
            row.last_backward_seconds if row.last_sent_seconds is None else row.last_sent_seconds,
            row.weights_seconds or 0.0, row.last_weights_seconds or 0.0, row.held_for_weights_bytes_per_rank or 0,
            row.begin_seconds or 0.0,
        )
        for row in plan.stages
    ]  # fmt: skip


def _seconds(schedule: Schedule, items: Sequence[Instruction], microbatch: int) -> float:
    """Seconds of a part of a microbatch, or of what runs before all, as if nothing ran beside it."""
    hardware = schedule.machine.hardware
    run = [item for item in items if item.microbatch <= microbatch and (item.microbatch == BEFORE_ALL) is (microbatch == BEFORE_ALL)]
    return makespan(simulate(run, hardware.overlap_slowdown, overlaps=hardware.launch_overlaps, issue=schedule.machine.issue_seconds))


def held_between(schedule: Schedule, place: int, kinds: Collection[str]) -> int:
    """Bytes of one microbatch before the instruction at ``place``: what those before it make, and the others read.

    Args:
        kinds: of graph inputs that are received by then.
    """
    root, items = schedule.storage, schedule.instructions
    received = {item.tensor for item in schedule.graph.inputs if item.is_received}
    arrived = {item.tensor for item in schedule.graph.inputs if item.is_received and item.kind in kinds}
    came = (entering(schedule).keys() | {root[value] for value in schedule.kept_values}) - received
    made = {root[value] for value in arrived} | {root[value] for item in items[:place] for value in item.writes}
    wanted = {root[value] for item in items[place:] if item.kind != "free" for value in item.reads}
    return sum(storage_bytes(schedule, base) for base in (made & wanted) - came)


@dataclass(frozen=True)
class PipelineTimes:
    """A step over time.

    Args:
        step: seconds, the optimizer's step included.
        begins: of each action of the timetable, in its order.
        busy: seconds that each stage works.
        in_flight: the most microbatches that each stage holds at once.
        peaks: bytes at the peak of a rank of each stage.
    """

    step: float
    begins: tuple[float, ...]
    busy: tuple[float, ...]
    in_flight: tuple[int, ...]
    peaks: tuple[int, ...]


def time_pipeline(stages: Stages, costs: Sequence[StageCosts], order: Sequence[Action], transfer: float) -> PipelineTimes:
    """The step that a total order of actions makes."""
    last, split = max(action.microbatch for action in order), stages_split(order)
    free, busy, begins = [cost.begin for cost in costs], [cost.begin for cost in costs], list[float]()
    sent: dict[tuple[int, str, int], float] = {}
    for action in order:
        stage, part, number = action
        arrivals = [sent[one.source, one.half, number] + transfer for one in stages.received(stage, part)]
        begin = max(free[stage], *arrivals, 0.0)
        seconds = costs[stage].seconds(part, last=number == last)
        free[stage] = begin + seconds
        sent[stage, part, number] = begin + costs[stage].seconds_to_send(part, last=number == last)
        begins.append(begin)
        busy[stage] += seconds
    step = max(end + cost.optimizer for end, cost in zip(free, costs, strict=True))
    whole = tuple(seconds + cost.optimizer for seconds, cost in zip(busy, costs, strict=True))
    held = [_replay_memory(order, stage, cost, split) for stage, cost in enumerate(costs)]
    return PipelineTimes(step, tuple(begins), whole, tuple(most for most, _ in held), tuple(peak for _, peak in held))


def _replay_memory(order: Sequence[Action], stage: int, cost: StageCosts, split: Collection[int]) -> tuple[int, int]:
    """The most microbatches that a stage holds at once, and bytes at its peak: one microbatch is inside an action, the others between."""
    between, most, peak = Counter[str](), 0, cost.peak
    following = {"forward": "backward", "backward": "weights" if stage in split else ""}
    for action in order:
        if action.stage == stage:
            between[action.part] -= action.part != "forward"
            most = max(most, 1 + between["backward"] + between["weights"])
            peak = max(peak, cost.peak + between["backward"] * cost.held + between["weights"] * cost.held_for_weights)
            between[following.get(action.part, "")] += 1
    return most, peak
