# cython: infer_types=True, annotation_typing=False, boundscheck=False, wraparound=False, initializedcheck=False, cdivision=True
"""Dominance: a choice goes when another of the same node is never worse, whatever the neighbours choose, and needs no more memory.

After propagation every row of every table has the minimum 0, so that the worst regret over each neighbour is at least 0 and the sum
can stop as soon as it exceeds what the choice saves. Equal choices are told apart by their number. No node loses choices in the
same sweep as a neighbour whose comparison counted on them: removals only shrink what is compared, so order does not matter.
"""

from __future__ import annotations

from solvers.arrays import Bytes, Ints
from solvers.kernels.constants import NEVER, VISITED
from solvers.kernels.views import Items, Network

AT, STEP, ACROSS, FROM, COUNT, SIDE = 0, 1, 2, 3, 4, 5
"""Of an edge of a node: where its table begins in the pool, strides for a choice of the node and of the neighbour, where the neighbour's
remaining choices begin, and how many they are; how many numbers that is."""


def thin(net: Network, items: Items, i: int, sides: Ints, columns: Ints) -> bool:
    """Remove the choices of node i that another can replace; whether any went.

    Args:
        sides, columns: scratch of ``SIDE`` numbers for each edge of the node.
    """
    begin, size, edges, end, place = net.ptr[i], net.ptr[i + 1] - net.ptr[i], 0, net.head[i], 0
    while end >= 0:
        e = end >> 1
        if net.edge_live[e]:
            w = net.eu[e] if end & 1 else net.ev[e]
            side = edges * SIDE
            sides[side + AT], sides[side + FROM], sides[side + COUNT] = net.at[e], net.ptr[w], net.live_count[w]
            sides[side + STEP], sides[side + ACROSS] = 1, size
            if net.eu[e] == i:
                sides[side + STEP], sides[side + ACROSS] = net.ptr[w + 1] - net.ptr[w], 1
            edges += 1
        end = net.following[end]
    before = net.live_count[i]
    while place < net.live_count[i]:
        b, gone = net.live[begin + place], False
        found = cheapest(net, sides, edges, b, columns)
        for other in range(net.live_count[i]):
            a = net.live[begin + other]
            saved = net.cost[begin + b] - net.cost[begin + a]
            if other == place or saved < 0 or not hopeful(net, columns, found, a, saved):
                continue
            if better(net, sides, edges, a, b, saved) and within(items, begin + a, begin + b):
                gone = True
                break
        if gone:
            net.live_count[i] -= 1
            for later in range(place, net.live_count[i]):
                net.live[begin + later] = net.live[begin + later + 1]
        else:
            place += 1
    return net.live_count[i] < before


def cheapest(net: Network, sides: Ints, edges: int, b: int, columns: Ints) -> int:
    """For each edge what the neighbour's choice that goes best with b costs, where its column begins in the pool, and the stride there:
    three numbers for each that allows b at all. Returns how many numbers."""
    found = 0
    for edge in range(edges):
        side = edge * SIDE
        least = NEVER
        for place in range(sides[side + COUNT]):
            column = sides[side + AT] + net.live[sides[side + FROM] + place] * sides[side + ACROSS]
            cost = net.pool[column + b * sides[side + STEP]]
            if cost < least:
                least = cost
                columns[found], columns[found + 1], columns[found + 2] = cost, column, sides[side + STEP]
        net.scalars[VISITED] += sides[side + COUNT]
        if least < NEVER:
            found += 3
    return found


def hopeful(net: Network, columns: Ints, found: int, a: int, saved: int) -> bool:
    """Whether choice a may be ``better``: what it costs more in the columns that go best with b is no more than it does at worst, so that a
    look at few entries rules out most."""
    left = saved
    for edge in range(0, found, 3):
        cost = net.pool[columns[edge + 1] + a * columns[edge + 2]]
        if cost >= NEVER:
            return False
        left -= cost - columns[edge]
    return left >= 0


def better(net: Network, sides: Ints, edges: int, a: int, b: int, saved: int) -> bool:
    """Whether choice a can always replace b by costs, of which it saves some of its own."""
    left = saved
    for edge in range(edges):
        side = edge * SIDE
        worst, count = -NEVER, sides[side + COUNT]
        net.scalars[VISITED] += count
        for place in range(count):
            column = sides[side + AT] + net.live[sides[side + FROM] + place] * sides[side + ACROSS]
            x, y = net.pool[column + a * sides[side + STEP]], net.pool[column + b * sides[side + STEP]]
            if y < NEVER:
                if x >= NEVER:
                    return False
                worst = max(worst, x - y)
                if worst > left:
                    return False
        if worst > -NEVER:
            left -= worst
        if left < 0:
            return False
    return True


def within(items: Items, a: int, b: int) -> bool:
    """Whether choice a uses at no time more than choice b; the items of a choice are disjoint and in order of time."""
    at = items.ptr[b]
    for item in range(items.ptr[a], items.ptr[a + 1]):
        time = items.begin[item]
        while time < items.end[item]:
            while at < items.ptr[b + 1] and items.end[at] <= time:
                at += 1
            if at == items.ptr[b + 1] or items.begin[at] > time or items.usage[at] < items.usage[item]:
                return False
            time = items.end[at]
    return True


def dominate(net: Network, items: Items, nodes: Ints, waiting: Bytes, lost: Bytes, sides: Ints, columns: Ints) -> None:
    """Remove the dominated choices of some nodes, and mark in ``lost`` those that lost any.

    Args:
        waiting: 1 for each node to look at in any case; others are looked at where a neighbour loses choices before.
        sides, columns: see ``thin``.
    """
    for place in range(len(nodes)):
        i = nodes[place]
        if (waiting[i] or net.changed[i]) and thin(net, items, i, sides, columns):
            lost[place] = 1
            end = net.head[i]
            while end >= 0:
                if net.edge_live[end >> 1]:
                    net.changed[net.eu[end >> 1]] = 1
                    net.changed[net.ev[end >> 1]] = 1
                end = net.following[end]
