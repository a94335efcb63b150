"""assign_in_place: a pointwise operator writes over a tensor of the same size that nobody needs any more.

PyTorch does so when a model runs eagerly: gradients are summed in place. Inputs stay as they are, and so do the results of forward: a
backward pass may run twice on them. The choice is made where memory is counted (``kernels.memory.peak_bytes``).
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
