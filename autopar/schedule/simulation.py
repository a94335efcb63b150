"""How long a schedule takes: one compute stream, one stream a link, in the order of the list.

- An operator begins when the one before it has ended; one with collectives inside also holds their links.
- A collective begins when its start is reached, its links are free and what it reads has arrived. Where launches do not overlap with
  work (a CPU), nobody but the rank's own thread can hand over what arrives: a start that reads what is in flight waits for it.
- A wait lets the operators after it begin no earlier than the collective ends and its copies are made, which are operators' work. For a
  late one they do not wait: of what it brings only the loss is made, and that is read after the step.
- While any link is busy, operators run at ``1 - overlap_slowdown`` of their speed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from autopar.pricing import beside
from autopar.schedule.instructions import COMPUTE, Instruction
from autopar.schedule.schedule import Schedule


class Slot(NamedTuple):
    """An instruction with its place in time, in seconds. The operators stood still for it from ``since``, for ``stalled``: for a wait, or
    for a start that must itself wait for what it reads."""

    instruction: Instruction
    begin: float
    end: float
    since: float = 0.0
    stalled: float = 0.0


def simulate(instructions: Iterable[Instruction], slowdown: float = 0.0, *, overlaps: bool = True) -> tuple[Slot, ...]:
    """When each run, add, start and wait happens; of a start, when the collective runs.

    Args:
        slowdown, overlaps: the hardware's ``overlap_slowdown`` and ``launch_overlaps``.
    """
    return tuple(map(Slot._make, _happening(instructions, slowdown, overlaps)))


def _happening(
    instructions: Iterable[Instruction], slowdown: float, overlaps: bool
) -> Iterator[tuple[Instruction, float, float, float, float]]:
    """What slots are made of: of one list under another only the end is asked."""
    now = busy = 0.0
    free: dict[str, float] = {}
    ends: dict[str, float] = {}
    arrives: dict[str, float] = {}
    links_of: dict[str, tuple[str, ...]] = {}
    for item in instructions:
        kind = item.kind
        if kind == "free" or kind == "slice":
            continue
        links = links_of.get(item.stream)
        if links is None:
            links = links_of[item.stream] = tuple(stream for stream in item.streams if stream != COMPUTE)
        if kind == "run" or kind == "add":
            if links:
                begin = max([now, *[free.get(link, 0.0) for link in links]])
                end = begin + item.seconds
                free.update(dict.fromkeys(links, end))
                busy = max(busy, end)
            else:
                begin, end = now, beside(now, item.seconds, busy, slowdown)
            now = end
            yield item, begin, end, 0.0, 0.0
        elif kind == "start":
            arrived = now
            for value in item.reads:
                arrived = max(arrived, arrives.get(value, 0.0))
            begin = arrived
            for link in links:
                begin = max(begin, free.get(link, 0.0))
            end = begin + item.seconds
            for link in links:
                free[link] = end
            for value in item.writes:
                arrives[value] = end
            ends[item.of], busy = end, max(busy, end) if links else busy
            yield item, begin, end, now, 0.0 if overlaps else arrived - now
            now = now if overlaps else arrived
        else:
            arrived = now if item.late else max(now, ends[item.of])
            end = beside(arrived, item.seconds, busy, slowdown)
            yield item, now, end, now, arrived - now
            now = end


def simulated(schedule: Schedule) -> tuple[Slot, ...]:
    """The schedule on its own machine; where a step has several microbatches, the last of them."""
    hardware = schedule.machine.hardware
    return simulate(schedule.instructions, hardware.overlap_slowdown, overlaps=hardware.launch_overlaps)


def makespan(slots: Iterable[Slot]) -> float:
    """Seconds until the last instruction ends."""
    return max((slot.end for slot in slots), default=0.0)


def microbatches_seconds(schedule: Schedule) -> float:
    """All microbatches, one after another: the next begins when everything of the one before has ended."""
    hardware = schedule.machine.hardware
    rounds = (
        times * max((end for _, _, end, _, _ in _happening(instructions, hardware.overlap_slowdown, hardware.launch_overlaps)), default=0.0)
        for times, instructions in schedule.rounds
    )
    return sum(rounds)


def step_seconds(schedule: Schedule, optimizer: str) -> float:
    """One whole step: the simulated microbatches, then the optimizer's step on the local shards."""
    return schedule.once(microbatches_seconds) + schedule.optimizer_seconds(optimizer)
