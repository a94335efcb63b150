"""Storages: the memory that values lie in, its size, and the values that may be written over."""

from __future__ import annotations

from collections.abc import Collection

from autopar import pricing
from autopar.rules import is_alias, may_write_over
from autopar.schedule.instructions import Instruction
from autopar.schedule.schedule import Schedule


def entering(schedule: Schedule) -> dict[str, int]:
    """Bytes of the inputs and sums, which are there as the last microbatch begins. A cut input counts for all microbatches."""
    graph = schedule.graph
    found = {item.tensor: graph.parts(item.tensor) * schedule.local_bytes(item.tensor) for item in graph.inputs}
    return found | {name: schedule.local_bytes(name) for name in schedule.sums}


def held_throughout(schedule: Schedule) -> dict[str, int]:
    """The parameters, buffers and constants, with their bytes on a rank."""
    kinds = ("parameter", "buffer", "constant")
    return {item.tensor: schedule.local_bytes(item.tensor) for item in schedule.graph.inputs if item.kind in kinds}


def states_bytes(schedule: Schedule, optimizer: str) -> int:
    """Bytes of the optimizer's states that lie on the device between steps."""
    graph, hosted = schedule.graph, schedule.states_on_host
    return sum(pricing.state_bytes(graph, name, schedule.local_bytes(name), optimizer) for name in graph.stepped if name not in hosted)


def passing_bytes(schedule: Schedule, optimizer: str) -> int:
    """Bytes of states on the device during the optimizer's step alone: of the two largest of those that lie on the host."""
    return sum(tuple(schedule.hosted_states(optimizer).values())[:2])


def resting_bytes(schedule: Schedule, optimizer: str) -> int:
    """Bytes of a rank that are there throughout: parameters, buffers, constants, the optimizer's states, and other microbatches."""
    return sum(held_throughout(schedule).values()) + states_bytes(schedule, optimizer) + bytes_of_others(schedule)


def bytes_of_others(schedule: Schedule) -> int:
    """Bytes of a rank that the other microbatches in flight hold between forward and backward while one runs."""
    others = schedule.graph.accumulation.in_flight - 1
    return others * schedule.once(held_between_halves) if others else 0


def held_between_halves(schedule: Schedule) -> int:
    """Bytes of a rank that a microbatch holds between forward and backward."""
    items = schedule.instructions
    return held_at(schedule, next((index for index, item in enumerate(items) if item.half == "backward"), len(items)), ("input",))


def held_at(schedule: Schedule, place: int, kinds: Collection[str]) -> int:
    """Bytes of one microbatch before the instruction at ``place``: what those before it make, and the others read.

    Args:
        kinds: of graph inputs that are received by then.
    """
    root, items = schedule.storage, schedule.instructions
    received = {item.tensor for item in schedule.graph.inputs if item.is_received}
    arrived = {item.tensor for item in schedule.graph.inputs if item.is_received and item.kind in kinds}
    came = (entering(schedule).keys() | {root[value] for value in schedule.kept_values}) - received
    made = {root[value] for value in arrived} | {root[value] for item in items[:place] for value in item.writes}
    wanted = {root[value] for item in items[place:] if item.kind != "free" for value in item.reads}
    return sum(storage_bytes(schedule, base) for base in (made & wanted) - came)


def staying(schedule: Schedule) -> set[str]:
    """The values that are never freed: inputs, outputs, and what is kept over microbatches."""
    return {item.tensor for item in schedule.graph.inputs}.union((value for _, value in schedule.outputs), schedule.kept_values)


def storage_bytes(schedule: Schedule, root: str) -> int:
    """Bytes of a storage: of the value of that name, or of a collective's buffer."""
    call = schedule.collectives.get(root)
    return call.target_bytes if call is not None and not call.unpacks else schedule.values[root].bytes


def made_for_good(schedule: Schedule, maker: Instruction, item: Instruction) -> bool:
    """Whether the result of ``maker`` is memory of its own, of the half of the step that ``item`` is in."""
    operation = schedule.operations[maker.of]
    return maker.half == item.half and not operation.strategy.inner and not is_alias(operation.op)


def may_take(schedule: Schedule, item: Instruction) -> tuple[str, ...]:
    """The values that the result of an instruction could be written over: sources of its shape and dtype on every rank.

    A value whose view it reads too is none: entries of the view would be gone before they were read.
    """
    if item.kind != "run" or len(item.writes) != 1:
        return ()
    op, strategy, *_ = schedule.operations[item.of]
    places = may_write_over(op)
    if not places or strategy.inner:
        return ()
    fitting = [item.reads[place] for place in places if _as_large(schedule, item.reads[place], item.writes[0])]
    root = schedule.storage if fitting and len(item.reads) > 1 else {}
    return tuple([value for value in fitting if all(other == value or root[other] != root[value] for other in item.reads)])


def needed(schedule: Schedule, item: Instruction) -> tuple[str, ...]:
    """The values that must not change before an instruction is done; of a wait, the sources that its call sends in place."""
    if item.kind == "free":
        return ()
    if item.kind != "wait":
        return item.reads
    return schedule.collectives[item.of].reads_in_flight


def _as_large(schedule: Schedule, value: str, other: str) -> bool:
    """Whether two values have the same shape and dtype on every rank, and lie alike."""
    one, two, sizes = schedule.values[value], schedule.values[other], schedule.machine.mesh.sizes
    mine, its = schedule.graph.tensors[one.tensor], schedule.graph.tensors[two.tensor]
    if one.bytes != two.bytes or one.order != two.order or mine.dtype != its.dtype or one.spec is None or two.spec is None:
        return False
    if one.spec is two.spec and mine.shape == its.shape:
        return True  # as it mostly is
    return one.spec.lengths(mine.shape, sizes) == two.spec.lengths(its.shape, sizes)
