"""Dominance: a choice goes when another of the same node is never worse, whatever the neighbours choose, and needs no more memory.

After propagation every row of every table has the minimum 0, so that the worst regret over each neighbour is at least 0 and the sum
can stop as soon as it exceeds what the choice saves. Equal choices are told apart by their number. No node loses choices in the
same sweep as a neighbour whose comparison counted on them: removals only shrink what is compared, so order does not matter.
"""

from __future__ import annotations

from solvers.compiled import kernel
from solvers.memory import Memory
from solvers.network import NEVER, Network, steps, wake_around
from solvers.problem import Ints


@kernel
def dominate(net: Network, items: Memory, visits: Ints, most_visits: int) -> int:
    """Remove dominated choices of nodes visited less than ``most_visits`` times; returns how many went."""
    removed = 0
    for i in range(len(net.present)):
        if net.present[i] == 0 or visits[i] >= most_visits or net.live_count[i] < 2:
            continue
        visits[i] += 1
        before = net.live_count[i]
        place = 0
        while place < net.live_count[i]:
            b = net.live[net.ptr[i] + place]
            gone = False
            for other in range(net.live_count[i]):
                if other != place and better(net, items, i, net.live[net.ptr[i] + other], b):
                    gone = True
                    break
            if gone:
                for later in range(place + 1, net.live_count[i]):
                    net.live[net.ptr[i] + later - 1] = net.live[net.ptr[i] + later]
                net.live_count[i] -= 1
            else:
                place += 1
        if net.live_count[i] < before:
            removed += before - net.live_count[i]
            wake_around(net, i)
    return removed


@kernel
def better(net: Network, items: Memory, i: int, a: int, b: int) -> bool:
    """Whether choice a of node i can always replace b."""
    begin = net.ptr[i]
    left = net.cost[begin + b] - net.cost[begin + a]
    if left < 0 or not within(items, begin + a, begin + b):
        return False
    end = net.head[i]
    while end >= 0:
        e = end >> 1
        if net.edge_live[e]:
            w = net.eu[e] if end & 1 else net.ev[e]
            si, sw = steps(net, e, i)
            worst = -NEVER
            for place in range(net.live_count[w]):
                m = net.live[net.ptr[w] + place]
                x, y = net.pool[net.at[e] + a * si + m * sw], net.pool[net.at[e] + b * si + m * sw]
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
        end = net.following[end]
    return True


@kernel
def within(items: Memory, a: int, b: int) -> bool:
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
