"""Times of collectives, over sizes of tensors and of groups, all groups of a size at the same time as on a mesh and with work in between as
in a step; and what they cost the computation beside them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

import torch

from autopar.cost_models import Mesh
from autopar.cost_models.collectives import KINDS
from autopar.cost_models.fitting import CollectiveTime
from autopar.measurement.clock import Clock, meet, most_over_ranks
from autopar.measurement.gpu_clock import WINDOWS
from autopar.runtime.ranks.backends import Exchange, ProcessRanks
from autopar.runtime.ranks.groups import group_of

BYTES = tuple(4096 * 8**power for power in range(5)) + (2**26,)
"""Bytes of the gathered, reduced or exchanged tensor: 4 KiB to 64 MiB."""
Call = Callable[..., Any]
MOST_CALLS = 40
CALLS = (4, 12)
"""Calls in a window, at least and at most, with work between them."""
WORK_SECONDS = 0.004
"""Seconds of work between two calls.

Ranks that share cores take turns of milliseconds, so that they arrive at different times. A call right after another does not show
that, and a step has work between calls.
"""
OVERLAP_BYTES = 2**24
"""Bytes of the all-reduce beside which computation is timed."""
OVERLAP_ROUNDS = 9
"""Times that it is timed; the median counts."""


@dataclass(frozen=True)
class Ranks:
    """This process among the ranks.

    Args:
        rank, count: of the default process group.
        per_node: consecutive ranks of a node.
        device: where this rank's tensors are.
        backend: of the collectives, ``gloo`` or ``nccl``.
    """

    rank: int
    count: int
    per_node: int
    device: torch.device
    backend: str


def meshes(ranks: Ranks) -> Iterator[tuple[str, Mesh, int]]:
    """The links and the meshes to measure them on: ``(link, mesh, axis)`` for groups of 2, 4, ... inside a node and across nodes."""
    nodes = ranks.count // ranks.per_node
    for size in _sizes(ranks.per_node):
        yield "node", Mesh((("others", ranks.count // size), ("node", size))), 1
    for size in _sizes(nodes):
        yield "network", Mesh((("others", nodes // size), ("network", size), ("node", ranks.per_node))), 1


def _sizes(count: int) -> list[int]:
    """Powers of two that divide ``count``, and ``count``."""
    return sorted({2**power for power in range(1, count.bit_length()) if count % 2**power == 0} | {count} - {1})


def time_links(
    ranks: Ranks, clock: Clock, stretch: float, most_bytes: float, say: Callable[[str], None]
) -> list[tuple[str, CollectiveTime]]:  # fmt: skip
    """``(link, time)`` of every kind of collective on tensors of up to ``most_bytes``, as this rank saw it. Collective.

    Args:
        stretch: of the ranks (``Clock.stretch``).
    """
    found = []
    between = _work(clock) if clock.by_processor_time else None
    for link, mesh, axis in meshes(ranks):
        size = mesh.sizes[axis]
        say(f"collectives among {size} of {ranks.count} ranks over {ranks.backend}, {link}")
        backend = ProcessRanks(mesh, [(mesh.whole(axis),)])
        for kind in KINDS:
            for full in (full for full in BYTES if full <= most_bytes):
                call = _call(kind, full, mesh, axis, ranks, backend)
                seconds = _seconds(call, clock) if between is None else _seconds_between(call, between, stretch, clock)
                found.append((link, CollectiveTime(kind, size, float(full), seconds)))
    return found


def time_overlap(ranks: Ranks, clock: Clock, stretch: float, most_bytes: float) -> float:
    """The share of compute speed that is lost beside a collective, as this rank saw it. Collective.

    As in a step, work comes before, so that ranks that share cores meet apart. What is timed in turn: the work and as much again (2 C
    together), the same with a collective waited for in between (T longer), and with the second half beside it. If the computation
    advances by (1 - s) T during the collective, that saves (1 - s) min(T, C).
    """
    mesh = Mesh((("all", ranks.count),))
    collective = _call("all_reduce", min(OVERLAP_BYTES, int(most_bytes)), mesh, 0, ranks, ProcessRanks(mesh, [(mesh.whole(0),)]))
    a = torch.ones(256, 256, device=ranks.device)
    times = max(1, round(most_over_ranks(_seconds(collective, clock)) / (stretch * clock.seconds(lambda: a @ a))))

    def compute() -> None:
        for _ in range(times):
            a @ a

    def apart() -> None:
        compute()
        collective()
        compute()

    def beside() -> None:
        compute()
        collective(compute)

    def alone() -> None:
        compute()
        compute()

    seen = [tuple(_window(sequence, 2, clock) for sequence in (apart, beside, alone)) for _ in range(OVERLAP_ROUNDS)]
    long, short, work = map(median, zip(*seen, strict=True))
    return min(1.0, max(0.0, 1.0 - (long - short) / max(min(long - work, work / 2), 1e-9)))


def _seconds(call: Callable[[], Any], clock: Clock) -> float:
    """Seconds of one of many calls in a row: the fastest of some windows, since other programs only ever add."""
    once = _window(call, 2, clock)
    calls = max(2, min(MOST_CALLS, math.ceil(WINDOWS * clock.window / max(most_over_ranks(once), 1e-9))))
    return min(_window(call, calls, clock) for _ in range(WINDOWS))


def _work(clock: Clock) -> Callable[[], None]:
    """Products that take ``WORK_SECONDS`` of the processor."""
    a = torch.ones(256, 256)
    times = max(1, round(WORK_SECONDS / clock.seconds(lambda: a @ a)))

    def work() -> None:
        for _ in range(times):
            a @ a

    return work


def _seconds_between(call: Callable[[], Any], work: Callable[[], None], stretch: float, clock: Clock) -> float:
    """Seconds that one call adds to the work before it: the lower quartile of some windows, as that of measured steps is held against
    predictions. The least would leave out that ranks meet apart, which is most of what a small call costs in a step.

    The work's own share is its processor time, stretched.
    """
    once = most_over_ranks(_window(call, 2, clock))
    calls = max(CALLS[0], min(CALLS[1], math.ceil(8 * clock.window / (once + stretch * WORK_SECONDS))))
    seen = []
    for _ in range(WINDOWS):
        meet()
        worked, begin = 0.0, time.perf_counter()
        for _ in range(calls):
            before = clock.now()
            work()
            worked += clock.now() - before
            call()
        seen.append((time.perf_counter() - begin - stretch * worked) / calls)
    return max(quantiles(seen, n=4, method="inclusive")[0], once / 2)


def _window(call: Callable[[], Any], calls: int, clock: Clock) -> float:
    meet()
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    if clock.device.type == "cuda":
        torch.cuda.synchronize(clock.device)
    return (time.perf_counter() - begin) / calls


def _call(kind: str, full: int, mesh: Mesh, axis: int, ranks: Ranks, backend: ProcessRanks) -> Call:
    """A collective as a step makes it: started by the runtime's backend on what a rank puts in, something done beside it, waited for."""
    size = mesh.sizes[axis]
    exchange = Exchange(kind, (mesh.whole(axis),), sources=_next(mesh, axis) if KINDS[kind].pairs else ())
    buffer = torch.ones(full // 4 // (1 if KINDS[kind].takes_full else size), device=ranks.device)

    def call(beside: Callable[[], Any] | None = None) -> None:
        wait = backend.start(exchange, [buffer])
        if beside is not None:
            beside()
        wait()

    return call


def _next(mesh: Mesh, axis: int) -> tuple[int, ...]:
    """For each rank the one after it in its group: every rank sends its block to the one before."""
    found = []
    for rank in range(mesh.ranks):
        members = group_of(mesh, (mesh.whole(axis),), rank)
        found.append(members[(members.index(rank) + 1) % len(members)])
    return tuple(found)
