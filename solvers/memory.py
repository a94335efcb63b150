"""Memory items under reduction: carried through merges, freed of what is constant, kept only at times that can bind.

Time is an index over the intervals between the moments at which anything begins or ends. ``rebuild`` gives each remaining node's
choices the items of all nodes merged into it, moves what all its choices use into the capacity, and keeps, of the times at which the
limit can be exceeded at all, those that no neighbouring time implies.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from solvers.arrays import Ints, offsets
from solvers.compiled import kernel, kernel_or
from solvers.network import FIXED, FOLLOWS, INFEASIBLE, LOG, Network, wake_around
from solvers.problem import Problem

ROUNDING = 1e-12
"""Share of all that is added up by which a difference of two sums of floats may be wrong, at most."""


class Memory(NamedTuple):
    """Choice c uses ``usage`` at ``begin <= t < end`` for its items ``ptr[c]:ptr[c + 1]``; time t has room ``capacity[t]``."""

    ptr: Ints
    begin: Ints
    end: Ints
    usage: Ints
    capacity: Ints
    time: Ints  # the problem's time at which each indexed time begins


def memory(problem: Problem) -> Memory:
    """The problem's items over indexed times; none where all choices that use the most, at once, keep to the limit."""
    if problem.limit is None or _most(problem) <= problem.limit:
        none = np.zeros(0, dtype=np.int64)
        return Memory(np.zeros(len(problem.costs) + 1, dtype=np.int64), none, none, none, none, none)
    kept = (problem.item_end > problem.item_begin) & (problem.item_usage > 0)
    begin, end, usage = problem.item_begin[kept], problem.item_end[kept], problem.item_usage[kept]
    times = np.unique(np.concatenate([begin, end]))
    owner = np.repeat(np.arange(len(problem.costs)), np.diff(problem.item_ptr))[kept]
    ptr = offsets(np.bincount(owner, minlength=len(problem.costs)).astype(np.int64))
    capacity = np.full(max(len(times) - 1, 1 if problem.limit < 0 else 0), problem.limit, dtype=np.int64)
    return Memory(ptr, np.searchsorted(times, begin), np.searchsorted(times, end), usage, capacity, np.resize(times, len(capacity)))


def _most(problem: Problem) -> float:
    """At least what any answer uses at any time."""
    running = np.concatenate([[0.0], np.cumsum(np.maximum(problem.item_usage, 0), dtype=np.float64)])
    choices = np.diff(running[problem.item_ptr])
    largest = np.maximum.reduceat(choices, problem.node_ptr[:-1]) if len(choices) else choices
    return float(largest.sum()) + ROUNDING * len(problem.costs) * float(running[-1])


def heavy_nodes(ptr: Ints, items: Memory) -> NDArray[np.uint8]:
    """1 for each node that has items."""
    return (items.ptr[ptr[1:]] > items.ptr[ptr[:-1]]).astype(np.uint8)


def rebuild(net: Network, old: Memory, first_log: int) -> Memory:
    """The items of the nodes still present after the log entries from ``first_log`` on; marks infeasibility in the network."""
    horizon = len(old.capacity)
    root, map_at = np.full(len(net.present), -2, dtype=np.int64), np.zeros(len(net.present), dtype=np.int64)
    present = np.flatnonzero(net.present)
    root[present] = present
    maps = np.zeros(trace_sizes(net, first_log, root.copy()), dtype=np.int64)
    trace(net, first_log, root, map_at, maps)
    members = np.flatnonzero(root >= 0)
    members = members[np.argsort(root[members], kind="stable")]
    constant, largest = np.zeros(horizon + 1, dtype=np.int64), np.zeros(horizon + 1, dtype=np.int64)
    use_constant(net, old, np.flatnonzero(root == -1), map_at, constant)
    counts = np.zeros(len(net.live), dtype=np.int64)
    sketch = np.empty((0, 3), dtype=np.int64)
    room = gather(net, old, root, map_at, maps, members, constant.copy(), largest.copy(), counts, sketch, False)
    sketch = np.empty((room, 3), dtype=np.int64)
    counts[:] = 0
    gather(net, old, root, map_at, maps, members, constant, largest, counts, sketch, True)
    capacity = old.capacity - np.cumsum(constant)[:horizon]
    if (capacity < 0).any():
        net.scalars[INFEASIBLE] = 1
        capacity = np.maximum(capacity, 0)
    ptr = offsets(counts)
    binding = np.cumsum(largest)[:horizon] > capacity
    kept = maximal_times(binding, capacity, sketch[:, 0], sketch[:, 1])
    return squeeze(ptr, sketch, kept, capacity, old.time)


def ranges(counts: Ints) -> tuple[Ints, Ints]:
    """[2, 0, 3] -> [0, 0, 2, 2, 2], [0, 1, 0, 1, 2]: which, and its place."""
    which = np.repeat(np.arange(len(counts)), counts)
    return which, np.arange(len(which)) - offsets(counts)[:-1][which]


def squeeze(ptr: Ints, items: Ints, kept: NDArray[np.bool_], capacity: Ints, time: Ints) -> Memory:
    """The items over the kept times only, those that became empty left out and equal neighbours joined."""
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
    return Memory(offsets(counts), begin[first], end[last], usage[first], capacity[kept], time[kept])


def drop_too_large(net: Network, items: Memory) -> bool:
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
    owner = np.repeat(np.arange(len(items.ptr) - 1), np.diff(items.ptr))
    bad = np.zeros(len(items.ptr) - 1, dtype=np.uint8)
    bad[owner[items.usage > room]] = 1
    return bool(bad.any()) and bool(drop(net, bad))


@kernel
def drop(net: Network, bad: NDArray[np.uint8]) -> bool:
    """Remove the choices marked bad."""
    dropped = False
    for i in range(len(net.present)):
        if net.present[i]:
            kept = 0
            for place in range(net.live_count[i]):
                k = net.live[net.ptr[i] + place]
                if bad[net.ptr[i] + k] == 0:
                    net.live[net.ptr[i] + kept] = k
                    kept += 1
            if kept < net.live_count[i]:
                dropped = True
                net.live_count[i] = kept
                wake_around(net, i)
                if kept == 0:
                    net.scalars[INFEASIBLE] = 1
    return dropped


@kernel
def trace_sizes(net: Network, first_log: int, root: Ints) -> int:
    total = 0
    for entry in range(net.scalars[LOG] - 1, first_log - 1, -1):
        node, first = net.log[entry, 1], net.log[entry, 2]
        if net.log[entry, 0] == FIXED:
            root[node] = -1
        elif net.log[entry, 0] == FOLLOWS:
            root[node] = root[first]
            if root[first] >= 0:
                total += net.live_count[root[first]]
    for i in range(len(root)):
        if net.present[i]:
            total += net.live_count[i]
    return total


@kernel
def trace(net: Network, first_log: int, root: Ints, map_at: Ints, maps: Ints) -> None:
    """For each node: the present node it follows and its choice for each live choice of that (root -1: the one choice, in map_at)."""
    used = 0
    for i in range(len(root)):
        if net.present[i]:
            map_at[i] = used
            for place in range(net.live_count[i]):
                maps[used + place] = net.live[net.ptr[i] + place]
            used += net.live_count[i]
    for entry in range(net.scalars[LOG] - 1, first_log - 1, -1):
        kind, node, first, data = net.log[entry, 0], net.log[entry, 1], net.log[entry, 2], net.log[entry, 4]
        if kind == FIXED:
            root[node], map_at[node] = -1, net.log_data[data]
        elif kind == FOLLOWS:
            root[node] = root[first]
            if root[first] == -1:
                map_at[node] = net.log_data[data + map_at[first]]
            elif root[first] >= 0:
                map_at[node] = used
                for place in range(net.live_count[root[first]]):
                    maps[used + place] = net.log_data[data + maps[map_at[first] + place]]
                used += net.live_count[root[first]]


@kernel
def use_constant(net: Network, old: Memory, nodes: Ints, choice: Ints, constant: Ints) -> None:
    for i in nodes:
        c = net.ptr[i] + choice[i]
        for item in range(old.ptr[c], old.ptr[c + 1]):
            constant[old.begin[item]] += old.usage[item]
            constant[old.end[item]] -= old.usage[item]


def plain_gather(
    net: Network,
    old: Memory,
    root: Ints,
    map_at: Ints,
    maps: Ints,
    members: Ints,
    constant: Ints,
    largest: Ints,
    counts: Ints,
    sketch: Ints,
    fill: bool,
) -> int:
    span = len(constant)
    member, j = ranges(net.live_count[root[members]])
    member = members[member]
    c = net.ptr[member] + maps[map_at[member] + j]
    pair, item = ranges(np.diff(old.ptr)[c])
    item += old.ptr[c[pair]]
    if len(item) == 0:
        return 0
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
    if fill:
        time_of = np.empty(len(level), dtype=np.int64)
        time_of[cells] = times[moment]
        sketch[:, 0], sketch[:, 1], sketch[:, 2] = time_of[begins], time_of[ends], level[begins]
    row, _ = ranges(np.repeat(widths, heights))
    node_of_row, j_of_row = ranges(heights)
    owner = net.ptr[nodes[node_of_row]] + net.live[net.ptr[nodes[node_of_row]] + j_of_row]
    np.add.at(counts, owner[row[begins]], 1)
    return len(begins)


@kernel_or(plain_gather)
def gather(
    net: Network,
    old: Memory,
    root: Ints,
    map_at: Ints,
    maps: Ints,
    members: Ints,
    constant: Ints,
    largest: Ints,
    counts: Ints,
    sketch: Ints,
    fill: bool,
) -> int:
    """Sum the items of each present node's members; returns the number of items, and writes them, in order of choices, when ``fill``."""
    used, first = 0, 0
    slot = np.zeros(len(constant), dtype=np.int64)
    while first < len(members):
        r, last = root[members[first]], first
        while last < len(members) and root[members[last]] == r:
            last += 1
        nd, events = net.live_count[r], 0
        for place in range(first, last):
            i = members[place]
            for j in range(nd):
                c = net.ptr[i] + maps[map_at[i] + j]
                events += 2 * (old.ptr[c + 1] - old.ptr[c])
        if events == 0:
            first = last
            continue
        moments = np.empty(events, dtype=np.int64)
        events = 0
        for place in range(first, last):
            i = members[place]
            for j in range(nd):
                c = net.ptr[i] + maps[map_at[i] + j]
                for item in range(old.ptr[c], old.ptr[c + 1]):
                    moments[events], moments[events + 1] = old.begin[item], old.end[item]
                    events += 2
        moments.sort()
        distinct = 0
        for place in range(events):
            if place == 0 or moments[place] != moments[place - 1]:
                moments[distinct] = moments[place]
                slot[moments[place]] = distinct
                distinct += 1
        level = np.zeros((nd, distinct), dtype=np.int64)
        for place in range(first, last):
            i = members[place]
            for j in range(nd):
                c = net.ptr[i] + maps[map_at[i] + j]
                for item in range(old.ptr[c], old.ptr[c + 1]):
                    level[j, slot[old.begin[item]]] += old.usage[item]
                    level[j, slot[old.end[item]]] -= old.usage[item]
        for t in range(1, distinct):
            for j in range(nd):
                level[j, t] += level[j, t - 1]
        for t in range(distinct - 1):
            least, most = level[0, t], level[0, t]
            for j in range(nd):
                least, most = min(least, level[j, t]), max(most, level[j, t])
            constant[moments[t]] += least
            constant[moments[t + 1]] -= least
            largest[moments[t]] += most - least
            largest[moments[t + 1]] -= most - least
            for j in range(nd):
                level[j, t] -= least
        for j in range(nd):
            t = 0
            while t < distinct - 1:
                begin = t
                while t < distinct - 1 and level[j, t] == level[j, begin]:
                    t += 1
                if level[j, begin] > 0:
                    if fill:
                        sketch[used, 0], sketch[used, 1], sketch[used, 2] = moments[begin], moments[t], level[j, begin]
                    used += 1
                    counts[net.ptr[r] + net.live[net.ptr[r] + j]] += 1
        first = last
    return used


@kernel
def maximal_times(binding: NDArray[np.bool_], capacity: Ints, begin: Ints, end: Ints) -> NDArray[np.bool_]:
    """Of the binding times, those that no neighbour implies: one with the same items or more, and no more room."""
    begins, ends = np.zeros(len(capacity) + 1, dtype=np.int64), np.zeros(len(capacity) + 1, dtype=np.int64)
    for t in begin:
        begins[t] += 1
    for t in end:
        ends[t] += 1
    kept = np.zeros(len(capacity), dtype=np.bool_)
    last, begun, ended = -1, 0, 0
    for t in range(len(capacity)):
        begun += begins[t]
        ended += ends[t]
        if not binding[t]:
            continue
        if last >= 0 and begun == 0 and capacity[last] <= capacity[t]:
            continue
        if last >= 0 and ended == 0 and capacity[t] <= capacity[last]:
            kept[last] = False
        kept[t] = True
        last, begun, ended = t, 0, 0
    return kept
