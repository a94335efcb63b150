"""How long a pipeline's step takes, and what its ranks hold: each action as long as its part of the stage's schedule.

A rank runs one action of its stages at a time; the first begins behind what is done once before all (weights are gathered that are kept).
What crosses to other ranks arrives ``transfer`` seconds after the sending action is over. The last microbatch's last part ends with what a
step does once: gradients are reduced then, behind what is sent where the list has it so (``schedule.splitting``). The optimizer's step
follows it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import astuple, dataclass
from typing import NamedTuple

from autopar.pipeline.cutting import Boundary, Stages
from autopar.pipeline.timetable import Action, Part, read_order, stages_split
from autopar.pipeline_plan import PipelinePlan
from autopar.schedule import Instruction, Schedule, memory, simulate
from autopar.schedule.instructions import BEFORE_ALL
from autopar.schedule.simulation import makespan
from autopar.schedule.splitting import find_once_part, find_weight_part
from autopar.schedule.storages import entering, held_at, held_between_halves, resting_bytes, storage_bytes


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
        rest: bytes that are there while no microbatch is in flight, and another stage of the rank runs.
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
    rest: int = 0

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

    def scaled(self, share: float) -> StageCosts:
        """All figures times a share."""
        return StageCosts(*(type(figure)(share * figure) for figure in astuple(self)))


class StageNeeds(NamedTuple):
    """Seconds of a step that a stage needs.

    Args:
        before: until its first microbatch arrives.
        after: from the end of its last backward until the first stage has ended.
        least: no step is shorter.
    """

    before: float
    after: float
    least: float


def find_stage_needs(costs: Sequence[StageCosts], microbatches: int, transfer: float, positions: int) -> list[StageNeeds]:
    """What each stage needs of a step, in any order. Gradients of weights that are apart may all stand behind its last backward.

    Later stages of the same rank begin behind it, and end before it.

    Args:
        transfer: seconds of what crosses.
        positions: ranks along the axis of stages.
    """
    found, before, after = list[StageNeeds](), 0.0, 0.0
    for stage, cost in enumerate(costs):
        mine = costs[stage::positions]
        work, apart = microbatches * sum(one.busy for one in mine), microbatches * sum(one.weights for one in mine)
        found.append(StageNeeds(before, after, before + max(work, work - apart + after)))
        before += cost.forward + transfer
        after += cost.backward + transfer
    return found


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
        forward, backward, last_backward, schedule.optimizer_seconds(optimizer), held_between_halves(schedule),
        memory(schedule, optimizer).peak, last_sent, weights, last_weights,
        held_at(schedule, second, ("input", "tangent")) if split else 0, begin, rest_bytes(schedule, optimizer),
    )  # fmt: skip


def rest_bytes(schedule: Schedule, optimizer: str) -> int:
    """Bytes of a rank that are there between the actions of a stage, without those of microbatches in flight.

    Parameters, optimizer states, inputs of the call, the copies that all microbatches read, outputs, and the sums of gradients, which are
    gradients at last.
    """
    root, came = schedule.storage, entering(schedule)
    summed = {root[value] for value in schedule.sums}
    given = {item.tensor for item in schedule.graph.of_kind("input") if not item.is_received}
    leaving = {kind: {root[value] for output, value in schedule.outputs if output.kind == kind and not output.is_sent} - came.keys()
               for kind in ("gradient", "output")}  # fmt: skip
    kept = {root[value] for value in schedule.kept_values} - came.keys()

    def size(roots: Collection[str]) -> int:
        return sum(storage_bytes(schedule, base) for base in roots)

    inputs = sum(came[name] for name in given)
    return resting_bytes(schedule, optimizer) + inputs + size(kept) + size(leaving["output"]) + max(size(summed), size(leaving["gradient"]))


def recorded_stages(plan: PipelinePlan) -> Stages:
    """What crosses between a file's stages, and where they run, without their graphs."""
    boundaries = tuple(Boundary(row.tensor, row.from_stage, row.to_stage) for row in plan.boundaries)
    return Stages((), boundaries, plan.positions)


def recorded_order(plan: PipelinePlan) -> tuple[Action, ...]:
    """The timetable of a file. Raises MismatchError: it cannot be run."""
    return read_order([stage.order for stage in plan.stages], plan.turns or ())


def recorded_costs(plan: PipelinePlan) -> list[StageCosts]:
    """The figures of each stage as the plan file has them."""
    return [
        StageCosts(
            row.forward_seconds, row.backward_seconds, row.last_backward_seconds, row.optimizer_seconds, row.held_bytes_per_rank,
            row.plan.predicted.peak_memory_bytes_per_rank,
            row.last_backward_seconds if row.last_sent_seconds is None else row.last_sent_seconds,
            row.weights_seconds or 0.0, row.last_weights_seconds or 0.0, row.held_for_weights_bytes_per_rank or 0,
            row.begin_seconds or 0.0, row.rest_bytes_per_rank or 0,
        )
        for row in plan.stages
    ]  # fmt: skip


def _seconds(schedule: Schedule, items: Sequence[Instruction], microbatch: int) -> float:
    """Seconds of a part of a microbatch, or of what runs before all, as if nothing ran beside it."""
    run = [item for item in items if item.microbatch <= microbatch and (item.microbatch == BEFORE_ALL) is (microbatch == BEFORE_ALL)]
    return makespan(simulate(run, *schedule.machine.clock))


@dataclass(frozen=True)
class PipelineTimes:
    """A step over time.

    Args:
        step: seconds, the optimizer's step included.
        begins: of each action of the timetable, in its order.
        busy: seconds that each stage works.
        in_flight: the most microbatches that each stage holds at once.
        peaks: bytes at the peak of a rank that runs each stage.
    """

    step: float
    begins: tuple[float, ...]
    busy: tuple[float, ...]
    in_flight: tuple[int, ...]
    peaks: tuple[int, ...]


def time_pipeline(stages: Stages, costs: Sequence[StageCosts], order: Sequence[Action], transfer: float) -> PipelineTimes:
    """The step that a total order of actions makes."""
    last, split = max(action.microbatch for action in order), stages_split(order)
    places = [stages.position(stage) for stage in range(len(costs))]
    free, busy, begins = [0.0] * (max(places) + 1), [cost.begin for cost in costs], list[float]()
    for place, cost in zip(places, costs, strict=True):
        free[place] += cost.begin
    sent: dict[tuple[int, str, int], float] = {}
    for action in order:
        stage, part, number = action
        place = places[stage]
        arrivals = [
            sent[one.source, one.half, number] + (transfer if places[one.source] != place else 0.0) for one in stages.received(stage, part)
        ]
        begin = max(free[place], *arrivals, 0.0)
        seconds = costs[stage].seconds(part, last=number == last)
        free[place] = begin + seconds
        sent[stage, part, number] = begin + costs[stage].seconds_to_send(part, last=number == last)
        begins.append(begin)
        busy[stage] += seconds
    for place, cost in zip(places, costs, strict=True):
        free[place] += cost.optimizer
    whole = tuple(seconds + cost.optimizer for seconds, cost in zip(busy, costs, strict=True))
    most, peaks = _replay_memory(order, places, costs, split)
    return PipelineTimes(max(free), tuple(begins), whole, most, tuple(peaks[place] for place in places))


def _replay_memory(
    order: Sequence[Action], places: Sequence[int], costs: Sequence[StageCosts], split: Collection[int]
) -> tuple[tuple[int, ...], list[int]]:  # fmt: skip
    """The most microbatches that each stage holds at once, and bytes at the peak of each position.

    One microbatch is inside an action of one stage; the others are between, and the other stages at rest.
    """
    between, most = [Counter[str]() for _ in costs], [0] * len(costs)
    mine = [[stage for stage, place in enumerate(places) if place == position] for position in range(max(places) + 1)]
    resting = [sum(costs[stage].rest for stage in stages) for stages in mine]
    peaks = [max(costs[stage].peak + rest - costs[stage].rest for stage in stages) for stages, rest in zip(mine, resting, strict=True)]
    for stage, part, _ in order:
        place, here, cost = places[stage], between[stage], costs[stage]
        here[part] -= part != "forward"
        most[stage] = max(most[stage], 1 + here["backward"] + here["weights"])
        held = sum(
            between[one]["backward"] * costs[one].held + between[one]["weights"] * costs[one].held_for_weights for one in mine[place]
        )
        peaks[place] = max(peaks[place], cost.peak + resting[place] - cost.rest + held)
        here[{"forward": "backward", "backward": "weights" if stage in split else ""}.get(part, "")] += 1
    return tuple(most), peaks
