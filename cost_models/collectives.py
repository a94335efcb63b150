"""The textbook costs of collectives: seconds under the alpha-beta model, and the bytes each rank receives.

Throughout, ``full`` is the bytes of the full (gathered, reduced or exchanged) tensor on the group, ``n`` the
group's size, ``latency`` seconds and ``bandwidth`` bytes/s each way per device (alpha = latency, beta = 1 / bandwidth).
The formulas are those of ring algorithms (Thakur, Rabenseifner and Gropp 2005), as Alpa and XLA use them; an
all-to-all is priced by what a rank receives, without Alpa's penalty of n/2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

Bytes = float
Seconds = float


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


def all_reduce(full: Bytes, group: Group) -> Seconds:
    """Every rank has ``full`` bytes and ends with their reduction: t = latency + 2 (n - 1) / n * full / bandwidth.

    >>> all_reduce(100.0, Group(size=4, latency=1.0, bandwidth=1.0))
    151.0
    """
    return group.latency + received_bytes("all_reduce", full, group.size) / group.bandwidth


def all_gather(full: Bytes, group: Group) -> Seconds:
    """Every rank has ``full / n`` bytes and ends with ``full``: t = latency + (n - 1) / n * full / bandwidth.

    >>> round(all_gather(2**30, Group(size=8, latency=1e-6, bandwidth=450e9)) * 1e3, 3)  # ms
    2.089
    """
    return group.latency + received_bytes("all_gather", full, group.size) / group.bandwidth


def reduce_scatter(full: Bytes, group: Group) -> Seconds:
    """Every rank has ``full`` bytes and ends with its part of the reduction: t = latency + (n - 1) / n * full / bandwidth.

    >>> reduce_scatter(100.0, Group(size=4, latency=1.0, bandwidth=1.0))
    76.0
    """
    return group.latency + received_bytes("reduce_scatter", full, group.size) / group.bandwidth


def all_to_all(full: Bytes, group: Group) -> Seconds:
    """Every rank has ``full / n`` bytes, keeps one n-th of them and sends the rest: t = latency + (n - 1) / n * (full / n) / bandwidth.

    >>> all_to_all(160.0, Group(size=4, latency=1.0, bandwidth=1.0))
    31.0
    """
    return group.latency + received_bytes("all_to_all", full, group.size) / group.bandwidth


def permute(full: Bytes, group: Group) -> Seconds:
    """Every rank has a block of ``full / n`` bytes and receives another rank's: t = latency + full / n / bandwidth.

    >>> permute(100.0, Group(size=4, latency=1.0, bandwidth=1.0))
    26.0
    """
    return group.latency + received_bytes("permute", full, group.size) / group.bandwidth


RECEIVED: Mapping[str, Callable[[int], float]] = {
    "slice": lambda n: 0.0,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / (n * n),
    "permute": lambda n: 1 / n,
}
"""For each kind, the fraction of ``full`` that each rank receives in a group of ``n``."""

SECONDS: Mapping[str, Callable[[Bytes, Group], Seconds]] = {
    "slice": lambda full, group: 0.0,
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "all_reduce": all_reduce,
    "all_to_all": all_to_all,
    "permute": permute,
}
"""For each kind, its price."""


def received_bytes(kind: str, full: Bytes, size: int) -> Bytes:
    """The bytes each rank receives in a collective of ``kind`` over ``size`` ranks (ring algorithms).

    >>> received_bytes("all_reduce", 100.0, 4)
    150.0
    """
    return full * RECEIVED[kind](size)
