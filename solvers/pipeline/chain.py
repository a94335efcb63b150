"""The seconds and bytes of the chunks of one cut, as arrays that the kernels read, and the working space of their clock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..arrays import VIEWS, Floats, Ints
from ..kernels import views
from .problem import Mode, PipelineProblem
from .timetable import Operation

KINDS = "FBW"
"""The code of an operation is 3 chunk + place of its kind here."""


class Chain(NamedTuple):
    """n chunks on p devices.

    ``seconds`` [3 n] by code, ``hop`` [n] seconds to the next chunk, ``held`` [n] bytes of a microbatch in flight, ``room`` [p] bytes
    beside what rests, ``place`` [n] the devices; ``sizes`` = (n, p, m, kinds).
    """

    seconds: Floats
    hop: Floats
    held: Floats
    room: Floats
    place: Ints
    sizes: Ints


class Clock(NamedTuple):
    """Working space: ``ends`` [3 n m] of each code and microbatch; of each device when it is free, its bytes, its place; counts by code."""

    ends: Floats
    ready: Floats
    usage: Floats
    count: Ints  # type: ignore[assignment]  # as ``NamedTuple`` has a method of that name
    at: Ints
    queue: Ints
    waits: Ints


VIEWS[Chain] = views.Chain
VIEWS[Clock] = views.Clock


def make_clock(problem: PipelineProblem) -> Clock:
    """Working space for any cut of a problem."""
    n, p = problem.total_chunks, problem.devices
    ints = [np.zeros(size, dtype=np.int64) for size in (3 * n, p, p, p)]
    return Clock(np.zeros(3 * n * problem.microbatches), np.zeros(p), np.zeros(p), *ints)


def make_chain(problem: PipelineProblem, costs: Sequence[Mode]) -> Chain:
    """The arrays of chunks with these costs."""
    seconds = np.array([(cost.forward, cost.backward, cost.weights) for cost in costs], dtype=np.float64).reshape(-1)
    return Chain(
        seconds,
        np.array([*problem.hops, 0.0], dtype=np.float64),
        np.array([cost.held for cost in costs], dtype=np.float64),
        np.array(rooms(problem, costs), dtype=np.float64),
        np.array(problem.places, dtype=np.int64),
        np.array([problem.total_chunks, problem.devices, problem.microbatches, len(problem.kinds)], dtype=np.int64),
    )


def rooms(problem: PipelineProblem, costs: Sequence[Mode]) -> list[float]:
    """Bytes that each device has beside what rests on it, a tolerance for rounding included."""
    room = [problem.most_bytes] * problem.devices
    for cost, place in zip(costs, problem.places, strict=True):
        room[place] -= cost.rest
    return room


def fits(problem: PipelineProblem, costs: Sequence[Mode]) -> bool:
    """Whether some order fits: one microbatch at a time, which every device holds in all its chunks at once, is the least."""
    room = rooms(problem, costs)
    for cost, place in zip(costs, problem.places, strict=True):
        room[place] -= cost.held
    return min(room) >= 0.0


def line_length(problem: PipelineProblem) -> int:
    """Operations of each device."""
    return problem.chunks * problem.microbatches * len(problem.kinds)


def coded(orders: Sequence[Sequence[Operation]]) -> Ints:
    """Orders as codes, the lines of all devices one behind the other."""
    return np.array([3 * one.chunk + KINDS.index(one.kind) for line in orders for one in line], dtype=np.int64)


def decoded(codes: Ints, problem: PipelineProblem) -> tuple[tuple[Operation, ...], ...]:
    """Codes as orders."""
    lines = codes.reshape(problem.devices, -1).tolist()
    return tuple(tuple(Operation(KINDS[code % 3], code // 3) for code in line) for line in lines)
