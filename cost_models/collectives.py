"""Kinds of collectives, one record each, and their textbook costs: seconds under the alpha-beta model, bytes each rank receives.

Throughout, ``full`` is the bytes of the full (gathered, reduced or exchanged) tensor on the group, ``n`` the
group's size, ``latency`` seconds and ``bandwidth`` bytes/s each way per device (alpha = latency, beta = 1 / bandwidth).
The formulas are those of ring algorithms (Thakur, Rabenseifner and Gropp 2005), as Alpa and XLA use them; an
all-to-all is priced by what a rank receives, without Alpa's penalty of n/2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

Bytes = float
Seconds = float
KindName = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute"]
"""What plans and hardware files call a kind."""
TransferName = Literal["to_host", "from_host"]
"""What plans call a copy between a device and its host."""
Role = Literal["gather", "reduce", "rearrange"]


@dataclass(frozen=True)
class Group:
    """The ranks that run a collective together, and the slowest link between them.

    Args:
        size: how many ranks.
        latency: seconds before the first byte.
        bandwidth: bytes/s each way per device.
    """

    size: int
    latency: Seconds
    bandwidth: float


@dataclass(frozen=True)
class CollectiveKind:
    """All facts of one kind of collective.

    Args:
        name: in plans and hardware files, or of a step that a rank does alone.
        received: the fraction of ``full`` that each rank receives in a group of n.
        passes: how often it goes over the steps of its algorithm.
        reduces: a rank puts in the full tensor, and the ranks' values are reduced.
        cuts: the result is one of n blocks along a dim.
        joins: the result is put together from n blocks along a dim.
        pairs: each rank receives from one other: one step whatever the group, and the places in the group have an order.
        bucketable: several values of one dtype may share a call on a flat buffer.
    """

    name: str
    received: Callable[[int], float]
    passes: int = 1
    reduces: bool = False
    cuts: bool = False
    joins: bool = False
    pairs: bool = False
    bucketable: bool = False

    @property
    def takes_full(self) -> bool:
        """Whether a rank puts in the full tensor; else one of n parts."""
        return self.reduces

    @property
    def leaves_full(self) -> bool:
        """Whether a rank ends with the full tensor; else with one of n parts."""
        return (self.reduces or self.joins) and not self.cuts

    @property
    def in_place(self) -> bool:
        """Whether it may write its result over what a rank puts in: both are the full tensor."""
        return self.takes_full and self.leaves_full

    @property
    def ordered(self) -> bool:
        """Whether the places of ranks in the group matter."""
        return self.cuts or self.joins or self.pairs

    @property
    def role(self) -> Role:
        """What it does to a value."""
        return "reduce" if self.reduces else "gather" if self.leaves_full else "rearrange"

    @property
    def held_in_bucket(self) -> tuple[int, int]:
        """How often a call on several values holds what a rank puts in, and what it gets, at one moment, in buffers and results."""
        return (0, 0) if not self.bucketable else (int(not self.in_place), 1 + self.joins)


KINDS: Mapping[str, CollectiveKind] = {
    kind.name: kind
    for kind in (
        CollectiveKind("all_reduce", lambda n: 2 * (n - 1) / n, passes=2, reduces=True, bucketable=True),
        CollectiveKind("all_gather", lambda n: (n - 1) / n, joins=True, bucketable=True),
        CollectiveKind("reduce_scatter", lambda n: (n - 1) / n, reduces=True, cuts=True, bucketable=True),
        CollectiveKind("all_to_all", lambda n: (n - 1) / (n * n), cuts=True, joins=True),
        CollectiveKind("permute", lambda n: 1 / n, pairs=True),
    )
}
"""The collectives by name. An all-reduce is a reduce-scatter and then an all-gather: two passes."""

SLICE = CollectiveKind("slice", lambda n: 0.0, cuts=True)
"""A rank keeps its block, and sends nothing."""
MASK = CollectiveKind("mask", lambda n: 0.0)
"""The first rank keeps its value, the others hold zeros, and nothing is sent."""

STEP_KINDS: Mapping[str, CollectiveKind] = {SLICE.name: SLICE, MASK.name: MASK, **KINDS}
"""What a step of a reshard may be."""

TO_HOST, FROM_HOST = CollectiveKind("to_host", lambda n: 0.0), CollectiveKind("from_host", lambda n: 0.0)
"""A rank copies its own part to the memory of its host, and back. No other rank takes part."""
TRANSFERS: Mapping[str, CollectiveKind] = {kind.name: kind for kind in (TO_HOST, FROM_HOST)}
"""The copies between a device and its host, by name. Each has a stream of this name: copies of both ways run side by side."""

CALLS: Mapping[str, CollectiveKind] = {**KINDS, **TRANSFERS}
"""What is started and waited for beside operators."""


def seconds(kind: str, full: Bytes, group: Group) -> Seconds:
    """The price of a collective: t = latency + received bytes / bandwidth; what a rank does alone takes no time."""
    return group.latency + received_bytes(kind, full, group.size) / group.bandwidth if kind in KINDS else 0.0


def received_bytes(kind: str, full: Bytes, size: int) -> Bytes:
    """The bytes each rank receives in a collective of ``kind`` over ``size`` ranks (ring algorithms).

    >>> received_bytes("all_reduce", 100.0, 4)
    150.0
    """
    return full * STEP_KINDS[kind].received(size)


def all_reduce(full: Bytes, group: Group) -> Seconds:
    """Every rank has ``full`` bytes and ends with their reduction: t = latency + 2 (n - 1) / n * full / bandwidth.

    >>> all_reduce(100.0, Group(size=4, latency=1.0, bandwidth=1.0))
    151.0
    """
    return seconds("all_reduce", full, group)


def all_gather(full: Bytes, group: Group) -> Seconds:
    """Every rank has ``full / n`` bytes and ends with ``full``: t = latency + (n - 1) / n * full / bandwidth.

    >>> round(all_gather(2**30, Group(size=8, latency=1e-6, bandwidth=450e9)) * 1e3, 3)  # ms
    2.089
    """
    return seconds("all_gather", full, group)


def reduce_scatter(full: Bytes, group: Group) -> Seconds:
    """Every rank has ``full`` bytes and ends with its part of the reduction: t = latency + (n - 1) / n * full / bandwidth.

    >>> reduce_scatter(100.0, Group(size=4, latency=1.0, bandwidth=1.0))
    76.0
    """
    return seconds("reduce_scatter", full, group)


def all_to_all(full: Bytes, group: Group) -> Seconds:
    """Every rank has ``full / n`` bytes, keeps one n-th of them and sends the rest: t = latency + (n - 1) / n * (full / n) / bandwidth.

    >>> all_to_all(160.0, Group(size=4, latency=1.0, bandwidth=1.0))
    31.0
    """
    return seconds("all_to_all", full, group)


def permute(full: Bytes, group: Group) -> Seconds:
    """Every rank has a block of ``full / n`` bytes and receives another rank's: t = latency + full / n / bandwidth.

    >>> permute(100.0, Group(size=4, latency=1.0, bandwidth=1.0))
    26.0
    """
    return seconds("permute", full, group)
