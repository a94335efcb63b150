"""The peak of memory as a schedule is run: what the operators that write over their input do not take beside it."""

from __future__ import annotations

from autopar.runtime.execution import fusion_of
from autopar.runtime.tail import Tail
from autopar.schedule import Schedule
from autopar.schedule.freeing import storage_bytes
from autopar.schedule.liveness import held


def spared_bytes(schedule: Schedule, optimizer: str) -> int:
    """By how much the peak of a rank is lower as run than by ``schedule.liveness``, which counts every operator's result beside its input.

    A result that takes the memory of ``value`` spares those bytes from then until ``value`` is freed; a contraction that an addition
    follows in one kernel gives its own result none.
    """
    fusion = fusion_of(schedule, in_place=True, tail=Tail())
    items = schedule.instructions
    freed = {value: index for index, item in enumerate(items) if item.kind == "free" for value in item.reads}
    taken = [(index, items[index].reads[position]) for index, position in fusion.in_place.items()]
    for pair in fusion.pairs.values():
        taken.append((pair.addition, items[pair.contraction].writes[0]))
        if pair.in_place:
            taken.append((pair.contraction, items[pair.addition].reads[pair.addend]))
    before = held(schedule, optimizer)
    run = list(before)
    for index, value in taken:
        size = storage_bytes(schedule, schedule.storage[value])
        for place in range(index, freed.get(value, index) + 1):
            run[place] -= size
    return max(before, default=0) - max(run, default=0)
