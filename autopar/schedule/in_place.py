"""assign_in_place: a pointwise operator whose result is as large as a tensor that nobody needs any more writes over that tensor.

That is what PyTorch does with the same model run eagerly, where gradients are summed in place. What came in stays as it is, and so does
what forward left: a backward pass may run twice on it. Who takes what is decided where memory is counted (``kernels.memory.peak_bytes``).
"""

from __future__ import annotations

from dataclasses import replace

from autopar.schedule.array_schedule import storages_of
from autopar.schedule.schedule import Schedule


def assign_in_place(schedule: Schedule) -> Schedule:
    """The schedule with ``over`` where memory is taken over. Comes after everything has its place, and before ``free``."""
    found = storages_of(schedule, in_place=True)
    items = list(schedule.instructions)
    for index, storage in enumerate(found.lives.over[: len(items)].tolist()):
        if storage >= 0:
            items[index] = items[index]._replace(over=found.names[storage], bytes=0)
    return replace(schedule, instructions=tuple(items)).knowing(storages_of, found)


def clear_in_place(schedule: Schedule) -> Schedule:
    """The schedule with all results in memory of their own again."""
    items = list(schedule.instructions)
    for index, item in enumerate(items):
        if item.kind == "run" and item.over:
            items[index] = item._replace(over=None, bytes=schedule.local_bytes(item.writes[0]))
    return replace(schedule, instructions=tuple(items))
