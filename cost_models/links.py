"""Links: latency and bandwidth of a connection, for each kind of collective, and how a group over several links adds up.

A collective takes latency + received bytes / bandwidth (``collectives``). The latency is paid in steps, and how many steps there are
depends on the algorithm, which the hardware file names (``latency_growth``):

| growth | steps over n ranks | all-reduce | of |
|---|---|---|---|
| constant | 1 | 1 | the bare alpha-beta model of Alpa and XLA |
| ring | n - 1 | 2 (n - 1) | Thakur, Rabenseifner and Gropp 2005, sections 4.1 and 4.4; NCCL's rings (``tuning.cc``) |
| tree | log2 n, rounded up | twice that | recursive doubling and halving, Bruck's all-to-all: the same paper, sections 4.1 and 4.4 |

A permute is one step whatever the group: each rank sends once and receives once. A ring through several nodes crosses the slow link
only as often as there are nodes less one (NCCL's ``nInterSteps``): of N nodes with m ranks each, N - 1 of the N m - 1 steps are the
network's. H100 all-gathers over 2, 4 and 8 nodes of 8 were measured at 70, 146 and 297 us; a first step of 14 us on the network and steps
of 3.7 us on NVLink give 66, 146 and 305 us.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from .collectives import KINDS, SLICE, Group

Growth = Literal["constant", "ring", "tree"]

STEPS: Mapping[str, Callable[[int, int], int]] = {
    "constant": lambda size, passes: min(size - 1, 1),
    "ring": lambda size, passes: passes * (size - 1),
    "tree": lambda size, passes: passes * (size - 1).bit_length(),
}
"""For each growth, the steps of a collective over ``size`` ranks that goes over them in ``passes``."""


@dataclass(frozen=True)
class Figures:
    """What one kind of collective costs on a link.

    Args:
        latency_seconds: of a collective of one step, before the first byte.
        bandwidth: bytes/s each way per device.
        latency_growth: how the number of steps grows with the group.
        step_seconds: of each further step; as the first when None.
    """

    latency_seconds: float
    bandwidth: float
    latency_growth: Growth = "constant"
    step_seconds: float | None = None

    @property
    def further_step(self) -> float:
        """Seconds of each step after the first."""
        return self.latency_seconds if self.step_seconds is None else self.step_seconds


@dataclass(frozen=True)
class Link(Figures):
    """A connection between devices.

    Args:
        kinds: ``(kind, figures)`` pairs for the collectives that differ from the link's own figures.
    """

    kinds: tuple[tuple[str, Figures], ...] = ()

    @cached_property
    def _by_kind(self) -> Mapping[str, Figures]:
        return dict(self.kinds)

    def figures(self, kind: str) -> Figures:
        """Of ``kind``: its own, or the link's."""
        return self._by_kind.get(kind, self)


def group_over(kind: str, links: Sequence[tuple[Link, int]]) -> Group:
    """The group over parts of these links and sizes, for one kind of collective.

    The sizes multiply. The bandwidth is the smallest. The latency is the largest first step, and the further steps each on their
    link, the slowest link outermost.

    >>> network = Link(14e-6, 50e9, "ring")
    >>> node = Link(3.7e-6, 340e9, "ring")
    >>> group = group_over("all_gather", [(node, 8), (network, 2)])
    >>> group.size, round(group.latency * 1e6, 1), group.bandwidth
    (16, 65.8, 50000000000.0)
    """
    parts = sorted(((link.figures(kind), size) for link, size in links if size > 1), key=lambda part: -part[0].latency_seconds)
    of_kind = KINDS.get(kind, SLICE)
    size, latency, bandwidth = 1, 0.0, math.inf
    for number, (figures, more) in enumerate(parts):
        steps = STEPS["constant" if of_kind.pairs else figures.latency_growth]
        further = steps(size * more, of_kind.passes) - steps(size, of_kind.passes)
        latency += figures.latency_seconds + (further - 1) * figures.further_step if number == 0 else further * figures.further_step
        bandwidth = min(bandwidth, figures.bandwidth)
        size *= more
    return Group(size, latency, bandwidth)
