"""expand_as_read: an expansion makes at once the one part in which it is read.

A slice of it would be a copy, as large as the part. The expansion itself takes no memory beside its source's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from autopar import pricing
from autopar.rules import find_strategy, is_expansion
from autopar.schedule.assignment import AGAIN
from autopar.schedule.instructions import Instruction, Value
from autopar.schedule.memory_orders import MemoryOrders
from autopar.schedule.schedule import Schedule


def expand_as_read(schedule: Schedule) -> Schedule:
    """The schedule with slices of expansions left out where operators alone read them. No seconds change.

    Comes last of all, when results are in memory of their own (``clear_in_place``): searches before it compare equal lists.
    """
    readers: dict[str, list[Instruction]] = {}
    for item in schedule.instructions:
        for value in item.reads:
            readers.setdefault(value, []).append(item)
    leaving = {value for _, value in schedule.outputs}
    orders = MemoryOrders(schedule.graph, schedule.machine)
    for item in schedule.instructions:
        if item.kind == "run" and leaving.isdisjoint(item.writes) and is_expansion(schedule.operations[item.of].op, schedule.graph.tensors):
            slices = _slices_behind(item, readers)
            if slices and slices[-1].writes[0] not in leaving:
                schedule = _left_out(schedule, item, slices, readers[slices[-1].writes[0]], orders)
    return schedule


def _slices_behind(item: Instruction, readers: Mapping[str, Sequence[Instruction]]) -> list[Instruction]:
    """The slices of one reshard that alone reads what an operator makes; none unless operators alone read the last."""
    found: list[Instruction] = []
    behind: Sequence[Instruction] = readers.get(item.writes[0], ())
    while len(behind) == 1 and behind[0].kind == "slice" and behind[0].of == (found[0] if found else behind[0]).of:
        found.append(behind[0])
        behind = readers.get(found[-1].writes[0], ())
    alike = all(other.microbatch == item.microbatch and other.half == item.half for other in found)
    return found if alike and behind and all(other.kind == "run" for other in behind) else []


def _left_out(
    schedule: Schedule, item: Instruction, slices: Sequence[Instruction], behind: Sequence[Instruction], orders: MemoryOrders
) -> Schedule:  # fmt: skip
    """The schedule without some slices; as it is where the operator cannot make what they make."""
    graph, (made,), last = schedule.graph, item.writes, slices[-1].writes[0]
    op, before, *_ = schedule.operations[item.of]
    spec = schedule.values[last].spec
    strategy = None if spec is None else find_strategy(op, graph.tensors, before.inputs, (spec,), schedule.machine.mesh.sizes)
    if spec is None or strategy is None or item.of.removesuffix(AGAIN) + AGAIN in schedule.operations:
        return schedule
    gone = {value for each in slices for value in each.writes}
    values = {name: value for name, value in schedule.values.items() if name not in gone}
    size = pricing.local_bytes(graph.tensors[op.outputs[0]], spec, schedule.machine)
    (order,), operation = orders.run(op, strategy, tuple(values[value].order for value in item.reads))
    values[made], operations = Value(op.outputs[0], spec, size, order), {**schedule.operations, item.of: operation}
    for reader in behind:
        given = tuple(values[made if value == last else value].order for value in reader.reads)
        results, operations[reader.of] = orders.run(operations[reader.of].op, operations[reader.of].strategy, given)
        if operations[reader.of].copied != schedule.operations[reader.of].copied:
            return schedule
        if results != tuple(values[value].order for value in reader.writes):
            return schedule
    left = (each for each in schedule.instructions if each.kind != "slice" or each.writes[0] not in gone)
    items = tuple(each._replace(reads=tuple(made if value == last else value for value in each.reads)) for each in left)
    return replace(
        schedule, instructions=items, operations=operations, values=values,
        cuts={name: cut for name, cut in schedule.cuts.items() if name not in gone},
        layouts={name: layout for name, layout in schedule.layouts.items() if name != last},
    )  # fmt: skip
