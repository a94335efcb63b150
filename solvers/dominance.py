"""Dominance: a choice goes when another of the same node is never worse, whatever the neighbours choose, and needs no more memory.

After propagation every row of every table has the minimum 0, so that the worst regret over each neighbour is at least 0 and the sum
can stop as soon as it exceeds what the choice saves. Equal choices are told apart by their number. No node loses choices in the
same sweep as a neighbour whose comparison counted on them: removals only shrink what is compared, so order does not matter. A node
is looked at anew only where an edge of it has changed, or memory is compared, or costs with an upper bound.
"""

from __future__ import annotations

import numpy as np

from solvers.arrays import Ints
from solvers.compiled import kernel, kernel_or
from solvers.memory import Memory
from solvers.network import NEVER, UPPER, Network, far, wake_around
from solvers.tables import choices, costs, keep, remaining, steps


@kernel
def dominate(net: Network, items: Memory, visits: Ints, most_visits: int) -> int:
    """Remove dominated choices of nodes visited less than ``most_visits`` times; returns how many went."""
    removed, waiting = 0, net.changed.copy()
    net.changed[:] = 0  # what changes during the sweep is propagated after it, and looked at again then
    for i in range(len(net.present)):
        if net.present[i] == 0 or visits[i] >= most_visits or net.live_count[i] < 2:
            continue
        visits[i] += 1
        if waiting[i] == 0 and net.changed[i] == 0 and len(items.capacity) == 0 and net.scalars[UPPER] >= NEVER:
            continue  # it would find what it found: moved minima change neither side of a comparison
        before = net.live_count[i]
        thin(net, items, i)
        if net.live_count[i] < before:
            removed += before - net.live_count[i]
            wake_around(net, i)
    return removed


PAIRS_AT_ONCE = 2**20
"""The plain form compares about this many entries of a table in one step."""


def plain_thin(net: Network, items: Memory, i: int) -> None:
    left, begin = choices(net, i), net.ptr[i]
    dearer, place = cheaper_pairs(net, i)
    if len(place) == 0:
        return
    worse: dict[int, list[int]] = {}
    for a, b in zip(dearer.tolist(), place.tolist(), strict=True):
        worse.setdefault(b, []).append(a)
    gone = np.zeros(len(left), dtype=np.bool_)
    for b in sorted(worse):
        gone[b] = any(not gone[a] and within(items, begin + left[a], begin + left[b]) for a in worse[b])
    keep(net, i, ~gone)


def cheaper_pairs(net: Network, i: int) -> tuple[Ints, Ints]:
    """Places a, b of remaining choices such that by costs a can always replace b."""
    cost = costs(net, i)[choices(net, i)]
    tables, end = list[Ints](), net.head[i]
    while end >= 0:
        if net.edge_live[end >> 1]:
            tables.append(remaining(net, end >> 1, i))
        end = net.following[end]
    saved = cost - cost[:, None]
    hope = saved
    for rows in tables:  # in the column that goes best with b alone, which rules out most
        column = rows.argmin(axis=1)
        least = rows[np.arange(len(rows)), column]
        hope = np.maximum(hope - np.where(least < NEVER, rows[:, column] - least, 0), -1)
    possible = (hope >= 0) & (saved >= 0)
    np.fill_diagonal(possible, False)
    a, b = np.nonzero(possible)
    left = saved[a, b]
    for rows in tables:
        if len(a) == 0:
            break
        worst = regrets(rows, a, b)
        stays = worst <= left
        a, b, left = a[stays], b[stays], left[stays] - worst[stays]
    return a, b


def regrets(rows: Ints, a: Ints, b: Ints) -> Ints:
    """The most that row ``a`` costs more than row ``b``, where that is allowed at all: for arrays of pairs."""
    step = max(1, PAIRS_AT_ONCE // rows.shape[1])
    parts = []
    for at in range(0, len(a), step):
        one, other = rows[a[at : at + step]], rows[b[at : at + step]]
        parts.append(np.where(other < NEVER, one - other, -NEVER).max(axis=1))
    worst = np.concatenate(parts)
    return np.where(worst > -NEVER, worst, 0)


@kernel_or(plain_thin)
def thin(net: Network, items: Memory, i: int) -> None:
    """Remove the choices of node i that another can replace."""
    place, begin = 0, net.ptr[i]
    columns = np.empty((net.degree[i], 3), dtype=np.int64)
    while place < net.live_count[i]:
        b = net.live[begin + place]
        edges = cheapest(net, i, b, columns)
        gone = False
        for other in range(net.live_count[i]):
            a = net.live[begin + other]
            if other != place and hopeful(net, i, a, b, columns[:edges]) and better(net, items, i, a, b):
                gone = True
                break
        if gone:
            for later in range(place + 1, net.live_count[i]):
                net.live[net.ptr[i] + later - 1] = net.live[net.ptr[i] + later]
            net.live_count[i] -= 1
        else:
            place += 1


@kernel
def cheapest(net: Network, i: int, b: int, columns: Ints) -> int:
    """For each edge of node i what the neighbour's choice that goes best with b costs, where its column begins in the pool, and the
    stride there. Returns how many edges allow b at all."""
    found, end = 0, net.head[i]
    while end >= 0:
        e = end >> 1
        if net.edge_live[e]:
            w = far(net, end)
            si, sw = steps(net, e, i)
            least = NEVER
            for place in range(net.live_count[w]):
                column = net.at[e] + net.live[net.ptr[w] + place] * sw
                if net.pool[column + b * si] < least:
                    least = net.pool[column + b * si]
                    columns[found, 0], columns[found, 1], columns[found, 2] = least, column, si
            found += least < NEVER
        end = net.following[end]
    return found


@kernel
def hopeful(net: Network, i: int, a: int, b: int, columns: Ints) -> bool:
    """Whether choice a may be ``better``: what it costs more in the columns that go best with b is no more than it does at worst, so that a
    look at few entries rules out most."""
    left = net.cost[net.ptr[i] + b] - net.cost[net.ptr[i] + a]
    if left < 0:
        return False
    for edge in range(len(columns)):
        cost = net.pool[columns[edge, 1] + a * columns[edge, 2]]
        if cost >= NEVER:
            return False
        left -= cost - columns[edge, 0]
    return bool(left >= 0)


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
            w = far(net, end)
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
