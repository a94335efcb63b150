"""Every rank must run the same schedule: ranks whose lists differ would wait for one another for ever, so the lists are compared first."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch.distributed as dist

from autopar.errors import MismatchError
from autopar.schedule import Instruction, Schedule


def check_agreement(schedule: Schedule) -> None:
    """Compares this rank's schedule with the others', by one small exchange of hashes. Collective.

    Raises:
        MismatchError: on every rank, naming the first instruction that differs, and what it is on which ranks.
    """
    if dist.get_world_size() == 1:
        return
    lines = list(_lines(schedule))
    mine = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    hashes: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(hashes, mine)
    if len(set(hashes)) > 1:
        everyone: list[list[str]] = [[]] * dist.get_world_size()
        dist.all_gather_object(everyone, lines)
        raise MismatchError(_difference(everyone), "give every rank the same plan file: plan once, save it, and load it on all ranks")


def _lines(schedule: Schedule) -> Iterator[str]:
    """A line for what comes in and leaves, then one for each instruction: all that decides what a rank does, without predicted times."""
    entering = [f"{item.tensor} {schedule.specs[item.tensor]}" for item in schedule.graph.inputs]
    leaving = [f"{output.name} {value}" for output, value in schedule.outputs]
    yield f"mesh {schedule.machine.mesh}, in {entering}, out {leaving}, graph {schedule.graph.sha256}"
    for item in schedule.instructions:
        yield f"{item.kind} {item.of} {item.reads} {item.writes} {_detail(schedule, item)}"


def _detail(schedule: Schedule, item: Instruction) -> str:
    if item.kind == "run":
        operation = schedule.operations[item.of]
        return f"{operation.op.target} {[str(spec) for spec in (*operation.strategy.inputs, *operation.strategy.outputs)]}"
    if item.kind == "start":
        call = schedule.collectives[item.of]
        return f"{call.kind} {call.axes} {call.reduction} {[(part.step.dims, part.step.sources, part.source_shape) for part in call.parts]}"
    if item.kind == "slice":
        step = schedule.cuts[item.writes[0]].step
        return "" if step is None else f"{step.kind} {step.axes} {step.dims}"
    return ""


def _difference(everyone: list[list[str]]) -> str:
    """What the first line that is not the same on all ranks is on the first rank and on the first that differs."""
    place = next(place for place in range(max(map(len, everyone))) if len({_at(lines, place) for lines in everyone}) > 1)
    first = _at(everyone[0], place)
    rank, other = next((rank, _at(lines, place)) for rank, lines in enumerate(everyone) if _at(lines, place) != first)
    what = "they differ before the first instruction, in" if place == 0 else f"the first instruction that differs is number {place - 1}:"
    return f"ranks 0 and {rank} hold different schedules; {what} {_short(first)} on rank 0, {_short(other)} on rank {rank}"


def _at(lines: list[str], place: int) -> str:
    return lines[place] if place < len(lines) else "nothing"


def _short(line: str) -> str:
    return line if len(line) <= 120 else line[:117] + "..."
