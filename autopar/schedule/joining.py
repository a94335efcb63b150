"""join: two calls of one kind become one where the whole list takes less and a rank still holds no more than it may.

``bucket`` knows one size for all buckets: where memory is short at one moment, calls are small at all of them, each with its latency and
its launches of copies. Here calls that follow one another are joined one pair at a time, by the list as it is simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from typing import NamedTuple

from autopar.schedule.bucketing import JOINED, size
from autopar.schedule.collectives import Collective
from autopar.schedule.hurrying import SHORT, WORK
from autopar.schedule.instructions import Instruction, Schedule
from autopar.schedule.legality import is_legal
from autopar.schedule.ordering import start_and_wait, taken_by
from autopar.schedule.simulation import microbatches_seconds

PART = 0.1
"""Share of what one call less could save that it has to: memory is not held for less."""


class Pair(NamedTuple):
    """The starts of two calls of one kind that follow one another, and seconds that one call less saves, at most: its latency, and the
    launches of copies into its buffer and out of it."""

    first: Instruction
    second: Instruction
    saves: float


def join(schedule: Schedule, fits: Callable[[Schedule], bool]) -> Schedule:
    """The schedule with fewer calls. Everything must have its place, and nothing say yet when memory goes (``passes.ENDING``); the limit on
    buckets grows with what is joined. As many instructions are simulated as by ``hurry``, at most.

    Args:
        fits: whether a list holds no more than it may.
    """
    if schedule.machine.cost_model == "communication":
        return schedule
    seconds, work, gained = schedule.once(microbatches_seconds), 0, True
    while gained:
        gained, place = False, 0
        while place < len(pairs := [pair for pair in _pairs(schedule) if pair.saves >= SHORT * seconds]):
            before = schedule
            for tried in _joined(schedule, pairs[place]):
                work += len(tried.instructions)
                if work > WORK:
                    return schedule
                took = tried.once(microbatches_seconds)
                if took < seconds - PART * pairs[place].saves and is_legal(tried) and fits(tried):
                    schedule, seconds, gained = tried, took, True
                    break
            place += schedule is before
    return schedule


def saved_at_most(schedule: Schedule, seconds: float) -> float:
    """Seconds that ``join`` saves of so many, at most."""
    return sum(pair.saves for pair in _pairs(schedule) if pair.saves >= SHORT * seconds)


def _pairs(schedule: Schedule) -> list[Pair]:
    found, last = [], dict[object, Instruction]()
    machine = schedule.machine
    for item in schedule.instructions:
        call = schedule.collectives[item.of] if item.kind == "start" else None
        if call is None or call.kind not in JOINED:
            continue
        key = item.half, item.stage, item.microbatch, call.kind, call.axes, call.reduction, call.dtype, call.late
        if key in last:
            saves = machine.latency_seconds(call.kind, call.axes) + 2 * machine.copy_seconds(1, call.dtype)
            found.append(Pair(last[key], item, schedule.times(item) * saves))
        last[key] = item
    return found


def _joined(schedule: Schedule, pair: Pair) -> Iterator[Schedule]:
    """The list with both as one call that starts where the first did, and where the second did; it is waited for where the earlier of them
    was. None of them may be legal."""
    items, (first, second, _) = schedule.instructions, pair
    starts = [index for index, item in enumerate(items) if item.id in (first.id, second.id)]
    waits = {item.of: index for index, item in enumerate(items) if item.kind == "wait" and item.of in (first.of, second.of)}
    parts = (*schedule.collectives[first.of].parts, *schedule.collectives[second.of].parts)
    call = Collective(f"{parts[0].target}+{len(parts) - 1}", parts)
    calls = {name: other for name, other in schedule.collectives.items() if name not in waits} | {call.id: call}
    limits = replace(schedule.limits, bucket_bytes=max(schedule.limits.bucket_bytes, size(call)))
    number = count(max(item.id for item in items) + 1)
    made = start_and_wait(call, taken_by(call, schedule.machine), number)
    start, wait = (item._replace(stage=first.stage, microbatch=first.microbatch) for item in made)
    until = min(waits.values())
    for begin in starts:
        if begin < until:
            instead: dict[int, Instruction | None] = {**dict.fromkeys((*starts, *waits.values())), begin: start, until: wait}
            changed = (instead.get(index, item) for index, item in enumerate(items))
            yield replace(schedule, instructions=tuple([item for item in changed if item is not None]), collectives=calls, limits=limits)
