"""How long a schedule takes: one compute stream, one stream a link, in the order of the list.

- An operator begins when the one before it has ended; one with collectives inside also holds their links.
- A collective begins when its start is reached, its links are free and its sources have arrived. Where launches do not overlap with work
  (a CPU), the rank's own thread hands sources over: a start with a source in flight waits for it.
- Operators after a wait begin when the collective has ended and its copies are made; copies are operators' work. Operators do not wait
  for a late one: only the loss is made of it, and that is read after the step.
- Where the host has a price (``Machine.execution``), it issues kernels and calls in the order of the list, each in the same time. Nothing
  begins before it is issued, a collective not before its copies are. It waits for the device before it reads values.
- While any link is busy, operators run at ``1 - overlap_slowdown`` of their speed. Copies to the host and back do not slow them: each way
  is a stream of its own, beside compute and links. A collective that waits for a copy slows operators from its start on.

The clock itself is ``kernels.clock.run_clock``, which the local search asks too.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from autopar.schedule.array_schedule import ints, rows, slowing_links
from autopar.schedule.instructions import COMPUTE, Instruction
from autopar.schedule.schedule import Schedule
from autopar.schedule.tables import CallCosts, ClockTable, Order, Timeline, run_clock, timeline_for


class Slot(NamedTuple):
    """An instruction with its place in time, in seconds. Operators stood still for it from ``since``, for ``stalled`` seconds."""

    instruction: Instruction
    begin: float
    end: float
    since: float = 0.0
    stalled: float = 0.0


def simulate(instructions: Iterable[Instruction], slowdown: float = 0.0, overlaps: bool = True, issue: float = 0.0) -> tuple[Slot, ...]:
    """When each run, add, start and wait happens; of a start, when the collective runs.

    Args:
        slowdown, overlaps, issue: see ``Machine.clock``.

    Raises:
        KeyError: a wait for a call that was not started.
    """
    items = _timed(instructions)
    _, timeline = _run(items, slowdown, overlaps, issue)
    columns = (array.tolist() for array in (timeline.begins, timeline.ends, timeline.since, timeline.stalls))
    return tuple(map(Slot, items, *columns))


def _timed(instructions: Iterable[Instruction]) -> list[Instruction]:
    """The instructions that take time."""
    return [item for item in instructions if item.kind != "free" and item.kind != "slice"]


def _run(items: list[Instruction], slowdown: float, overlaps: bool, issue: float) -> tuple[float, Timeline]:
    """The end of a list, and its timeline: each call is a slot of its own."""
    count = sum(item.kind == "start" for item in items)
    starts, copies, late, held = np.zeros(count), np.zeros(count), np.zeros(count, dtype=np.int64), [0] * (2 * count)
    order, seconds, flying, launches, waiting = list[int](), list[float](), list[list[int]](), [0] * (2 * count), [0] * (2 * count)
    begun, maker, bits, number = dict[str, int](), dict[str, int](), dict[str, int](), dict[str, int]()
    for item in items:
        links = bits.get(item.stream)
        if links is None:
            links = bits[item.stream] = sum(1 << number.setdefault(link, len(number)) for link in item.streams if link != COMPUTE)
        if item.kind == "start":
            slot = begun[item.of] = len(flying)
            flying.append([maker[value] for value in item.reads if value in maker])
            maker.update(dict.fromkeys(item.writes, slot))
            starts[slot], held[2 * slot], launches[2 * slot] = item.seconds, links, item.launches or 0
            order.append(2 * slot)
        elif item.kind == "wait":
            slot = begun[item.of]
            copies[slot], late[slot], launches[2 * slot + 1] = item.seconds, bool(item.late), item.launches or 0
            order.append(2 * slot + 1)
        else:
            order.append(2 * count + len(seconds))
            seconds.append(item.seconds)
            held.append(links)
            launches.append(item.launches or 0)
            waiting.append(bool(item.reads_back))
    size, none = len(held), np.zeros(2 * count)
    clock = ClockTable(
        np.zeros(size, dtype=np.int64), np.ones(size, dtype=np.int64), np.concatenate([none, seconds]), ints(held), late, ints(launches),
        ints(waiting), rows(flying), len(number), slowing_links(list(number)), slowdown, overlaps, issue,
    )  # fmt: skip
    slots = np.arange(count)
    timeline = timeline_for(len(order), count, len(number))
    listed = Order(ints(order), ints([len(order)]), slots, slots * 0 - 1)
    calls, storages = np.zeros((4, count), dtype=np.int64), np.zeros(0, dtype=np.int64)
    costs = CallCosts._make([starts, copies, *calls, ints(launches[: 2 * count : 2]), ints(launches[1 : 2 * count : 2]), storages])
    return run_clock(clock, listed, costs, 0, 0, 0, len(order) + 1, timeline, timeline), timeline


def simulated(schedule: Schedule) -> tuple[Slot, ...]:
    """The schedule on its own machine; where a step has several microbatches, the last of them."""
    return simulate(schedule.rounds[-1][1], *schedule.machine.clock)


def makespan(slots: Iterable[Slot]) -> float:
    """Seconds until the last instruction ends."""
    return max((slot.end for slot in slots), default=0.0)


def microbatches_seconds(schedule: Schedule) -> float:
    """All microbatches, one after another: the next begins when everything of the one before has ended."""
    ends = (_run(_timed(items), *schedule.machine.clock)[0] for _, items in schedule.rounds)
    return sum(times * end for (times, _), end in zip(schedule.rounds, ends, strict=True))


def step_seconds(schedule: Schedule, optimizer: str) -> float:
    """One whole step: the simulated microbatches, then the optimizer's step on the local shards."""
    return schedule.once(microbatches_seconds) + schedule.optimizer_seconds(optimizer)
