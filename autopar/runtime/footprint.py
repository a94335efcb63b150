"""The peak of memory as a schedule is run: what a contraction that an addition follows in one kernel does not take."""

from __future__ import annotations

from autopar.runtime.fusion import pairs_of
from autopar.schedule import Schedule
from autopar.schedule.freeing import storage_bytes
from autopar.schedule.liveness import held


def spared_bytes(schedule: Schedule, optimizer: str) -> int:
    """By how much the peak of a rank is lower as run than by ``schedule.liveness``, which counts the contraction's result beside what is
    added to it, and beside the sum where that takes memory of its own."""
    items = schedule.instructions
    freed = {value: index for index, item in enumerate(items) if item.kind == "free" for value in item.reads}
    before = held(schedule, optimizer)
    run = list(before)
    for pair in pairs_of(schedule, in_place=True).values():
        (value,) = items[pair.contraction].writes
        begin = pair.contraction if pair.in_place else pair.addition
        if items[pair.addition].over != value:
            for place in range(begin, freed.get(value, begin) + 1):
                run[place] -= storage_bytes(schedule, schedule.storage[value])
    return max(before, default=0) - max(run, default=0)
