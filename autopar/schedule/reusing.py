"""reuse: a pointwise operator whose result is as large as a tensor that nobody needs any more writes over that tensor.

That is what PyTorch does with the same model run eagerly, where gradients are summed in place. What came in stays as it is, and so does
what forward left: a backward pass may run twice on it.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import replace

from autopar.rules import is_alias, may_write_over
from autopar.schedule.freeing import last_needs, staying
from autopar.schedule.instructions import Instruction
from autopar.schedule.schedule import Schedule


def reuse(schedule: Schedule) -> Schedule:
    """The schedule with ``over`` where memory is taken over. Comes after everything has its place, and before ``free``."""
    takers = {index: taken for index, item in enumerate(schedule.instructions) if (taken := may_take(schedule, item))}
    if not takers:
        return schedule
    lives, found = _Lives(schedule, frozenset().union(*takers.values())), list(schedule.instructions)
    for index, values in takers.items():
        item = found[index]
        over = lives.take(index, item, values)
        if over:
            found[index] = item._replace(over=over, bytes=0)
    return replace(schedule, instructions=tuple(found))


def undone(schedule: Schedule) -> Schedule:
    """The schedule with all results in memory of their own again."""
    items = list(schedule.instructions)
    for index, item in enumerate(items):
        if item.kind == "run" and item.over:
            items[index] = item._replace(over=None, bytes=schedule.local_bytes(item.writes[0]))
    return replace(schedule, instructions=tuple(items))


class _Lives:
    """When the memory of each storage is last needed, and who made what.

    Args:
        wanted: the values that may be written over.
    """

    def __init__(self, schedule: Schedule, wanted: Container[str]) -> None:
        self.schedule, self.root = schedule, schedule.storage
        self.maker: dict[str, Instruction] = {}
        self.last: dict[str, int] = {}
        self.now: dict[str, str] = {}
        for value, index in last_needs(schedule).items():
            storage = self.root[value]
            if index > self.last.get(storage, -1):
                self.last[storage] = index
        for item in schedule.instructions:
            if item.kind == "run":
                for value in item.writes:
                    if value in wanted:
                        self.maker[value] = item
        for value in staying(schedule).union(schedule.sums):
            self.last[self.root[value]] = len(schedule.instructions)

    def take(self, index: int, item: Instruction, values: Iterable[str]) -> str | None:
        """The one of ``values`` whose memory the result of an instruction takes; None when it needs its own."""
        for value in values:
            storage = self.now.get(value, value)
            maker = self.maker.get(value)
            if maker is None or self.root[value] != value or self.last[storage] != index or not made_for_good(self.schedule, maker, item):
                continue
            (result,) = item.writes
            self.now[result], self.last[storage] = storage, self.last[result]
            return value
        return None


def made_for_good(schedule: Schedule, maker: Instruction, item: Instruction) -> bool:
    """Whether what ``maker`` made is memory of its own, of the half of the step that ``item`` is in."""
    operation = schedule.operations[maker.of]
    return maker.half == item.half and not operation.strategy.inner and not is_alias(operation.op)


def may_take(schedule: Schedule, item: Instruction) -> tuple[str, ...]:
    """The values that the result of an instruction could lie over, as far as it is concerned: of its shape and dtype on every rank, and
    of which it reads no view beside them: entries of that would be gone before they were read."""
    if item.kind != "run" or len(item.writes) != 1:
        return ()
    op, strategy = schedule.operations[item.of]
    places = may_write_over(op)
    if not places or strategy.inner:
        return ()
    fitting = [item.reads[place] for place in places if _as_large(schedule, item.reads[place], item.writes[0])]
    root = schedule.storage if fitting and len(item.reads) > 1 else {}
    return tuple([value for value in fitting if all(other == value or root[other] != root[value] for other in item.reads)])


def needed(schedule: Schedule, item: Instruction) -> tuple[str, ...]:
    """The values that must be as they are until an instruction is done: of a wait what its call is sending from where it lies."""
    if item.kind == "free":
        return ()
    if item.kind != "wait":
        return item.reads
    return schedule.collectives[item.of].reads_in_flight


def _as_large(schedule: Schedule, value: str, other: str) -> bool:
    """Whether two values have the same shape and dtype on every rank."""
    one, two, sizes = schedule.values[value], schedule.values[other], schedule.machine.mesh.sizes
    mine, its = schedule.graph.tensors[one.tensor], schedule.graph.tensors[two.tensor]
    if one.bytes != two.bytes or mine.dtype != its.dtype or one.spec is None or two.spec is None:
        return False
    if one.spec is two.spec and mine.shape == its.shape:
        return True  # as it mostly is
    return one.spec.lengths(mine.shape, sizes) == two.spec.lengths(its.shape, sizes)
