"""reorder: what happens when, and which calls are one, changed one thing after another as long as the whole list takes no more and a rank
holds no more than it may.

The passes before decide by rules, each by what it knows. Here a move is judged by the list itself, in microseconds (``flat``), so that
thousands can be tried: most come to nothing, and a few find what no rule says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import count as numbers

import numpy as np

from autopar.schedule.bucketing import JOINED, size
from autopar.schedule.collectives import Collective, Part
from autopar.schedule.flat import BITS, DRAWS, Order, descended, flat
from autopar.schedule.instructions import Instruction
from autopar.schedule.legality import bytes_in_flight, is_legal
from autopar.schedule.ordering import start_and_wait, taken_by
from autopar.schedule.schedule import Schedule
from solvers.compiled import runs_loops

SHORT = 1e-3
"""Share of a list's seconds below which a call less is not hoped for."""
MOVES, EACH, WORK = 10_000, 60, 50_000_000
"""Moves that are tried, those for each instruction, and instructions that are simulated for them, at most."""
PLAIN = 100
"""Such a part of both where loops do not run as machine code."""


def reorder(schedule: Schedule, optimizer: str, limit: int, effort: int = 1, *, captured: bool = True) -> Schedule:
    """The schedule with what takes less, if there is any that is found, or with what holds less where it holds more than it may. Everything
    must have its place, and nothing say yet when memory goes (``passes.ENDING``); the limits grow with what is in flight and in buckets.

    Args:
        limit: bytes on a rank.
        effort: so many times as many moves are tried.
        captured: see ``descended``: what was reordered before is not as it was captured.
    """
    if schedule.machine.cost_model == "communication" or not schedule.instructions:
        return schedule
    count = len(schedule.instructions)
    tried = effort * min(MOVES, EACH * count, WORK // count) // (1 if runs_loops() else PLAIN)
    draws = np.random.default_rng(0).integers(0, 2**BITS, DRAWS * tried)
    arrays, order, items = flat(schedule, optimizer)
    descended(arrays, order, draws, limit, captured=captured)
    found = rebuilt(schedule, order, items)
    return found if is_legal(found) else schedule


def rebuilt(schedule: Schedule, order: Order, items: Sequence[Instruction]) -> Schedule:
    """The list in an order."""
    parts = [part for call in schedule.calls for part in call.parts]
    known = {call.parts: call for call in schedule.calls}
    number = numbers(max(item.id for item in schedule.instructions) + 1)
    calls, made = dict[str, Collective](), dict[int, Instruction]()
    for leader in np.flatnonzero(order.leader == np.arange(len(parts))).tolist():
        shared = _shared(order, parts, leader)
        call = known.get(shared) or Collective(shared[0].target + (f"+{len(shared) - 1}" if len(shared) > 1 else ""), shared)
        first = items[2 * leader]
        pair = start_and_wait(call, taken_by(call, schedule.machine), number)
        start, wait = (item._replace(stage=first.stage, microbatch=first.microbatch) for item in pair)
        calls[call.id], made[2 * leader], made[2 * leader + 1] = call, start, wait
    chosen = [made.get(place) or items[place] for place in order.items[: order.length[0]].tolist()]
    limits = replace(schedule.limits, bucket_bytes=max(map(size, calls.values()), default=0))
    limits = replace(limits, bucket_bytes=max(limits.bucket_bytes, schedule.limits.bucket_bytes))
    found = replace(schedule, instructions=tuple(chosen), collectives=calls, limits=limits)
    return replace(found, limits=replace(limits, ahead_bytes=max(limits.ahead_bytes, bytes_in_flight(found))))


def _shared(order: Order, parts: Sequence[Part], leader: int) -> tuple[Part, ...]:
    """The parts of a call."""
    found, slot = list[Part](), leader
    while slot >= 0:
        found.append(parts[slot])
        slot = int(order.following[slot])
    return tuple(found)


def saved_at_most(schedule: Schedule, seconds: float) -> float:
    """Seconds that fewer calls save of so many, at most: where two of one kind follow one another, a latency and the launches of copies
    into a buffer and out of it."""
    machine, saves, seen = schedule.machine, list[float](), set[object]()
    for item in schedule.instructions:
        call = schedule.collectives[item.of] if item.kind == "start" else None
        if call is None or call.kind not in JOINED:
            continue
        key = item.half, item.stage, item.microbatch, call.kind, call.axes, call.reduction, call.dtype, call.late
        if key in seen:
            less = machine.latency_seconds(call.kind, call.axes) + 2 * machine.copy_seconds(1, call.dtype)
            saves.append(schedule.times(item) * less)
        seen.add(key)
    return sum(one for one in saves if one >= SHORT * seconds)
