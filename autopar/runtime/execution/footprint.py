"""The peak of memory as a schedule is run.

It may be below the planned one: a contraction and an addition that run as one kernel make no tensor in between, nor does a mean, and a
collective may free its source before its wait.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autopar.runtime.instructions.fusion import pairs_of
from autopar.runtime.instructions.means import Mean, find_means
from autopar.runtime.ranks.collectives import Observed
from autopar.schedule import Schedule
from autopar.schedule.liveness import held
from autopar.schedule.storages import storage_bytes


def spared_bytes(schedule: Schedule, optimizer: str, observed: Sequence[Observed]) -> int:
    """By how much the peak of a rank is lower as run than by ``schedule.liveness``, which counts the contraction's result beside what is
    added to it, and beside the sum where that takes memory of its own; what a mean is made of; and the source of a collective until its
    wait, also where the ranks had to lay it into the buffer, or another call waited for it (how values lie in memory a schedule does not
    know).

    Args:
        observed: the collectives that were executed.
    """
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
    for mean in find_means(schedule).values():
        _run_mean(schedule, mean, freed, run)
    started = {item.of: index for index, item in enumerate(items) if item.kind == "start"}
    last = {schedule.storage[value]: index for value, index in freed.items()}
    names: dict[str, list[str]] = {}
    for value in freed:
        names.setdefault(schedule.storage[value], []).append(value)
    spared: dict[str, int] = {}
    for value, call in (pair for item in observed for pair in item.spared):
        spared[value] = min(started[call], spared.get(value, len(items)))
    for value, begin in spared.items():
        root = schedule.storage[value]
        others = [name for name in names.get(root, ()) if name != value and freed[name] > begin]
        if value in freed and not others:
            for place in range(begin + (value in items[begin].reads), last[root] + 1):
                run[place] -= storage_bytes(schedule, root)
    return max(before, default=0) - max(run, default=0)


def _run_mean(schedule: Schedule, mean: Mean, freed: Mapping[str, int], run: list[int]) -> None:
    """Takes from the bytes at each place what a mean does not make, and adds its result where it is earlier there."""
    items, root = schedule.instructions, schedule.storage
    result = root[mean.writes[0]]
    begin = next(place for place in mean.places if root[items[place].writes[0]] == result)
    for place in range(mean.places[0], begin):
        run[place] += storage_bytes(schedule, result)
    for first in mean.places[:-1]:
        (value,) = items[first].writes
        if root[value] == value != result:
            for place in range(first, freed[value] + 1):
                run[place] -= storage_bytes(schedule, value)
