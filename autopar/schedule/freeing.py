"""free: every value goes as soon as nobody reads it any more."""

from __future__ import annotations

from autopar.schedule.instructions import Instruction
from autopar.schedule.schedule import Schedule
from autopar.schedule.storages import staying, storage_bytes


def free(schedule: Schedule) -> Schedule:
    """The schedule with a ``free`` after the last instruction that needs a value, numbered from 0.

    Inputs and outputs are never freed.
    """
    root, kept = schedule.storage, staying(schedule)
    ending: dict[int, list[str]] = {}
    alive: dict[str, int] = {}
    for value, index in last_needs(schedule).items():
        alive[root[value]] = alive.get(root[value], 0) + 1
        if value not in kept:
            ending.setdefault(index, []).append(value)
    found: list[Instruction] = []
    for index, item in enumerate(schedule.instructions):
        found.append(item._replace(id=len(found)))
        if index in ending:
            values = tuple(ending[index])
            back = 0
            for value in values:
                alive[root[value]] -= 1
                if not alive[root[value]]:
                    back += storage_bytes(schedule, root[value])
            found.append(Instruction(len(found), "free", item.phase, reads=values, bytes=back, microbatch=item.microbatch))
    return schedule.freed(tuple(found))


def last_needs(schedule: Schedule) -> dict[str, int]:
    """For each value the index of the last instruction that needs it. A call that does not copy its sources needs them until its wait."""
    last: dict[str, int] = {}
    calls = schedule.collectives
    for index, item in enumerate(schedule.instructions):
        for value in item.reads:
            last[value] = index
        for value in item.writes:
            last[value] = index
        if item.kind == "wait":
            call = calls[item.of]
            if not call.packs:
                for part in call.parts:
                    last[part.source] = index
    return last
