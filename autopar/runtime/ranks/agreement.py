"""Agreement of ranks: all run the same schedule on the same weights.

Ranks with different schedules would wait for one another for ever. Ranks with parts of different weights would train a model that
nobody defined. A small exchange of hashes finds both before anything runs. Weights that differ become those of the first rank that has
values, as under DistributedDataParallel: a model built without a seed, or loaded on one rank alone, is no error.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from autopar.errors import AutoparError, MismatchError
from autopar.runtime.ranks.groups import Team
from autopar.schedule import Instruction, Schedule
from autopar.torch_compat import is_fake

CHUNK = 2**26
"""Bytes that are hashed at a time."""
T = TypeVar("T")
NOTHING = ""
"""The hash of a tensor on meta."""


def check_agreement(schedule: Schedule, team: Team) -> None:
    """Compares this rank's schedule, and the graph it is of, with the others', by one small exchange of hashes. Collective.

    Raises:
        MismatchError: on every rank, naming the first instruction that differs, and what it is on which ranks.
    """
    lines = list(_lines(schedule))
    if len(set(everyones(hashlib.sha256("\n".join(lines).encode()).hexdigest(), team))) > 1:
        everyone = everyones(lines, team)
        raise MismatchError(_schedules(everyone), "give every rank the same plan file: plan once, save it, and load it on all ranks")


def everyones(value: Any, team: Team) -> list[Any]:
    """The value that each rank of the mesh gives, by rank. Collective."""
    found: list[Any] = [value] * len(team.members)
    if len(found) > 1:
        dist.all_gather_object(found, value, group=team.group)
        order = sorted(team.members)
        found = [found[order.index(member)] for member in team.members]
    return found


def together(function: Callable[[], T], team: Team) -> T:
    """What ``function`` gives on this rank; where one refuses, none goes on to wait for it. Collective.

    Raises:
        AutoparError: this rank's own. MismatchError: another's.
    """
    refusal: AutoparError | None = None
    try:
        found = function()
    except AutoparError as error:
        refusal = error
    everyone = everyones(None if refusal is None else (refusal.message, refusal.hint), team)
    if refusal is not None:
        raise refusal
    for rank, words in enumerate(everyone):
        if words is not None:
            raise MismatchError(f"rank {rank} refuses: {words[0]}", words[1] or "give all ranks the same model and plan")
    return found


def find_sources(tensors: Mapping[str, torch.Tensor], team: Team) -> dict[str, int]:
    """For each tensor that is not the same on all ranks, the first rank that has values for it. Collective.

    Args:
        tensors: whole ones, by name; DTensors are left out: placing them is what made them agree.

    Raises:
        MismatchError: names, shapes or dtypes differ.
    """
    plain = {name: tensor for name, tensor in tensors.items() if not isinstance(tensor, DTensor)}
    described = [f"{name}: {str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}" for name, tensor in plain.items()]
    everyone = everyones((described, [hash_of(tensor) for tensor in plain.values()] if len(team.members) > 1 else []), team)
    shapes = [names for names, _ in everyone]
    if any(names != shapes[0] for names in shapes):
        place, rank = _first_difference(shapes)
        raise MismatchError(
            f"the models of ranks 0 and {rank} differ: {_at(shapes[0], place)} on rank 0, {_at(shapes[rank], place)} on rank {rank}",
            "build the same model on all ranks",
        )
    found = {}
    for name, hashes in zip(plain, zip(*(hashes for _, hashes in everyone), strict=True), strict=False):
        if len(set(hashes)) > 1:
            found[name] = next(rank for rank, known in enumerate(hashes) if known != NOTHING)
    return found


def fetch(tensor: torch.Tensor, source: int, team: Team, device: torch.device) -> torch.Tensor:
    """The values of one rank's tensor on all ranks, on the device they go through; the tensor itself is not written to. Collective."""
    mine = team.rank == source
    sent = tensor.detach().to(device).contiguous() if mine else torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    dist.broadcast(sent.view(-1).view(torch.uint8), team.members[source], team.group)
    return sent


def hash_of(tensor: torch.Tensor) -> str:
    """A hash of a tensor's values, ``NOTHING`` when it has none."""
    if tensor.is_meta or is_fake(tensor):
        return NOTHING
    values = tensor.detach().resolve_conj().resolve_neg()  # see ``steps._written_out``
    found, flat = hashlib.sha256(), values.contiguous().view(-1).view(torch.uint8)
    for begin in range(0, flat.numel(), CHUNK):
        found.update(flat[begin : begin + CHUNK].cpu().numpy())
    return found.hexdigest()


def _lines(schedule: Schedule) -> Iterator[str]:
    """A line for what comes in and leaves, then one for each instruction: all that decides what a rank does, without predicted times."""
    entering = [f"{item.tensor} {schedule.specs[item.tensor]}" for item in schedule.graph.inputs]
    leaving = [f"{output.name} {value}" for output, value in schedule.outputs]
    yield f"mesh {schedule.machine.mesh}, in {entering}, out {leaving}, graph {schedule.graph.sha256}, {schedule.graph.accumulation}"
    for item in schedule.instructions:
        yield f"{item.kind} {item.of} {item.reads} {item.writes} {item.microbatch} {_detail(schedule, item)}"


def _detail(schedule: Schedule, item: Instruction) -> str:
    if item.kind == "run":
        operation = schedule.operations[item.of]
        return f"{operation.op.target} {[str(spec) for spec in (*operation.strategy.inputs, *operation.strategy.outputs)]}"
    if item.kind == "start":
        call = schedule.collectives[item.of]
        parts = [(part.step.dims, part.step.sources, part.shapes.source) for part in call.parts]
        return f"{call.kind} {call.axes} {call.reduction} {parts}"
    if item.kind == "slice":
        step = schedule.cuts[item.writes[0]].step
        return "" if step is None else f"{step.kind} {step.axes} {step.dims}"
    return ""


def _schedules(everyone: list[list[str]]) -> str:
    place, rank = _first_difference(everyone)
    what = "they differ before the first instruction, in" if place == 0 else f"the first instruction that differs is number {place - 1}:"
    first, other = (_short(_at(everyone[of], place)) for of in (0, rank))
    return f"ranks 0 and {rank} hold different schedules; {what} {first} on rank 0, {other} on rank {rank}"


def _first_difference(everyone: list[list[str]]) -> tuple[int, int]:
    """The first line that is not the same on all ranks, and the first rank on which it is not what it is on rank 0."""
    place = next(place for place in range(max(map(len, everyone))) if len({_at(lines, place) for lines in everyone}) > 1)
    return place, next(rank for rank, lines in enumerate(everyone) if _at(lines, place) != _at(everyone[0], place))


def _at(lines: list[str], place: int) -> str:
    return lines[place] if place < len(lines) else "nothing"


def _short(line: str) -> str:
    return line if len(line) <= 120 else line[:117] + "..."
