"""Recomputes a pipeline's plan from the file: each stage's own plan, what crosses, the timetable, the step and memory.

The bytes that a microbatch holds between its halves are taken from the file, and those of a stage between its actions.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from autopar.check import check
from autopar.check.baselines import compare_with_baselines
from autopar.check.clock import makespan
from autopar.check.differences import Difference, close, compare_with_target, count, seconds
from autopar.cost_models import Hardware
from autopar.graph import DTYPE_BYTES, RECEIVE, SEND, Graph
from autopar.pipeline_plan import PipelinePlan, StagePlan
from autopar.rows import InstructionPlan
from autopar.sharding import ShardingSpec


class Slot(NamedTuple):
    """An action: ``F``, ``B`` or ``W`` of a microbatch."""

    kind: str
    number: int


def check_pipeline(plan: PipelinePlan, graph: Graph | None = None) -> tuple[Difference, ...]:
    """Differences between a pipeline's plan and what is recomputed, those first that keep it from running; empty when it holds.

    Args:
        graph: the model's graph of one microbatch, to compare it with the plan's.

    Raises:
        FileError: a plan whose hardware cannot be read.
    """
    found = list(compare_with_target(plan, graph)) if graph is not None else []
    for number, stage in enumerate(plan.stages):
        found += [replace(item, where=f"stages[{number}].plan.{item.where}") for item in check(stage.plan)]
        found += _stage(plan, number, stage)
    found += _crossing(plan)
    lines = [[_read(word) for word in stage.order.split()] for stage in plan.stages]
    broken = list(_positions(plan, lines)) or list(_timetable(plan, lines))
    found += broken or _figures(plan, lines)
    return tuple(sorted(found, key=lambda item: item.runs))


def _positions(plan: PipelinePlan, lines: list[list[Slot]]) -> Iterator[Difference]:
    """Each position has as many stages, and where it has several, a turn for each action of these."""
    count = plan.mesh[next(iter(plan.mesh))]
    if len(plan.stages) % count:
        yield Difference("stages", f"{len(plan.stages)} on {count} positions")
    elif len(plan.stages) == count:
        if plan.turns is not None:
            yield Difference("turns", "each rank runs one stage, which needs none")
    elif any(row.rest_bytes_per_rank is None for row in plan.stages):
        yield Difference("stages", "ranks run several stages, and one does not say what it has there between its actions")
    elif plan.turns is None or len(plan.turns) != count:
        yield Difference("turns", f"{0 if plan.turns is None else len(plan.turns)} lines, {count} positions run several stages")
    else:
        for position, words in enumerate(plan.turns):
            wanted = {str(stage): len(line) for stage, line in enumerate(lines) if stage % count == position}
            if Counter(words.split()) != wanted:
                yield Difference(f"turns[{position}]", "not each stage of the position once for each of its actions")


def _read(word: str) -> Slot:
    return Slot(word[:1], int(word[1:])) if word[1:].isdecimal() else Slot("?", 0)


def _stage(plan: PipelinePlan, number: int, stage: StagePlan) -> Iterator[Difference]:
    """What a stage's row says beside its plan."""
    where = f"stages[{number}]"
    mesh = dict(list(plan.mesh.items())[1:]) or {"dp": 1}
    if stage.plan.mesh != mesh:
        yield Difference(f"{where}.plan.mesh", f"{stage.plan.mesh}, the pipeline's stages have {mesh}")
    if stage.plan.microbatches != plan.microbatches:
        yield Difference(f"{where}.plan.microbatches", f"{stage.plan.microbatches}, the pipeline has {plan.microbatches}")
    hardware = Hardware.from_dict(stage.plan.hardware, "the plan's hardware")
    issue = hardware.seconds_to_issue(stage.plan.created_by.execution)
    begin_rows = [row for row in stage.plan.schedule if row.microbatch < 0]
    forward = [row for row in stage.plan.schedule if row.phase == "forward" and row.microbatch >= 0]
    backward = [row for row in stage.plan.schedule if row.phase != "forward"]
    begin = len(backward)
    if plan.split:
        begin, late = _weight_part(stage, backward)
        for row in late:
            yield Difference(f"{where}.plan.schedule", f"instruction {row.id} leads to what is sent, behind gradients of weights")
    parts = (
        ("forward_seconds", forward, 0), ("backward_seconds", backward[:begin], 0),
        ("last_backward_seconds", backward[:begin], plan.microbatches - 1),
        ("weights_seconds", backward[begin:], 0), ("last_weights_seconds", backward[begin:], plan.microbatches - 1),
    )  # fmt: skip
    for name, rows, last in parts[: 5 if plan.split else 3]:
        run = [row for row in rows if row.microbatch <= last]
        right = makespan(run, hardware.overlap_slowdown, hardware.launch_overlaps, issue)
        yield from seconds(f"{where}.{name}", getattr(stage, name) or 0.0, right)
    ready = makespan(begin_rows, hardware.overlap_slowdown, hardware.launch_overlaps, issue)
    yield from seconds(f"{where}.begin_seconds", stage.begin_seconds or 0.0, ready)
    once = next((place for place, row in enumerate(backward) if row.microbatch), len(backward))
    stands_last = once < len(backward) and all(row.microbatch for row in backward[once:]) and not plan.split
    sent = stage.last_backward_seconds if stage.last_sent_seconds is None else stage.last_sent_seconds
    yield from seconds(f"{where}.last_sent_seconds", sent, stage.backward_seconds if stands_last else stage.last_backward_seconds)
    yield from seconds(f"{where}.optimizer_seconds", stage.optimizer_seconds, stage.plan.predicted.optimizer_seconds)


def _weight_part(stage: StagePlan, backward: list[InstructionPlan]) -> tuple[int, list[InstructionPlan]]:
    """Where the rows of backward begin that nothing sent needs, and the rows behind that something sent does need."""
    maker = {value: place for place, row in enumerate(backward) if row.kind != "free" for value in row.writes}
    begun = {row.of: place for place, row in enumerate(backward) if row.kind == "start"}
    found = set[int]()
    asked = [maker[row.value or row.tensor] for name, row in stage.plan.outputs.items() if name.startswith(SEND)
             if (row.value or row.tensor) in maker]  # fmt: skip
    while asked:
        place = asked.pop()
        if place not in found:
            found.add(place)
            row = backward[place]
            asked += [maker[value] for value in row.reads if value in maker and maker[value] != place]
            asked += [begun[row.of]] if row.kind == "wait" else []
    begin = next((place for place, row in enumerate(backward) if row.kind != "free" and place not in found), len(backward))
    return begin, [backward[place] for place in sorted(found) if place > begin]


def _crossing(plan: PipelinePlan) -> Iterator[Difference]:
    """What one stage sends and another receives lies alike, and is listed."""
    received = Counter[tuple[str, int]]()
    for row in plan.boundaries:
        received[row.tensor, row.to_stage] += 1
        source, target = plan.stages[row.from_stage].plan, plan.stages[row.to_stage].plan
        taken = {**target.inputs, **target.tangents}.get(RECEIVE + row.tensor)
        given = source.outputs.get(SEND + row.tensor)
        if taken is None or given is None or not taken.spec == given.spec == row.spec:
            specs = [None if one is None else one.spec for one in (given, taken)]
            words = f"{row.spec}, stage {row.from_stage} sends {specs[0]}, stage {row.to_stage} takes {specs[1]}"
            yield Difference(f"boundaries.{row.tensor}", words)
    for number, stage in enumerate(plan.stages):
        entering = {name: number for name in (*stage.plan.inputs, *stage.plan.tangents) if name.startswith(RECEIVE)}
        for name in entering:
            if received[name.removeprefix(RECEIVE), number] != 1:
                yield Difference(f"stages[{number}]", f"{name} comes from {received[name.removeprefix(RECEIVE), number]} stages")
    sizes = list(plan.mesh.values())[1:] or [1]
    for row in plan.boundaries:
        out = plan.stages[row.from_stage].plan.outputs.get(SEND + row.tensor)
        if out is not None:
            local = ShardingSpec.parse(out.spec).local_shape(out.shape, sizes)
            size = math.prod(local) * DTYPE_BYTES[out.dtype]
            yield from count(f"boundaries.{row.tensor}.bytes_per_rank", row.bytes_per_rank, size)


def _timetable(plan: PipelinePlan, lines: list[list[Slot]]) -> Iterator[Difference]:
    """What makes the orders illegal: they are followed side by side, each as far as what it reads is there."""
    kinds = "FBW" if plan.split else "FB"
    wanted = Counter(Slot(kind, number) for kind in kinds for number in range(plan.microbatches))
    for stage, line in enumerate(lines):
        if Counter(line) != wanted:
            yield Difference(f"stages[{stage}].order", "not every action stands once")
            return
        for kind in kinds:
            if [slot.number for slot in line if slot.kind == kind] != list(range(plan.microbatches)):
                yield Difference(f"stages[{stage}].order", f"microbatches of {kind} do not rise")
    done, ranks = set[tuple[int, Slot]](), _ranks(plan, lines)
    at = [0] * len(ranks)
    while moved := [rank for rank, queue in enumerate(ranks) if at[rank] < len(queue) and _is_ready(plan, *queue[at[rank]], done)]:
        for rank in moved:
            done.add(ranks[rank][at[rank]])
            at[rank] += 1
    for place, queue in zip(at, ranks, strict=True):
        if place < len(queue):
            stage, slot = queue[place]
            yield Difference(f"stages[{stage}].order", f"waits for ever before {slot.kind}{slot.number}")


def _ranks(plan: PipelinePlan, lines: list[list[Slot]]) -> list[list[tuple[int, Slot]]]:
    """The actions of each position in their order, with their stages."""
    if plan.turns is None:
        return [[(stage, slot) for slot in line] for stage, line in enumerate(lines)]
    left = [list(reversed(line)) for line in lines]
    return [[(int(word), left[int(word)].pop()) for word in words.split()] for words in plan.turns]


def _is_ready(plan: PipelinePlan, stage: int, slot: Slot, done: set[tuple[int, Slot]]) -> bool:
    before = {"B": "F", "W": "B"}.get(slot.kind)
    if before is not None and (stage, Slot(before, slot.number)) not in done:
        return False
    return all((source, slot) in done for source in _sources(plan, stage, slot.kind))


def _sources(plan: PipelinePlan, stage: int, kind: str) -> list[int]:
    """The stages that send to an action, in the same half."""
    rows = (row for row in plan.boundaries if row.to_stage == stage and kind != "W")
    return [row.from_stage for row in rows if (row.from_stage < stage) is (kind == "F")]


def _figures(plan: PipelinePlan, lines: list[list[Slot]]) -> Iterator[Difference]:
    """The step, what stages hold in flight, and their memory, from the orders and the stages' seconds."""
    sent: dict[tuple[int, Slot], float] = {}
    ranks = _ranks(plan, lines)
    busy, at = [row.begin_seconds or 0.0 for row in plan.stages], [0] * len(ranks)
    free = [sum(busy[rank :: len(ranks)]) for rank in range(len(ranks))]
    while any(place < len(queue) for place, queue in zip(at, ranks, strict=True)):
        for rank, queue in enumerate(ranks):
            while at[rank] < len(queue) and _is_ready(plan, *queue[at[rank]], set(sent)):
                stage, slot = queue[at[rank]]
                row, last = plan.stages[stage], slot.number == plan.microbatches - 1
                length = _length(row, slot, last=last)
                sources = _sources(plan, stage, slot.kind)
                arrivals = [sent[source, slot] + plan.transfer_seconds * (source % len(ranks) != rank) for source in sources]
                begin = max([free[rank], *arrivals])
                free[rank] = begin + length
                is_early = slot.kind == "B" and last and row.last_sent_seconds is not None
                sent[stage, slot] = begin + (row.last_sent_seconds or 0.0) if is_early else free[rank]
                busy[stage] += length
                at[rank] += 1
    step = max(end + sum(row.optimizer_seconds for row in plan.stages[rank :: len(ranks)]) for rank, end in enumerate(free))
    yield from seconds("objective.seconds", plan.objective.seconds, step)
    if plan.objective.bound_seconds > step and not close(plan.objective.bound_seconds, step):
        yield Difference("objective.bound_seconds", "the bound is above the step", runs=True)
    yield from compare_with_baselines(plan.baselines, plan.memory_limit_bytes_per_rank, plan.objective.bound_seconds)
    most, peaks = _in_flight(plan, ranks)
    for stage, row in enumerate(plan.stages):
        where, parts = f"stages[{stage}]", row.plan.predicted.memory
        yield from count(f"{where}.in_flight", row.in_flight, most[stage])
        yield from count(f"{where}.peak_memory_bytes_per_rank", row.peak_memory_bytes_per_rank, peaks[stage % len(ranks)])
        if row.rest_bytes_per_rank is not None and row.rest_bytes_per_rank < parts.parameters + parts.optimizer:
            yield Difference(f"{where}.rest_bytes_per_rank", f"{row.rest_bytes_per_rank or 0}, parameters and optimizer states are more")
        yield from seconds(f"{where}.busy_seconds", row.busy_seconds, busy[stage] + row.optimizer_seconds)


def _length(row: StagePlan, slot: Slot, *, last: bool) -> float:
    """Seconds of an action."""
    if slot.kind == "F":
        return row.forward_seconds
    if slot.kind == "B":
        return row.last_backward_seconds if last else row.backward_seconds
    return (row.last_weights_seconds if last else row.weights_seconds) or 0.0


def _in_flight(plan: PipelinePlan, ranks: list[list[tuple[int, Slot]]]) -> tuple[list[int], list[int]]:
    """The most microbatches of each stage that are begun and not over, and bytes at the peak of each position.

    The microbatch at work has its stage's plan's bytes, others what they hold between, and the position's other stages what rests.
    """
    most, peaks = [0] * len(plan.stages), [0] * len(ranks)
    for rank, queue in enumerate(ranks):
        begun: dict[tuple[int, int], str] = {}
        for stage, slot in queue:
            begun.pop((stage, slot.number), None)
            row, held = plan.stages[stage], 0
            for (other, _), kind in begun.items():
                one = plan.stages[other]
                held += one.held_bytes_per_rank if kind == "F" else one.held_for_weights_bytes_per_rank or 0
            rest = sum(one.rest_bytes_per_rank or 0 for one in plan.stages[rank :: len(ranks)] if one is not row)
            most[stage] = max(most[stage], 1 + sum(other == stage for other, _ in begun))
            peaks[rank] = max(peaks[rank], row.plan.predicted.peak_memory_bytes_per_rank + rest + held)
            if slot.kind == "F" or (slot.kind == "B" and any(one == stage and other.kind == "W" for one, other in queue)):
                begun[stage, slot.number] = slot.kind
    return most, peaks
