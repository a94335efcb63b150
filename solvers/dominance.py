"""Dominance: a choice goes when another of the same node is never worse, whatever the neighbours choose, and needs no more memory.

After propagation every row of every table has the minimum 0, so that the worst regret over each neighbour is at least 0 and the sum
can stop as soon as it exceeds what the choice saves. Equal choices are told apart by their number. No node loses choices in the
same sweep as a neighbour whose comparison counted on them: removals only shrink what is compared, so order does not matter. A node
is looked at anew only where an edge of it has changed, or memory is compared, or costs with an upper bound.
"""

from __future__ import annotations

import numpy as np

from solvers.arrays import Ints
from solvers.compiled import kernel, loop_or
from solvers.memory import Memory
from solvers.network import NEVER, UPPER, Network, far, wake_around
from solvers.tables import rest


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


@kernel
def thin(net: Network, items: Memory, i: int) -> None:
    """Remove the choices of node i that another can replace."""
    begin, end, size, found = net.ptr[i], net.ptr[i + 1], net.ptr[i + 1] - net.ptr[i], 0
    sides, e = np.empty(net.degree[i] * SIDE, dtype=np.int64), net.head[i]
    while e >= 0:
        if net.edge_live[e >> 1]:
            w, side = far(net, e), sides[found : found + SIDE]
            width = net.ptr[w + 1] - net.ptr[w]
            side[AT], side[FROM], side[COUNT] = net.at[e >> 1], net.ptr[w], net.live_count[w]
            side[STEP], side[ACROSS] = (width, 1) if net.eu[e >> 1] == i else (1, size)
            found += SIDE
        e = net.following[e]
    left = net.live[begin : begin + net.live_count[i]]
    net.live_count[i] = thinned(net.pool, net.live, sides, net.cost[begin:end], left, items, begin)


AT, STEP, ACROSS, FROM, COUNT, SIDE = range(6)
"""Of an edge of a node: where its table begins in the pool, strides for a choice of the node and of the neighbour, and where the remaining
choices of the neighbour begin and how many they are."""
PAIRS_AT_ONCE = 2**20
"""The plain form compares about this many entries of a table in one step."""


def plain_thinned(pool: Ints, live: Ints, sides: Ints, cost: Ints, left: Ints, items: Memory, begin: int) -> int:
    dearer, place = cheaper_pairs(cost[left], [beside(pool, live, side, len(cost), left) for side in sides.reshape(-1, SIDE).tolist()])
    if len(place) == 0:
        return len(left)
    worse: dict[int, list[int]] = {}
    for a, b in zip(dearer.tolist(), place.tolist(), strict=True):
        worse.setdefault(b, []).append(a)
    gone = np.zeros(len(left), dtype=np.bool_)
    for b in sorted(worse):
        gone[b] = any(not gone[a] and within(items, begin + left[a], begin + left[b]) for a in worse[b])
    kept = left[~gone]
    left[: len(kept)] = kept
    return len(kept)


def beside(pool: Ints, live: Ints, side: list[int], size: int, left: Ints) -> Ints:
    """An edge's table, a row for each of the choices left."""
    at, step, across, begin, count = side
    others = live[begin : begin + count]
    if across != size:
        return rest(pool[at : at + size * step].reshape(size, step), left, others)
    width = others[-1] + 1  # the rows of those that are left are enough
    return rest(pool[at : at + size * width].reshape(width, size), others, left).T


def cheaper_pairs(cost: Ints, tables: list[Ints]) -> tuple[Ints, Ints]:
    """Places a, b of choices such that by costs a can always replace b."""
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


@loop_or(plain_thinned)
def thinned(pool: Ints, live: Ints, sides: Ints, cost: Ints, left: Ints, items: Memory, begin: int) -> int:
    """Of the choices left of a node those that no other can replace; how many, which are then the first.

    Args:
        sides: a row for each edge (``AT``, ...); those that a choice cannot do without any more are skipped.
        begin: number of the node's first choice.
    """
    place, count = 0, len(left)
    columns = np.empty(len(sides), dtype=np.int64)
    while place < count:
        b = left[place]
        found = cheapest(pool, live, sides, b, columns)
        gone = False
        for other in range(count):
            a = left[other]
            saved = cost[b] - cost[a]
            if other == place or saved < 0 or not hopeful(pool, columns, found, a, saved):
                continue
            if better(pool, live, sides, a, b, saved) and within(items, begin + a, begin + b):
                gone = True
                break
        if gone:
            for later in range(place + 1, count):
                left[later - 1] = left[later]
            count -= 1
        else:
            place += 1
    return count


@kernel
def cheapest(pool: Ints, live: Ints, sides: Ints, b: int, columns: Ints) -> int:
    """For each edge what the neighbour's choice that goes best with b costs, where its column begins in the pool, and the stride there:
    three numbers for each that allows b at all. Returns how many numbers."""
    found = 0
    for side in range(0, len(sides), SIDE):
        least = NEVER
        for place in range(sides[side + COUNT]):
            column = sides[side + AT] + live[sides[side + FROM] + place] * sides[side + ACROSS]
            cost = pool[column + b * sides[side + STEP]]
            if cost < least:
                least = cost
                columns[found], columns[found + 1], columns[found + 2] = cost, column, sides[side + STEP]
        if least < NEVER:
            found += 3
    return found


@kernel
def hopeful(pool: Ints, columns: Ints, found: int, a: int, saved: int) -> bool:
    """Whether choice a may be ``better``: what it costs more in the columns that go best with b is no more than it does at worst, so that a
    look at few entries rules out most."""
    for edge in range(0, found, 3):
        cost = pool[columns[edge + 1] + a * columns[edge + 2]]
        if cost >= NEVER:
            return False
        saved -= cost - columns[edge]
    return bool(saved >= 0)


@kernel
def better(pool: Ints, live: Ints, sides: Ints, a: int, b: int, saved: int) -> bool:
    """Whether choice a can always replace b by costs, of which it saves some of its own."""
    for side in range(0, len(sides), SIDE):
        worst = -NEVER
        for place in range(sides[side + COUNT]):
            column = sides[side + AT] + live[sides[side + FROM] + place] * sides[side + ACROSS]
            x, y = pool[column + a * sides[side + STEP]], pool[column + b * sides[side + STEP]]
            if y < NEVER:
                if x >= NEVER:
                    return False
                worst = max(worst, x - y)
                if worst > saved:
                    return False
        if worst > -NEVER:
            saved -= worst
        if saved < 0:
            return False
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
