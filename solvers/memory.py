"""Memory items under reduction: carried through merges, freed of what is constant, kept only at times that can bind.

Time is an index over the intervals between the moments at which anything begins or ends. ``rebuild`` gives each remaining node's
choices the items of all nodes merged into it, moves what all its choices use into the capacity, and keeps, of the times at which the
limit can be exceeded at all, those that no neighbouring time implies.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .arrays import VIEWS, Bytes, Floats, Ints, offsets, ranges
from .kernels import maximal_times, trace, views, wake
from .kernels.constants import INFEASIBLE
from .presolve_state import Network
from .problem import Problem


class Items(NamedTuple):
    """Choice c uses ``usage`` at ``begin <= t < end`` for its items ``ptr[c]:ptr[c + 1]``; time t has room ``capacity[t]``."""

    ptr: Ints
    begin: Ints
    end: Ints
    usage: Ints
    capacity: Ints
    time: Ints  # the problem's time at which each indexed time begins

    @property
    def owner(self) -> Ints:
        """The choice of each item."""
        return np.repeat(np.arange(len(self.ptr) - 1), np.diff(self.ptr))

    def of(self, choices: Ints) -> tuple[Ints, Ints]:
        """List the items of some choices: which of the choices, and the item's number."""
        which, item = ranges(np.diff(self.ptr)[choices])
        return which, item + self.ptr[choices[which]]

    def over_time(self, usage: Floats) -> Floats:
        """Sum what the items use at each time, given what each of them uses."""
        times = len(self.capacity) + 1
        result: Floats = np.cumsum(np.bincount(self.begin, usage, times) - np.bincount(self.end, usage, times))[:-1]
        return result

    def used(self, choices: Ints) -> Ints:
        """Sum what some choices use at each time."""
        _, item = self.of(choices)
        change = np.zeros(len(self.capacity) + 1, dtype=np.int64)
        np.add.at(change, self.begin[item], self.usage[item])
        np.subtract.at(change, self.end[item], self.usage[item])
        result: Ints = np.cumsum(change)[:-1]
        return result


VIEWS[Items] = views.Items


def memory(problem: Problem) -> Items:
    """Index the times of the problem's items; no items where there is no limit."""
    if problem.limit is None:
        none = np.zeros(0, dtype=np.int64)
        return Items(np.zeros(len(problem.costs) + 1, dtype=np.int64), none, none, none, none, none)
    kept = (problem.item_end > problem.item_begin) & (problem.item_usage > 0)
    begin, end, usage = problem.item_begin[kept], problem.item_end[kept], problem.item_usage[kept]
    times = np.unique(np.concatenate([begin, end]))
    owner = np.repeat(np.arange(len(problem.costs)), np.diff(problem.item_ptr))[kept]
    ptr = offsets(np.bincount(owner, minlength=len(problem.costs)).astype(np.int64))
    capacity = np.full(max(len(times) - 1, 1 if problem.limit < 0 else 0), problem.limit, dtype=np.int64)
    return Items(ptr, np.searchsorted(times, begin), np.searchsorted(times, end), usage, capacity, np.resize(times, len(capacity)))


def heavy_nodes(ptr: Ints, items: Items) -> Bytes:
    """Mark the nodes that have items."""
    return (items.ptr[ptr[1:]] > items.ptr[ptr[:-1]]).astype(np.uint8)


def rebuild(net: Network, old: Items, first_log: int) -> Items:
    """Gather the items of the nodes still present after the log entries from ``first_log`` on; marks infeasibility in the network."""
    horizon = len(old.capacity)
    root, map_at = np.full(len(net.present), -2, dtype=np.int64), np.zeros(len(net.present), dtype=np.int64)
    maps = np.empty(int(net.live_count.max()) * len(root), dtype=np.int64)  # room that is not used takes no memory
    trace(net, first_log, root, map_at, maps)
    members = np.flatnonzero(root >= 0)
    members = members[np.argsort(root[members], kind="stable")]
    constant, largest = np.zeros(horizon + 1, dtype=np.int64), np.zeros(horizon + 1, dtype=np.int64)
    gone = np.flatnonzero(root == -1)
    _, item = old.of(net.ptr[gone] + map_at[gone])
    np.add.at(constant, old.begin[item], old.usage[item])
    np.subtract.at(constant, old.end[item], old.usage[item])
    counts = np.zeros(len(net.live), dtype=np.int64)
    sketch = gather(net, old, root, map_at, maps, members, constant, largest, counts)
    capacity = old.capacity - np.cumsum(constant)[:horizon]
    if (capacity < 0).any():
        net.scalars[INFEASIBLE] = 1
        capacity = np.maximum(capacity, 0)
    binding = (np.cumsum(largest)[:horizon] > capacity).astype(np.uint8)
    begins, ends = (np.bincount(sketch[:, side], minlength=horizon + 1).astype(np.int64) for side in (0, 1))
    kept = np.zeros(horizon, dtype=np.uint8)
    maximal_times(binding, capacity, begins, ends, kept)
    return squeeze(offsets(counts), sketch, kept > 0, capacity, old.time)


def squeeze(ptr: Ints, items: Ints, kept: NDArray[np.bool_], capacity: Ints, time: Ints) -> Items:
    """Keep the items over the kept times only, without empty ones, and with equal neighbours joined."""
    place = offsets(kept.astype(np.int64))
    begin, end = place[items[:, 0]], place[items[:, 1]]
    owner = np.repeat(np.arange(len(ptr) - 1), np.diff(ptr))
    alive = end > begin
    begin, end, usage, owner = begin[alive], end[alive], items[alive, 2], owner[alive]
    joined = np.zeros(len(begin), dtype=bool)
    joined[1:] = (owner[1:] == owner[:-1]) & (begin[1:] == end[:-1]) & (usage[1:] == usage[:-1])
    first = np.flatnonzero(~joined)
    last = np.append(first[1:], len(begin))[: len(first)] - 1
    counts = np.bincount(owner[first], minlength=len(ptr) - 1).astype(np.int64)
    return Items(offsets(counts), begin[first], end[last], usage[first], capacity[kept], time[kept])


def drop_too_large(net: Network, items: Items) -> bool:
    """Remove choices that use more than the room at some time, whatever the others choose; True if any were."""
    if len(items.usage) == 0:
        return False
    lowest = [items.capacity]
    while 2 ** len(lowest) <= len(items.capacity):
        half = 2 ** (len(lowest) - 1)
        lowest.append(np.minimum(lowest[-1][:-half], lowest[-1][half:]))
    width = items.end - items.begin
    level = np.frexp(width.astype(np.float64))[1] - 1
    room = np.empty(len(width), dtype=np.int64)
    for at, row in enumerate(lowest):
        here = level == at
        room[here] = np.minimum(row[items.begin[here]], row[items.end[here] - 2**at])
    return drop(net, np.unique(items.owner[items.usage > room]))


def drop(net: Network, bad: Ints) -> bool:
    """Remove some choices, counted over all nodes; True if any were there."""
    nodes = np.unique(np.searchsorted(net.ptr, bad, side="right") - 1)
    lost = []
    for i in nodes[net.present[nodes] > 0].tolist():
        begin, live = net.ptr[i], net.live[net.ptr[i] : net.ptr[i] + net.live_count[i]]
        left = live[np.isin(begin + live, bad, invert=True)]
        if len(left) < len(live):
            live[: len(left)] = left
            net.live_count[i] = len(left)
            net.scalars[INFEASIBLE] |= len(left) == 0
            lost.append(i)
    wake(net, np.array(lost, dtype=np.int64), 1)
    return bool(lost)


def gather(
    net: Network, old: Items, root: Ints, map_at: Ints, maps: Ints, members: Ints, constant: Ints, largest: Ints, counts: Ints
) -> Ints:  # fmt: skip
    """Sum the items of each present node's members: (begin, end, usage) of each sum, in order of choices.

    Args:
        root, map_at, maps: see ``kernels.presolve.trace``.
        constant, largest: changes of usage at each time, added to: what every choice of a node uses, and how much more one may.
        counts: written to: the number of sums of each choice.
    """
    span = len(constant)
    member, j = ranges(net.live_count[root[members]])
    member = members[member]
    c = net.ptr[member] + maps[map_at[member] + j]
    pair, item = old.of(c)
    if len(item) == 0:
        return np.empty((0, 3), dtype=np.int64)
    node, j = root[member[pair]] * span, j[pair]
    moments, slots = np.unique(np.concatenate([node + old.begin[item], node + old.end[item]]), return_inverse=True)
    begin, end = slots[: len(item)], slots[len(item) :]

    # Levels of use lie in rows of all moments of one node, a row for each of its choices.
    nodes, first, widths = np.unique(moments // span, return_index=True, return_counts=True)
    heights = net.live_count[nodes]
    at = offsets(widths * heights)[:-1]
    which = np.repeat(np.arange(len(nodes)), widths)  # of each moment
    place = (at - first)[which]
    level = np.zeros(int((widths * heights).sum()), dtype=np.int64)
    np.add.at(level, place[begin] + begin + j * widths[which[begin]], old.usage[item])
    np.subtract.at(level, place[end] + end + j * widths[which[end]], old.usage[item])
    np.cumsum(level, out=level)  # each row ends at 0

    moment, height = ranges(heights[which])
    cells = place[moment] + moment + height * widths[which[moment]]
    starts = offsets(heights[which])[:-1]
    by_moment = level[cells]
    least, most = np.minimum.reduceat(by_moment, starts), np.maximum.reduceat(by_moment, starts)
    level[cells] -= least[moment]
    times = moments % span
    for sums, change in ((constant, least), (largest, most - least)):
        np.add.at(sums, times, np.diff(change, prepend=0))  # a node's last change is 0

    changes = np.flatnonzero(np.diff(level, prepend=0))
    begins = changes[:-1][level[changes[:-1]] > 0]
    ends = changes[1:][level[changes[:-1]] > 0]
    time_of = np.empty(len(level), dtype=np.int64)
    time_of[cells] = times[moment]
    row, _ = ranges(np.repeat(widths, heights))
    node_of_row, j_of_row = ranges(heights)
    owner = net.ptr[nodes[node_of_row]] + net.live[net.ptr[nodes[node_of_row]] + j_of_row]
    np.add.at(counts, owner[row[begins]], 1)
    return np.stack([time_of[begins], time_of[ends], level[begins]], axis=1)
