"""Peak memory: the bytes of a rank under a schedule, and the names of the largest items.

Parameters, buffers and optimizer states are there throughout. States that lie on the host pass through the device in the optimizer's step.
Of several microbatches the last holds most: it has the sums of gradients beside it, and makes the outputs of them.
Memory itself is counted by ``kernels.memory.peak_bytes``, which the local search asks too. This module names the items.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from heapq import nsmallest

from autopar.schedule.array_schedule import Storages, storages_of
from autopar.schedule.schedule import Schedule
from autopar.schedule.settings import NAMED_ITEMS
from autopar.schedule.storages import (
    bytes_of_others,
    entering,
    held_throughout,
    passing_bytes,
    resting_bytes,
    states_bytes,
    storage_bytes,
)

STAGING = "staging of "
"""Prefix of the names of a collective's buffers in flight, and of an operator's workspace."""
PASSING = "states from the host"
"""Name of what the optimizer's step has on the device of states that lie on the host."""


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank at the peak; ``biggest`` names the largest items, ``at`` the instruction that runs."""

    peak: int
    parameters: int
    gradients: int
    optimizer: int
    activations: int
    temporaries: int
    at: str
    biggest: tuple[tuple[str, int], ...]

    @property
    def resting(self) -> int:
        """Bytes that are there throughout: parameters and optimizer states."""
        return self.parameters + self.optimizer


def memory(schedule: Schedule, optimizer: str) -> Memory:
    """The peak over forward, backward and the optimizer's step, in bytes of a rank.

    Every value goes after the last instruction that needs it, whether the list has a ``free`` for it or not.
    """
    states, stateless = states_bytes(schedule, optimizer), schedule.once(_without_states)
    if schedule.states_on_host:
        stepping = _memory_at(schedule, len(schedule.instructions), passing_bytes(schedule, optimizer))
        stateless = stepping if stepping.peak > stateless.peak else stateless
    return replace(stateless, peak=stateless.peak + states, optimizer=states)


def _without_states(schedule: Schedule) -> Memory:
    """Memory at the peak of the list, without the optimizer's states."""
    levels = _levels(schedule, schedule.once(storages_of))
    return _memory_at(schedule, levels.index(max(levels)))


def _memory_at(schedule: Schedule, index: int, passing: int = 0) -> Memory:
    """Memory while an instruction runs, or after all of them in the optimizer's step; without states that lie on the device.

    Args:
        passing: bytes of states that are on the device for the step alone.
    """
    parameters, others = held_throughout(schedule), bytes_of_others(schedule)
    leaving = {schedule.storage[value] for output, value in schedule.outputs if output.kind == "gradient"}
    gradients = (leaving | set(schedule.sums)) - set(parameters)
    found = schedule.once(storages_of)
    staging, there = _staging_at(schedule, index) | ({PASSING: passing} if passing else {}), _there_at(found, index)
    best = _levels(schedule, found)[index] + passing
    grads, staged = sum(size for name, size in there.items() if name in gradients), sum(staging.values())
    where = schedule.instructions[index].of if index < len(schedule.instructions) else "the optimizer's step"
    biggest = nsmallest(NAMED_ITEMS, ((-size, name) for name, size in {**there, **staging, **parameters}.items()))
    return Memory(
        best + sum(parameters.values()) + others, sum(parameters.values()), grads, 0, best - grads - staged + others, staged, where,
        tuple((name, -size) for size, name in biggest),
    )  # fmt: skip


def held(schedule: Schedule, optimizer: str) -> list[int]:
    """Bytes of a rank while each instruction runs, in their order: parameters and optimizer states with all that lives."""
    resting = resting_bytes(schedule, optimizer)
    return [level + resting for level in _levels(schedule, schedule.once(storages_of))[:-1]]


def _levels(schedule: Schedule, found: Storages) -> list[int]:
    """Bytes while each instruction runs, and after all of them, without what rests."""
    levels: list[int] = found.lives.levels[: len(schedule.instructions) + 1].tolist()
    return levels


def _there_at(found: Storages, index: int) -> dict[str, int]:
    """The storages that are there while an instruction runs, with their bytes."""
    lives = found.lives
    rows = zip(found.names, lives.begins.tolist(), lives.ends.tolist(), lives.lies.tolist(), lives.size.tolist(), strict=True)
    return {name: size for number, (name, begin, end, lies, size) in enumerate(rows) if lies == number and -1 <= begin <= index <= end}


def _staging_at(schedule: Schedule, index: int) -> dict[str, int]:
    """The buffers and workspaces that are there while an instruction runs, with their bytes."""
    found: dict[str, int] = {}
    for place, item in enumerate(schedule.instructions):
        if item.kind == "start" and place <= index and schedule.collectives[item.of].staging_bytes:
            found[STAGING + item.of] = schedule.collectives[item.of].staging_bytes
        elif item.kind == "wait" and place < index:
            found.pop(STAGING + item.of, None)
        elif item.kind == "run" and place == index and schedule.operations[item.of].workspace:
            found[STAGING + item.of] = schedule.operations[item.of].workspace
    return found


def held_in_step(schedule: Schedule, optimizer: str) -> int:
    """Bytes of a rank in the optimizer's step, without states that lie on the host."""
    return _levels(schedule, schedule.once(storages_of))[-1] + resting_bytes(schedule, optimizer)


def host_peak(schedule: Schedule, optimizer: str) -> int:
    """Most bytes of a rank that lie on its host at one time: states throughout.

    A value is there from the start of its copy to its ``free``, or to the end.
    """
    held = most = 0
    for item in schedule.instructions:
        if item.kind == "start":
            held += sum(schedule.values[value].host_bytes for value in item.writes)
            most = max(most, held)
        elif item.kind == "free":
            held -= sum(schedule.values[value].host_bytes for value in item.reads)
    return most + sum(schedule.hosted_states(optimizer).values())


def between(schedule: Schedule, optimizer: str) -> int:
    """Bytes of a rank behind forward, or inference: what rests, the inputs, and results that backward or the caller read.

    No order holds less at the peak, so the list of ``ordered`` tells it before any pass.
    """
    root = schedule.storage
    first = schedule.instructions[0].half if schedule.instructions else None
    made = {value for item in schedule.instructions if item.half == first for value in item.writes}
    wanted = {value for item in schedule.instructions if item.half != first for value in item.reads}
    wanted.update(value for _, value in schedule.outputs)
    came = entering(schedule)
    kept = {root[value] for value in made & wanted} - came.keys()
    mine = sum(came.values()) + sum(storage_bytes(schedule, name) for name in kept)
    return states_bytes(schedule, optimizer) + mine + bytes_of_others(schedule)
