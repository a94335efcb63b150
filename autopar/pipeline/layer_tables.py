"""What each unit of the model takes and holds in a plan of the whole microbatch graph, for the solver that cuts the chain of units."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from autopar import pricing
from autopar.graph import Graph
from autopar.pipeline.cutting import ADDING, find_units, place_finely
from autopar.schedule import Schedule, simulate
from autopar.schedule.instructions import BEFORE_ALL
from autopar.schedule.storages import entering, storage_bytes
from autopar.solvers.pipeline import Mode


@dataclass(frozen=True)
class LayerTables:
    """The chain of units (see ``find_units``), each with its ways to run: as planned, or forward a second time in backward."""

    units: tuple[str, ...]
    modes: tuple[tuple[Mode, ...], ...]


def measure_layers(schedule: Schedule, optimizer: str) -> LayerTables:
    """Seconds and bytes of each unit for one microbatch, on a rank.

    Between the halves a unit holds what its operators made and backward reads. At rest it has its parameters, the copies of them that all
    microbatches read, the sums of their gradients and the optimizer's states.
    """
    graph, units = schedule.graph, find_units(schedule.graph)
    home, last = _homes(graph, units), len(units) - 1
    forward, backward = _seconds(schedule, home, last)
    held, first = _held(schedule, home, len(units))
    rest = _rest(schedule, optimizer, home, len(units))
    modes = []
    for number in range(len(units)):
        plain = Mode(forward[number], backward[number], 0.0, held[number], rest[number])
        again = Mode(forward[number], backward[number] + forward[number], 0.0, min(first[number], held[number]), rest[number])
        modes.append((plain, again) if again.held < plain.held else (plain,))
    return LayerTables(tuple(units), tuple(modes))


def least_modes(graph: Graph, seconds: Mapping[str, float]) -> tuple[Mode, ...]:
    """What each unit takes at least: its operators that no cut leaves out or places elsewhere.

    Left out are additions in backward, which may join the gradients of tied weights, and operators that stages copy. Backward operators are
    counted that stand with their module where every unit is a stage.

    Args:
        seconds: the least of each operator, by name.
    """
    units, placed = find_units(graph), place_finely(graph)
    home, found = _homes(graph, units), [[0.0, 0.0] for _ in units]
    for op in graph.ops:
        if placed.get(op.name) == home[op.name] and not (op.phase == "backward" and op.target == ADDING):
            found[home[op.name]][op.phase == "backward"] += seconds[op.name]
    return tuple(Mode(forward, backward) for forward, backward in found)


def _homes(graph: Graph, units: Mapping[str, int]) -> dict[str, int]:
    """The unit of each operator: in forward by its place, in backward that of its module.

    A conversion of a parameter is in the unit that reads it. Under autocast all of them stand before the first unit.
    """
    starts = [0, *list(units.values())[1:], len(graph.ops)]
    unit_of_op = {op.name: number for number, (begin, end) in enumerate(pairwise(starts)) for op in graph.ops[begin:end]}
    for name in graph.conversions:
        readers = [graph.ops[index] for index, _ in graph.consumers[graph.op[name].outputs[0]]]
        unit_of_op[name] = min((unit_of_op[op.name] for op in readers if op.phase == "forward"), default=unit_of_op[name])
    modules: dict[str, int] = {}
    for op in graph.ops:
        if op.phase == "forward":
            modules.setdefault(op.module, unit_of_op[op.name])
    last = len(units) - 1
    return {op.name: unit_of_op[op.name] if op.phase == "forward" else modules.get(op.module, last) for op in graph.ops}


def _seconds(schedule: Schedule, home: Mapping[str, int], last: int) -> tuple[list[float], list[float]]:
    """Seconds of each unit in forward, and in backward, of a microbatch that reduces no gradients.

    An operator counts from the end of the one before it: what operators stand still for is its own.
    """
    busy = {half: [0.0] * (last + 1) for half in ("forward", "backward")}
    items = [item for item in schedule.instructions if not item.microbatch]
    before = 0.0
    for slot in simulate(items, *schedule.machine.clock):
        item = slot.instruction
        if item.kind == "run":
            busy[item.half][home[schedule.operations[item.of].op.name]] += max(slot.end - before, 0.0)
            before = max(before, slot.end)
    return busy["forward"], busy["backward"]


def _held(schedule: Schedule, home: Mapping[str, int], count: int) -> tuple[list[float], list[float]]:
    """Bytes that each unit holds between the halves, and those of what it reads of units before.

    A copy in another layout is read as what it was made of; that of a parameter is no unit's before.
    """
    held, first = [0.0] * count, [0.0] * count
    root, came = schedule.storage, entering(schedule)
    wanted = {root[name] for item in schedule.instructions if item.half == "backward" for name in item.reads}
    maker, origins, read = dict[str, int](), dict[str, str](), set[tuple[int, str]]()
    for item in schedule.instructions:
        if item.half != "forward" or item.microbatch == BEFORE_ALL:
            continue
        sources = [origins.get(root[value], root[value]) for value in item.reads]
        if item.kind == "run":
            unit = home[schedule.operations[item.of].op.name]
            for source in sources:
                if maker.get(source, unit) < unit and (unit, source) not in read:
                    read.add((unit, source))
                    first[unit] += storage_bytes(schedule, source)
        else:
            unit = max((maker.get(source, 0) for source in sources), default=0)
        for base in dict.fromkeys(root[value] for value in item.writes):
            if base in maker or base in origins or base in came:
                continue
            if item.kind != "run" and sources:
                origins[base] = sources[0]
            else:
                maker[base] = unit
            held[unit] += storage_bytes(schedule, base) if base in wanted else 0
    return held, first


def _rest(schedule: Schedule, optimizer: str, home: Mapping[str, int], count: int) -> list[float]:
    graph, found, copies = schedule.graph, [0.0] * count, dict[str, int]()
    parameter_of = {graph.op[name].outputs[0]: parameter for name, parameter in graph.conversions.items()}
    for value in schedule.kept_values:
        tensor = schedule.values[value].tensor
        tensor = parameter_of.get(tensor, tensor)
        copies[tensor] = copies.get(tensor, 0) + schedule.local_bytes(value)
    for item in graph.of_kind("parameter"):
        readers = [home[graph.ops[index].name] for index, _ in graph.consumers[item.tensor] if graph.ops[index].phase == "forward"]
        size, steps = schedule.local_bytes(item.tensor), item.tensor in graph.stepped
        states = pricing.state_bytes(graph, item.tensor, size, optimizer) if steps else 0
        for unit in sorted(set(readers))[:1]:
            found[unit] += size * (2 if steps else 1) + states + copies.get(item.tensor, 0)
    return found
