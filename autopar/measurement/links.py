"""Times of collectives, over sizes of tensors and of groups, all groups of a size at the same time as on a mesh; and what they cost the
computation beside them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from autopar.measurement.clock import WINDOWS, Clock, meet, most_over_ranks
from autopar.runtime.groups import group_of, groups
from autopar.torch_compat import functional_collectives
from cost_models import Mesh
from cost_models.fitting import CollectiveTime

BYTES = tuple(4096 * 8**power for power in range(5)) + (2**26,)
"""Of the gathered, reduced or exchanged tensor: 4 KiB to 64 MiB."""
MOST_CALLS = 40
OVERLAP_BYTES = 2**24
"""Of the all-reduce beside which the computation is timed."""


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

    def group(self, mesh: Mesh, axis: int) -> dist.ProcessGroup:
        """This rank's process group along ``axis``. Collective."""
        axes = (mesh.whole(axis),)
        mine = group_of(mesh, axes, self.rank)
        made = {members: dist.new_group(list(members), backend=self.backend) for members in groups(mesh, axes)}
        return made[mine]


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


def time_links(ranks: Ranks, clock: Clock, most_bytes: float, say: Callable[[str], None]) -> list[tuple[str, CollectiveTime]]:
    """``(link, time)`` of every kind of collective on tensors of up to ``most_bytes``, as this rank saw it. Collective."""
    found = []
    for link, mesh, axis in meshes(ranks):
        size = mesh.sizes[axis]
        say(f"collectives among {size} of {ranks.count} ranks over {ranks.backend}, {link}")
        group = ranks.group(mesh, axis)
        for kind, prepare in KINDS.items():
            for full in (full for full in BYTES if full <= most_bytes):
                call = prepare(full // size, size, group, ranks.device)
                found.append((link, CollectiveTime(kind, size, float(full), _seconds(call, clock))))
    return found


def time_overlap(ranks: Ranks, clock: Clock, stretch: float) -> float:
    """The share of compute speed that is lost beside a collective, as this rank saw it. Collective.

    A computation that takes as long as the collective is run beside it. If they take T each and M together, the computation advanced
    by (1 - s) T during the collective, and M = T + s T.
    """
    group = ranks.group(Mesh((("all", ranks.count),)), 0)
    collective = _reduce(OVERLAP_BYTES // ranks.count, ranks.count, group, ranks.device)
    a = torch.ones(256, 256, device=ranks.device)

    def compute(times: int) -> None:
        for _ in range(times):
            a @ a

    alone = _seconds(collective, clock)
    one = stretch * clock.seconds(lambda: a @ a)
    times = max(1, round(alone / one))
    both = _seconds(lambda: collective(lambda: compute(times)), clock)
    longer, shorter = max(alone, times * one), min(alone, times * one)
    return min(1.0, max(0.0, (both - longer) / shorter))


def _seconds(call: Callable[[], Any], clock: Clock) -> float:
    """Seconds of one of many calls in a row: the fastest of some windows, since other programs only ever add."""
    once = _window(call, 2, clock)
    calls = max(2, min(MOST_CALLS, math.ceil(WINDOWS * clock.window / max(most_over_ranks(once), 1e-9))))
    return min(_window(call, calls, clock) for _ in range(WINDOWS))


def _window(call: Callable[[], Any], calls: int, clock: Clock) -> float:
    meet()
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    if clock.device.type == "cuda":
        torch.cuda.synchronize(clock.device)
    return (time.perf_counter() - begin) / calls


Call = Callable[..., Any]


def _waiting(start: Callable[[], torch.Tensor]) -> Call:
    """Starts a collective, does something beside it, and waits."""

    def call(beside: Callable[[], Any] | None = None) -> None:
        started = start()
        if beside is not None:
            beside()
        functional_collectives().wait_tensor(started)

    return call


def _floats(nbytes: int, device: torch.device) -> torch.Tensor:
    return torch.ones(nbytes // 4, device=device)


def _reduce(block: int, size: int, group: dist.ProcessGroup, device: torch.device) -> Call:
    whole = _floats(block * size, device)
    return _waiting(lambda: functional_collectives().all_reduce(whole, "sum", group.group_name))


def _gather(block: int, size: int, group: dist.ProcessGroup, device: torch.device) -> Call:
    part = _floats(block, device)
    return _waiting(lambda: functional_collectives().all_gather_into_tensor(part, size, group.group_name))


def _reduce_scatter(block: int, size: int, group: dist.ProcessGroup, device: torch.device) -> Call:
    whole = _floats(block * size, device)
    return _waiting(lambda: functional_collectives().reduce_scatter_tensor(whole, "sum", size, group.group_name))


def _exchange(block: int, size: int, group: dist.ProcessGroup, device: torch.device) -> Call:
    part = _floats(block, device)
    each = [part.numel() // size] * size
    return _waiting(lambda: functional_collectives().all_to_all_single(part[: sum(each)], each, each, group.group_name))


def _permute(block: int, size: int, group: dist.ProcessGroup, device: torch.device) -> Call:
    """Every rank sends its block to the next one."""
    part, rank = _floats(block, device), dist.get_rank(group)
    sent, received = ([part.numel() * (member == other) for member in range(size)] for other in ((rank + 1) % size, (rank - 1) % size))
    return _waiting(lambda: functional_collectives().all_to_all_single(part, received, sent, group.group_name))


KINDS: dict[str, Callable[[int, int, dist.ProcessGroup, torch.device], Call]] = {
    "all_reduce": _reduce,
    "all_gather": _gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _exchange,
    "permute": _permute,
}
"""For each kind, what makes a call of it from a rank's block, an n-th of the full tensor."""
