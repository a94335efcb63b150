"""Offloading: values that forward makes and backward reads lie on the host in between, states of the optimizer between steps.

A value that is offloaded gets two layouts. ``VALUE@host`` is made in forward, by a copy to the host. ``VALUE@back`` is made of that in
backward, by a copy back, and read there instead of the value. The passes place these copies as they place collectives: a copy to the host
starts when the value is made, and its source goes when it was waited for; a copy back starts ahead of its reader.

States have no place in the list: ``Assignment.states_on_host`` names their parameters, and the optimizer's step moves them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.cost_models import Machine, find_optimizer
from autopar.graph import Graph
from autopar.schedule.array_schedule import storages_of
from autopar.schedule.assignment import BACK, BACKWARD, FORWARD, HOST, Assignment, Layout
from autopar.schedule.ordering import phases_in_order
from autopar.schedule.schedule import Schedule
from autopar.schedule.settings import PACE_SHARE, SMALL_OFFLOADED_SHARE
from autopar.schedule.simulation import simulated
from autopar.schedule.storages import staying, storage_bytes


@dataclass(frozen=True)
class Offloadable:
    """A value that may be offloaded.

    Args:
        saved: bytes of the device that are free while it is on the host.
        copied: bytes that travel, each way.
        begin, end: places in the list: the last instruction of forward that needs its memory, and the first of backward that reads it.
        made_seconds: when it is made.
        idle_seconds: from then until backward reads it.
    """

    value: str
    saved: int
    copied: int
    begin: int
    end: int
    made_seconds: float
    idle_seconds: float


def find_offloadable(schedule: Schedule, timed: Schedule) -> tuple[Offloadable, ...]:
    """The values that forward makes and backward reads, that do not leave, and that are all of their memory, and alone read in backward.

    First come those that the link can copy as they are made, then the others; of each, those that are idle longest. A byte takes as long
    on the link whichever value it is of, and one that is idle longer hides more of it.

    Args:
        schedule: the list that says what is held.
        timed: the list of the same assignment that says when; it may overlap more, and hold more.
    """
    items, root, values = schedule.instructions, schedule.storage, schedule.values
    found, times = schedule.once(storages_of), _times(timed)
    kept = {root[value] for value in staying(schedule) if value in root} | {item.tensor for item in schedule.graph.inputs}
    made = {value for item in items if item.half == FORWARD and item.kind in ("run", "wait", "slice") for value in item.writes}
    last, first = dict[str, int](), dict[str, int]()
    read: dict[str, set[str]] = {}
    for place, item in enumerate(items):
        if item.kind == "free":
            continue
        for value in (*item.reads, *item.writes):
            if item.half == FORWARD and value in root:
                last[root[value]] = place
        for value in item.reads:
            if item.half == BACKWARD and value in made:
                first.setdefault(value, place)
                read.setdefault(root[value], set()).add(value)
    final = next((op.outputs for op in reversed(phases_in_order(schedule.graph)) if op.phase == FORWARD), ())
    shared = {call.id for call in schedule.calls if len(call.parts) > 1}
    there = set(found.names)
    chosen, least = [], SMALL_OFFLOADED_SHARE * sum(storage_bytes(schedule, storage) for storage in read if storage in there)
    for storage, members in read.items():
        value = next(iter(members))
        if len(members) > 1 or storage in kept or storage in shared or storage not in there or value in final:
            continue
        if values[value].spec is None or values[value].order.repeats or not values[value].bytes or values[value].host_bytes:
            continue
        saved, copied = storage_bytes(schedule, storage), values[value].bytes
        if saved > copied or copied < least:
            continue
        begin, end = last[storage], first[value]
        made_at, read_at = times[value]
        chosen.append(Offloadable(value, saved, copied, begin, end, made_at, read_at - made_at))
    paced = _find_paced(chosen, schedule.machine, PACE_SHARE * max((read for _, read in times.values()), default=0.0))
    return tuple(sorted(chosen, key=lambda item: (item.value not in paced, -item.idle_seconds, item.value)))


def _find_paced(candidates: Iterable[Offloadable], machine: Machine, patience: float) -> set[str]:
    """The values that the link copies to the host as they are made: each waits for those before it no longer than ``patience`` seconds."""
    paced, free = set[str](), 0.0
    for item in sorted(candidates, key=lambda item: (item.made_seconds, item.value)):
        begin = max(item.made_seconds, free)
        if begin - item.made_seconds <= patience:
            paced.add(item.value)
            free = begin + machine.transfer_seconds(item.copied)
    return paced


def _times(schedule: Schedule) -> dict[str, tuple[float, float]]:
    """For each value of forward that an operator or call of backward reads, the seconds at which it is made and first read."""
    made, found = dict[str, float](), dict[str, tuple[float, float]]()
    slots = iter(simulated(schedule))
    now = 0.0
    for item in schedule.rounds[-1][1]:
        if item.kind not in ("free", "slice"):
            slot = next(slots)
            now = slot.begin
        for value in item.reads:
            if item.half == BACKWARD and value in made:
                found.setdefault(value, (made[value], now))
        if item.half == FORWARD and item.kind not in ("free", "start"):
            made.update(dict.fromkeys(item.writes, now))
    return found


def find_hostable_states(schedule: Schedule, optimizer: str) -> dict[str, int]:
    """Bytes of the states of each parameter that may lie on the host, the largest first.

    An optimizer that makes matrices orthogonal steps them together, so that ranks share the work: their states stay on the device.
    """
    graph, whole = schedule.graph, find_optimizer(optimizer).others is not None
    names = frozenset(name for name in graph.stepped if not (whole and name in graph.matrices))
    return {name: size for name, size in replace(schedule, states_on_host=names).hosted_states(optimizer).items() if size}


def choose_states(states: Mapping[str, int], wanted: int, most: int) -> tuple[str, ...]:
    """Parameters whose states free ``wanted`` bytes: the largest, then the one that frees the fewest bytes over. All that fit, if too few.

    Args:
        states: bytes of each parameter's, the largest first.
        most: bytes of the rank's host.
    """
    names, chosen = list(states), list[str]()
    for place, name in enumerate(names):
        if wanted <= 0:
            break
        if states[name] >= wanted:
            name = next(other for other in reversed(names[place:]) if states[other] >= wanted)
        if states[name] <= most:
            chosen.append(name)
            wanted, most = wanted - states[name], most - states[name]
    return tuple(chosen)


def choose_for_host(
    candidates: Sequence[Offloadable], levels: Sequence[int], states: Mapping[str, int], limit: int, most: int, *, states_first: bool
) -> tuple[tuple[str, ...], tuple[str, ...]] | None:  # fmt: skip
    """Values, and parameters whose states go to the host, so that no level is over the limit; None where nothing suffices.

    Args:
        levels: bytes of a rank while each instruction runs, and in the optimizer's step.
        states: of ``find_hostable_states``.
        limit: bytes of a rank.
        most: bytes of its host.
        states_first: whether values go only where states do not suffice, else states only where values do not.
    """
    wanted, known = max(levels) - limit if states_first else 0, None
    while True:
        moved = choose_states(states, wanted, most)
        if moved == known:
            return None
        known = moved
        sizes = [states[name] for name in moved]
        after = [level - sum(sizes) for level in levels]
        after[-1] += sum(sorted(sizes)[-2:])  # pass through the device
        values, left = choose_offloaded(candidates, after, limit, most - sum(sizes))
        if not left:
            return values, moved
        wanted = sum(sizes) + left


def choose_offloaded(
    candidates: Sequence[Offloadable], levels: Sequence[int], limit: int, most: int
) -> tuple[tuple[str, ...], int]:  # fmt: skip
    """The values to offload so that no level is over the limit, as far as lists that copy in no time show; and bytes still over it.

    At each peak the value goes that is idle longest.

    Args:
        levels: bytes of a rank while each instruction runs.
        limit: bytes of a rank.
        most: bytes of its host.
    """
    held, left = np.array(levels, dtype=np.int64), list(candidates)
    chosen, on_host = list[str](), 0
    while len(held):
        peak = int(held.argmax())
        if held[peak] <= limit:
            break
        item = next((item for item in left if item.begin < peak < item.end and on_host + item.copied <= most), None)
        if item is None:
            return tuple(chosen), int(held[peak]) - limit
        left.remove(item)
        chosen.append(item.value)
        on_host += item.copied
        held[item.begin + 1 : item.end] -= item.saved
    return tuple(chosen), 0


def offload(graph: Graph, assignment: Assignment, schedule: Schedule, values: Collection[str]) -> Assignment:
    """The assignment with these values on the host between forward and backward.

    Args:
        schedule: one of it, which says who reads what.
        values: of ``find_offloadable``.
    """
    moved = frozenset(values)
    tensors = {value: schedule.values[value] for value in moved}
    made_by = {value: item for item in schedule.instructions if item.kind != "start" for value in item.writes if value in moved}
    after = _following(graph)
    reads = dict(assignment.reads or {})
    first: dict[str, str] = {}
    for item in schedule.instructions:
        for position, value in enumerate(item.reads):
            if item.kind == "run" and item.half == BACKWARD and value in moved:
                reads[item.of, position] = value + BACK
                first.setdefault(value, item.of)
    layouts = []
    for layout in assignment.layouts:
        if layout.half == BACKWARD and layout.source in moved:
            first.setdefault(layout.source, layout.before)
            layout = replace(layout, source=layout.source + BACK)
        layouts.append(layout)
    for value in sorted(moved):
        spec, tensor, maker = tensors[value].spec, tensors[value].tensor, made_by[value]
        assert spec is not None
        reader = schedule.layouts[value].before if value in schedule.layouts else maker.of
        layouts.append(Layout(value + HOST, tensor, value, spec, FORWARD, after[reader], on_host=True))
        layouts.append(Layout(value + BACK, tensor, value + HOST, spec, BACKWARD, first[value]))
    return replace(assignment, layouts=tuple(layouts), reads=reads)


def _following(graph: Graph) -> dict[str, str]:
    """For each operator of forward the one after it; for the last, itself: what it reads first is there before it."""
    forward = [op.name for op in phases_in_order(graph) if op.phase == FORWARD]
    return dict(zip(forward, [*forward[1:], *forward[-1:]], strict=True))
