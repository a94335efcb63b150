"""The simulated step of a plan: its own schedule, in the order and with the seconds of the file, one row a stream."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from autopar.compare.moments import Moments
from autopar.plan import Plan
from autopar.rows import CollectivePlan
from autopar.schedule.instructions import COMPUTE


@dataclass(frozen=True)
class Bar:
    """Something that holds a stream for a while, in seconds. ``kind`` is the phase of an operator, ``moving`` or ``stalled``."""

    stream: str
    name: str
    kind: str
    begin: float
    end: float


def bars(plan: Plan) -> tuple[Bar, ...]:
    """What holds each stream, in the order of the schedule; of several microbatches in the last. Raises FileError."""
    return tuple(bar for bar in _bars(plan, plan.microbatches - 1) if bar.end > bar.begin)


def step_bars(plan: Plan) -> tuple[Bar, ...]:
    """The same of all microbatches, one after another."""
    found: list[Bar] = []
    for number in range(plan.microbatches):
        begin = max((bar.end for bar in found), default=0.0)
        found += [replace(bar, begin=begin + bar.begin, end=begin + bar.end) for bar in _bars(plan, number) if bar.end > bar.begin]
    return tuple(found)


def streams(found: tuple[Bar, ...]) -> tuple[str, ...]:
    """The streams in use: the operators', then each link."""
    links = sorted({bar.stream for bar in found} - {COMPUTE})
    return (COMPUTE, *links)


def call_name(row: CollectivePlan) -> str:
    """``all_gather of w0``; ``all_gather of 7 values from w0`` for a bucket."""
    parts = row.members
    return f"{row.kind} of {row.tensor}" if row.parts is None else f"{row.kind} of {len(parts)} values from {parts[0].tensor}"


def _bars(plan: Plan, microbatch: int) -> Iterator[Bar]:
    calls = {row.id: call_name(row) for row in plan.collectives if row.id is not None}
    for slot in Moments(plan).of(microbatch):
        item = slot.instruction
        begin = slot.begin + slot.stalled if item.kind == "wait" else slot.begin
        if slot.stalled > 0.0:
            verb = "waits for" if item.kind == "wait" else "waits to start"
            yield Bar(COMPUTE, f"{verb} {calls.get(item.of, item.of)}", "stalled", slot.since, slot.since + slot.stalled)
        for stream in item.streams:
            moving = item.kind == "start" or stream != COMPUTE
            name = calls.get(item.of, item.of)
            yield Bar(stream, name, "moving" if moving else item.phase, begin, slot.end)
