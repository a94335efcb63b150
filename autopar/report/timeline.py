"""The simulated step of a plan: its own schedule, in the order and with the seconds of the file, one row a stream."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autopar.compare.simulated_step import SimulatedStep
from autopar.graph import layer_of
from autopar.plan import Plan
from autopar.rows import CollectivePlan
from autopar.schedule.instructions import COMPUTE


@dataclass(frozen=True)
class Bar:
    """Something that holds a stream for a while, in seconds. ``kind`` is the phase of an operator, ``moving``, ``stalled`` or
    ``optimizer``; ``of`` is what the instruction calls its operator or collective."""

    stream: str
    name: str
    kind: str
    begin: float
    end: float
    of: str = ""


def bars(plan: Plan) -> tuple[Bar, ...]:
    """What holds each stream, in the order of the schedule, and at the end the optimizer's step; of several microbatches the last.

    Raises FileError."""
    found = tuple(bar for bar in _bars(plan) if bar.end > bar.begin)
    end, seconds = max((bar.end for bar in found), default=0.0), plan.predicted.optimizer_seconds
    return (*found, Bar(COMPUTE, f"optimizer: {plan.model.optimizer}", "optimizer", end, end + seconds)) if seconds > 0 else found


def levels(plan: Plan, held: Sequence[int]) -> tuple[tuple[float, int], ...]:
    """What a rank holds from each second on: the most of the instructions that the operators' stream comes to then.

    Args:
        held: the bytes while each instruction of the schedule runs.
    """
    slots = iter(SimulatedStep(plan).slots)
    at, most = 0.0, 0
    found: list[tuple[float, int]] = []
    for row, level in zip(plan.schedule, held, strict=True):
        now = at
        if row.kind in ("run", "add", "start", "wait"):
            slot = next(slots)
            now = max(slot.begin if row.kind in ("run", "add") else slot.since + slot.stalled, at)
        if now > at:
            found.append((at, most))
            at, most = now, 0
        most = max(most, level)
    return (*found, (at, most))


def layers(plan: Plan, found: Sequence[Bar]) -> tuple[tuple[str, float, float], ...]:
    """When the operators of each layer run, one span after another: (``layers.3``, begin, end). What is made of parameters alone, while
    another layer runs, breaks no span."""
    parameters = {row.tensor for row in plan.parameters.values()}
    modules = {row.name: row.module for row in plan.ops if not row.inputs or not parameters.issuperset(one.tensor for one in row.inputs)}
    spans: list[tuple[str, float, float]] = []
    for bar in found:
        if bar.stream != COMPUTE or bar.of not in modules:
            continue
        name = layer_of(modules[bar.of])
        if spans and spans[-1][0] == name:
            spans[-1] = name, spans[-1][1], bar.end
        else:
            spans.append((name, bar.begin, bar.end))
    return tuple(span for span in spans if span[0])


def streams(found: tuple[Bar, ...]) -> tuple[str, ...]:
    """The streams in use: the operators', then each link, and copies to the host and back."""
    links = sorted({bar.stream for bar in found} - {COMPUTE})
    return (COMPUTE, *links)


def call_name(row: CollectivePlan) -> str:
    """``all_gather of w0``; ``all_gather of 7 values from w0`` for a bucket."""
    parts = row.members
    return f"{row.kind} of {row.tensor}" if row.parts is None else f"{row.kind} of {len(parts)} values from {parts[0].tensor}"


def _bars(plan: Plan) -> Iterator[Bar]:
    calls = {row.id: call_name(row) for row in plan.collectives if row.id is not None}
    calls |= {row.id: f"{row.kind} of {row.tensor}" for row in plan.copies}
    for slot in SimulatedStep(plan).slots:
        item = slot.instruction
        begin = slot.begin + slot.stalled if item.kind == "wait" else slot.begin
        if slot.stalled > 0.0:
            verb = "waits for" if item.kind == "wait" else "waits to start"
            yield Bar(COMPUTE, f"{verb} {calls.get(item.of, item.of)}", "stalled", slot.since, slot.since + slot.stalled, item.of)
        for stream in item.streams:
            moving = item.kind == "start" or stream != COMPUTE
            name = calls.get(item.of, item.of)
            yield Bar(stream, name, "moving" if moving else item.phase, begin, slot.end, item.of)
