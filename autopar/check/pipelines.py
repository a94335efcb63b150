"""Recomputes a pipeline's plan from the file: each stage's own plan, what crosses, the timetable, the step and memory.

The bytes that a microbatch holds between its halves are taken from the file.
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
from autopar.check.differences import Difference, close, count, seconds
from autopar.cost_models import Hardware
from autopar.graph import DTYPE_BYTES, RECEIVE, SEND, Graph
from autopar.pipeline_plan import PipelinePlan, StagePlan
from autopar.sharding import ShardingSpec


class Slot(NamedTuple):
    """An action: ``F`` or ``B`` of a microbatch."""

    kind: str
    number: int


def check_pipeline(plan: PipelinePlan, graph: Graph | None = None) -> tuple[Difference, ...]:
    """Differences between a pipeline's plan and what is recomputed, those first that keep it from running; empty when it holds.

    Args:
        graph: the model's graph of one microbatch, to compare its hash with the plan's.

    Raises:
        FileError: a plan whose hardware cannot be read.
    """
    found = list[Difference]()
    if graph is not None and graph.sha256 != plan.model.graph_sha256:
        found.append(Difference("model.graph_sha256", "the target has another graph than the planned one"))
    for number, stage in enumerate(plan.stages):
        found += [replace(item, where=f"stages[{number}].plan.{item.where}") for item in check(stage.plan)]
        found += _stage(plan, number, stage)
    found += _crossing(plan)
    lines = [[_read(word) for word in stage.order.split()] for stage in plan.stages]
    broken = list(_timetable(plan, lines))
    found += broken or _figures(plan, lines)
    return tuple(sorted(found, key=lambda item: item.runs))


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
    rows = stage.plan.schedule
    halves = (("forward_seconds", True, 0), ("backward_seconds", False, 0), ("last_backward_seconds", False, plan.microbatches - 1))
    for name, forward, last in halves:
        half = [row for row in rows if (row.phase == "forward") is forward and row.microbatch <= last]
        right = makespan(half, hardware.overlap_slowdown, hardware.launch_overlaps, issue)
        yield from seconds(f"{where}.{name}", getattr(stage, name), right)
    yield from seconds(f"{where}.optimizer_seconds", stage.optimizer_seconds, stage.plan.predicted.optimizer_seconds)


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
    wanted = Counter(Slot(kind, number) for kind in "FB" for number in range(plan.microbatches))
    for stage, line in enumerate(lines):
        if Counter(line) != wanted:
            yield Difference(f"stages[{stage}].order", "not every action stands once")
            return
        for kind in "FB":
            if [slot.number for slot in line if slot.kind == kind] != list(range(plan.microbatches)):
                yield Difference(f"stages[{stage}].order", f"microbatches of {kind} do not rise")
    done, at = set[tuple[int, Slot]](), [0] * len(lines)
    while moved := [stage for stage, line in enumerate(lines) if at[stage] < len(line) and _is_ready(plan, stage, line[at[stage]], done)]:
        for stage in moved:
            done.add((stage, lines[stage][at[stage]]))
            at[stage] += 1
    for stage, line in enumerate(lines):
        if at[stage] < len(line):
            yield Difference(f"stages[{stage}].order", f"waits for ever before {line[at[stage]].kind}{line[at[stage]].number}")


def _is_ready(plan: PipelinePlan, stage: int, slot: Slot, done: set[tuple[int, Slot]]) -> bool:
    if slot.kind == "B" and (stage, Slot("F", slot.number)) not in done:
        return False
    return all((source, slot) in done for source in _sources(plan, stage, slot.kind))


def _sources(plan: PipelinePlan, stage: int, kind: str) -> list[int]:
    """The stages that send to an action, in the same half."""
    rows = (row for row in plan.boundaries if row.to_stage == stage)
    return [row.from_stage for row in rows if (row.from_stage < stage) is (kind == "F")]


def _figures(plan: PipelinePlan, lines: list[list[Slot]]) -> Iterator[Difference]:
    """The step, what stages hold in flight, and their memory, from the orders and the stages' seconds."""
    ends: dict[tuple[int, Slot], float] = {}
    free, at, busy = [0.0] * len(lines), [0] * len(lines), [0.0] * len(lines)
    while any(place < len(line) for place, line in zip(at, lines, strict=True)):
        for stage, line in enumerate(lines):
            while at[stage] < len(line) and _is_ready(plan, stage, line[at[stage]], set(ends)):
                slot, row = line[at[stage]], plan.stages[stage]
                last = slot.number == plan.microbatches - 1
                backward = row.last_backward_seconds if last else row.backward_seconds
                length = row.forward_seconds if slot.kind == "F" else backward
                arrivals = [ends[source, slot] + plan.transfer_seconds for source in _sources(plan, stage, slot.kind)]
                free[stage] = ends[stage, slot] = max([free[stage], *arrivals]) + length
                busy[stage] += length
                at[stage] += 1
    step = max(end + row.optimizer_seconds for end, row in zip(free, plan.stages, strict=True))
    yield from seconds("objective.seconds", plan.objective.seconds, step)
    if plan.objective.bound_seconds > step and not close(plan.objective.bound_seconds, step):
        yield Difference("objective.bound_seconds", "the bound is above the step", runs=True)
    yield from compare_with_baselines(plan.baselines, plan.memory_limit_bytes_per_rank, plan.objective.bound_seconds)
    for stage, (line, row) in enumerate(zip(lines, plan.stages, strict=True)):
        level = most = 0
        for slot in line:
            level += 1 if slot.kind == "F" else -1
            most = max(most, level)
        where = f"stages[{stage}]"
        yield from count(f"{where}.in_flight", row.in_flight, most)
        peak = row.plan.predicted.peak_memory_bytes_per_rank + (most - 1) * row.held_bytes_per_rank
        yield from count(f"{where}.peak_memory_bytes_per_rank", row.peak_memory_bytes_per_rank, peak)
        yield from seconds(f"{where}.busy_seconds", row.busy_seconds, busy[stage] + row.optimizer_seconds)
