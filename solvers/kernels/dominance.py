# cython: infer_types=True, annotation_typing=False, boundscheck=False, wraparound=False, initializedcheck=False, cdivision=True
"""Dominance: a choice goes when another of the same node is never worse, whatever the neighbours choose, and needs no more memory.

After propagation every row of every table has the minimum 0, so that the worst regret over each neighbour is at least 0 and the sum
can stop as soon as it exceeds what the choice saves. Equal choices are told apart by their number. No node loses choices in the
same sweep as a neighbour whose comparison counted on them: removals only shrink what is compared, so order does not matter.
"""

from __future__ import annotations

from ..arrays import Bytes, Ints
from .constants import NEVER, VISITED
from .tables import step_across, step_along
from .views import Items, Network


def dominate(net: Network, items: Items, nodes: Ints, lost: Bytes) -> None:
    """Remove the dominated choices of some nodes, and mark in ``lost`` those that lost any."""
    for place in range(len(nodes)):
        lost[place] = thin(net, items, nodes[place])


def thin(net: Network, items: Items, i: int) -> bool:
    """Remove the choices of node i that another can replace; True when any went."""
    begin, before, place = net.ptr[i], net.live_count[i], 0
    while place < net.live_count[i]:
        b, gone = net.live[begin + place], False
        mark_probes(net, i, b)
        for other in range(net.live_count[i]):
            a = net.live[begin + other]
            if other != place and passes_probes(net, i, a, b) and better(net, i, a, b) and within(items, begin + a, begin + b):
                gone = True
                break
        if gone:
            net.live_count[i] -= 1
            for later in range(place, net.live_count[i]):
                net.live[begin + later] = net.live[begin + later + 1]
        else:
            place += 1
    clear_probes(net, i)
    return net.live_count[i] < before


def mark_probes(net: Network, i: int, b: int) -> None:
    """Mark of each neighbour the choice at which choice b of node i is cheapest: few others replace b there."""
    end = net.head[i]
    while end >= 0:
        e = end >> 1
        if net.edge_live[e]:
            w = net.eu[e] if end & 1 else net.ev[e]
            row, across, least = net.at[e] + b * step_along(net, e, i), step_across(net, e, i), NEVER
            net.mark[w] = -1
            for place in range(net.live_count[w]):
                column = net.live[net.ptr[w] + place]
                if net.pool[row + column * across] < least:
                    least, net.mark[w] = net.pool[row + column * across], column
            net.scalars[VISITED] += net.live_count[w]
        end = net.following[end]


def clear_probes(net: Network, i: int) -> None:
    """Take the marks away."""
    end = net.head[i]
    while end >= 0:
        net.mark[net.eu[end >> 1] if end & 1 else net.ev[end >> 1]] = -1
        end = net.following[end]


def passes_probes(net: Network, i: int, a: int, b: int) -> bool:
    """Whether choice a of node i can replace b at the marked choices of all neighbours, as it must to be better."""
    left, end = net.cost[net.ptr[i] + b] - net.cost[net.ptr[i] + a], net.head[i]
    while end >= 0 and left >= 0:
        e = end >> 1
        w = net.eu[e] if end & 1 else net.ev[e]
        if net.edge_live[e] and net.mark[w] >= 0:
            column, step = net.at[e] + net.mark[w] * step_across(net, e, i), step_along(net, e, i)
            x = net.pool[column + a * step]
            if x >= NEVER:
                return False
            left -= x - net.pool[column + b * step]
            net.scalars[VISITED] += 1
        end = net.following[end]
    return left >= 0


def better(net: Network, i: int, a: int, b: int) -> bool:
    """Whether choice a of node i can always replace b by costs: it saves at least its worst regret over each neighbour."""
    left, end = net.cost[net.ptr[i] + b] - net.cost[net.ptr[i] + a], net.head[i]
    while end >= 0 and left >= 0:
        e = end >> 1
        if net.edge_live[e]:
            w = net.eu[e] if end & 1 else net.ev[e]
            row, across, worst = net.at[e], step_across(net, e, i), -NEVER
            step = step_along(net, e, i)
            for place in range(net.live_count[w]):
                column = row + net.live[net.ptr[w] + place] * across
                x, y = net.pool[column + a * step], net.pool[column + b * step]
                if y < NEVER:
                    worst = max(worst, NEVER if x >= NEVER else x - y)
                    if worst > left:
                        net.scalars[VISITED] += place
                        return False
            net.scalars[VISITED] += net.live_count[w]
            if worst > -NEVER:
                left -= worst
        end = net.following[end]
    return left >= 0


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
