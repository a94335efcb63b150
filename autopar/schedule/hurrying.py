"""hurry: what operators wait for passes what can follow it.

``prefetch`` places calls by a clock that knows no queues. So a call for which operators stand still may have started behind another that
is needed much later, or that holds its link's place while its own sources are still on another link; and operators may wait for one step
of a reshard whose next is needed much later. Here the simulated list itself says for what operators stood still: calls that held it up
and are waited for later start after it; a wait that nothing needs yet comes as many operators later as it stood still. A change is kept
only where the whole list takes less.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from autopar.schedule.instructions import Instruction
from autopar.schedule.legality import within_limits
from autopar.schedule.schedule import Schedule
from autopar.schedule.simulation import Slot, makespan, simulate

WORK, IDLE = 400_000, 12_000
"""Instructions that are simulated at most, in all lists tried together, and in those after the last that took less."""
SHORT = 1e-3
"""Share of the list's seconds below which stalls are not looked at: one alone, or all together."""
GAIN = 1e-5
"""Relative change that counts as one."""


class Move(NamedTuple):
    """Instructions that go behind another, by id; and what depends on them with them."""

    moved: frozenset[int]
    behind: int


def hurry(schedule: Schedule) -> Schedule:
    """The schedule with calls and waits in an order in which operators stand still for less. Everything must have its place, and nothing
    say yet when memory goes (``passes.ENDING``)."""
    hardware = schedule.machine.hardware
    if schedule.machine.cost_model == "communication" or not schedule.instructions:
        return schedule

    def slots_of(items: Sequence[Instruction]) -> tuple[Slot, ...]:
        return simulate(items, hardware.overlap_slowdown, overlaps=hardware.launch_overlaps)

    items, tried = schedule.instructions, set[Move]()
    work = idle = 0
    slots = slots_of(items)
    seconds = makespan(slots)
    while sum(slot.stalled for slot in slots) > SHORT * seconds:
        before = seconds
        fresh = [(stalled, move) for stalled, move in _moves(items, slots) if move not in tried]
        for moves in _shares(fresh, SHORT * seconds):
            if work > WORK or idle > IDLE:
                break
            work, idle = work + len(items), idle + len(items)
            tried.update(moves if len(moves) == 1 else ())
            changed = _after(items, moves)
            found = slots_of(changed)
            if makespan(found) < seconds * (1 - GAIN) and within_limits(replace(schedule, instructions=changed)):
                items, slots, seconds, idle = changed, found, makespan(found), 0
                break
        if seconds == before:
            break
    return replace(schedule, instructions=items)


def _shares(moves: Sequence[tuple[float, Move]], alone: float) -> Iterator[Sequence[Move]]:
    """All at once, since equal layers stand still alike, then half of them, those that promise most, and so on; and each of those for which
    operators stand still for ``alone`` seconds."""
    count = len(moves)
    while count > 1:
        yield [move for _, move in moves[:count]]
        count //= 2
    for stalled, move in moves:
        if stalled >= alone:
            yield (move,)


def _moves(items: Sequence[Instruction], slots: Sequence[Slot]) -> Iterator[tuple[float, Move]]:
    """What could help each stall, and how long that is, the longest first."""
    place = {item.id: index for index, item in enumerate(items)}
    waited = {item.of: index for index, item in enumerate(items) if item.kind == "wait"}
    starts = {slot.instruction.of: slot for slot in slots if slot.instruction.kind == "start"}
    producer = {value: slot for slot in starts.values() for value in slot.instruction.writes}
    queues = defaultdict[str, list[Slot]](list)
    for slot in starts.values():
        for link in slot.instruction.streams:
            queues[link].append(slot)
    for slot in sorted((slot for slot in slots if slot.stalled > 0.0), key=lambda slot: -slot.stalled):
        if slot.instruction.kind != "wait":  # a start that waits for what it reads
            continue
        wait = place[slot.instruction.id]
        for call in _awaited(starts[slot.instruction.of], producer):
            arrived = max([call.since, *(producer[value].end for value in call.instruction.reads if value in producer)])
            blocking = (other for link in call.instruction.streams for other in _before(call, queues[link], arrived))
            before = frozenset(other.instruction.id for other in blocking if waited[other.instruction.of] > wait)
            if before:
                yield slot.stalled, Move(before, call.instruction.id)
        later = _later(items, wait, slot.stalled)
        if later is not None:
            yield slot.stalled, Move(frozenset([slot.instruction.id]), later)


def _awaited(call: Slot, producer: Mapping[str, Slot]) -> Iterable[Slot]:
    """A call, and those before it that it waits for in flight."""
    found, todo = [], [call]
    while todo:
        one = todo.pop()
        found.append(one)
        makers = {producer[value].instruction.id: producer[value] for value in one.instruction.reads if value in producer}
        todo += [maker for maker in makers.values() if maker.end > one.since]
    return found


def _before(call: Slot, queue: Sequence[Slot], since: float) -> Iterator[Slot]:
    """Those of a link's calls, in their order, that hold it up after ``since``."""
    place = bisect_left(queue, call.begin, key=lambda slot: slot.begin)
    while place and queue[place - 1].end > since:
        place -= 1
        yield queue[place]


def _later(items: Sequence[Instruction], place: int, stalled: float) -> int | None:
    """The operator behind which what stood still at ``place`` would not have; None where the next one needs it."""
    needed, last, passed = set(items[place].writes), None, 0.0
    for number in range(place + 1, len(items)):
        item = items[number]
        if item.half != items[place].half:
            break
        if not needed.isdisjoint(item.reads):
            if item.kind == "run" or item.kind == "add":
                break
            needed.update(item.writes)
        elif item.kind == "run":
            last, passed = item.id, passed + item.seconds
            if passed >= stalled:
                break
    return last


def _after(items: Sequence[Instruction], moves: Iterable[Move]) -> tuple[Instruction, ...]:
    """The list with the moves made that can be."""
    found = list(items)
    place = {item.id: index for index, item in enumerate(found)}
    for move in moves:
        first, last = min(place[one] for one in move.moved), place[move.behind] + 1
        part = _moved(found[first:last], move) if first < last else None
        if part is not None:
            found[first:last] = part
            place.update((item.id, index) for index, item in enumerate(part, first))
    return tuple(found)


def _moved(items: Sequence[Instruction], move: Move) -> list[Instruction] | None:
    """The part of the list from the first that is moved to what it goes behind; None where something between needs it."""
    held, writes, calls = list[Instruction](), set[str](), set[str]()
    found = list[Instruction]()
    for item in items:
        follows = (item.kind == "wait" and item.of in calls) or not writes.isdisjoint(item.reads)
        if not follows and item.id not in move.moved:
            found.append(item)
        elif item.id == move.behind or item.kind == "run" or item.kind == "add":
            return None
        else:
            held.append(item)
            writes.update(item.writes)
            calls.update([item.of] if item.kind == "start" else ())
    return [*found, *held]
