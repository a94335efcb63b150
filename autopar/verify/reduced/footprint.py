"""What all ranks hold together, in one process in which the ranks of a group share what they gather (``SharingRanks``)."""

from __future__ import annotations

import math
from dataclasses import replace

from autopar.cost_models.collectives import CALLS
from autopar.schedule import Collective, Schedule


def without_overwriting(schedule: Schedule) -> Schedule:
    """The schedule in which no operator writes over what ranks share: it makes its result in new memory."""
    storage = schedule.storage
    shared = {storage[part.target] for call in schedule.collectives.values() if _is_shared(call) for part in call.parts}
    spared = [item.over is not None and storage[item.over] in shared for item in schedule.instructions]
    calls = {item.of for item, spare in zip(schedule.instructions, spared, strict=True) if spare and item.kind == "start"}
    return replace(
        schedule,
        instructions=tuple(
            item._replace(over=None) if spare else item for item, spare in zip(schedule.instructions, spared, strict=True)
        ),
        collectives={name: replace(call, in_place=False) if name in calls else call for name, call in schedule.collectives.items()},
    )  # fmt: skip


def _is_shared(call: Collective) -> bool:
    kind = CALLS[call.kind]
    return kind.joins and not kind.cuts


def total_bytes(schedule: Schedule) -> int:
    """Bytes of all ranks' tensors at the peak, once for each group that shares them.

    A collective takes memory when it is waited for where it gathers, else when it starts, and gives its sources back then.
    """
    ranks, storage, values = schedule.machine.mesh.ranks, schedule.storage, schedule.values
    copies = {
        part.target: ranks // math.prod(axis.size for axis in call.axes)
        for call in schedule.collectives.values() if _is_shared(call) for part in call.parts
    }  # fmt: skip
    read = {value: index for index, item in enumerate(schedule.instructions) if item.kind != "free" for value in item.reads}
    live = {item.tensor: ranks * values[item.tensor].bytes for item in schedule.graph.inputs}
    live |= {name: ranks * values[name].bytes for name in schedule.sums}
    now = most = sum(live.values())
    for index, item in enumerate(schedule.instructions):
        gathers = item.kind in ("start", "wait") and _is_shared(schedule.collectives[item.of])
        made = () if item.kind == ("start" if gathers else "wait") else item.writes
        for value in made:
            if storage[value] not in live:
                live[storage[value]] = copies.get(value, ranks) * values[value].bytes
                now += live[storage[value]]
        most = max(most, now)
        gone = [value for value in item.reads if read[value] == index] if item.kind == "start" and not gathers else []
        for value in item.reads if item.kind == "free" else gone:
            if storage[value] == value and value in live:
                now -= live.pop(value)
    return most
