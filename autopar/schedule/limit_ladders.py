"""The values that the limit search tries for each limit of the passes, and the order in which it tries them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from autopar.schedule.accumulating import least_summed
from autopar.schedule.bucketing import size
from autopar.schedule.instructions import Limits, Segment
from autopar.schedule.schedule import Schedule
from autopar.schedule.settings import LADDER_HALVINGS, NOTHING_OR_ALL, SMALL_MODEL_BYTES


def effective_bytes(schedule: Schedule) -> Mapping[str, int]:
    """For each limit the bytes beyond which it changes nothing: all calls of the segment that sends most, all values, or all gradients that
    are larger before they are reduced."""
    sent = dict[Segment, int]()
    for item in schedule.instructions:
        if item.kind == "start":
            sent[item.segment] = sent.get(item.segment, 0) + size(schedule.collectives[item.of])
    calls, made = max(sent.values(), default=0), sum(value.bytes for value in schedule.values.values())
    leaving = [value for output, value in schedule.outputs if output.kind == "gradient"] if schedule.graph.microbatches > 1 else []
    whole = (schedule.values[schedule.values[value].tensor].bytes - least_summed(schedule, value) for value in leaving)
    return {"ahead_bytes": calls, "aside_bytes": made, "bucket_bytes": calls, "summed_bytes": sum(max(extra, 0) for extra in whole)}


def fit_ladder(ladder: Sequence[int], effective: int, memory_limit: int) -> Sequence[int]:
    """The values of a ladder for one model. A small model has the same values under every memory limit that is enough for them.

    Args:
        effective: bytes beyond which the limit changes nothing: see ``effective_bytes``.
        memory_limit: bytes of a rank.
    """
    if effective > SMALL_MODEL_BYTES:
        return cap_ladder(ladder, memory_limit)
    return tuple(value for value in cap_ladder(ladder, effective) if value <= memory_limit)


def cap_ladder(ladder: Sequence[int], most: int) -> Sequence[int]:
    """The values of a ladder up to ``most`` bytes: see ``LADDER_HALVINGS``. A ladder of two values is nothing or all."""
    if ladder[-1] <= most:
        return ladder
    if len(ladder) == len(NOTHING_OR_ALL):
        return ladder[0], most
    halves = [most >> power for power in range(LADDER_HALVINGS, -1, -1)]
    return tuple(sorted({value for value in ladder if value <= 1}.union(halves)))


def neighbour_limits(limits: Limits, name: str, ladder: Sequence[int]) -> Iterator[Limits]:
    """The limits with one of them on another rung: five near ones, the lowest, then the others. A value beyond the last rung is on it.

    The lowest comes early, because where all values are small the rungs between give the same list.
    """
    value = getattr(limits, name)
    place = min(range(len(ladder)), key=lambda index: abs(ladder[index] - value))
    near = sorted(range(len(ladder)), key=lambda rung: (abs(rung - place), -rung))
    for rung in dict.fromkeys((*near[:5], 0, *near)):
        changed: dict[str, Any] = {name: ladder[rung]}
        if ladder[rung] != min(value, ladder[-1]):
            yield replace(limits, **changed)
