# cython: infer_types=True, annotation_typing=False, boundscheck=False, wraparound=False, initializedcheck=False, cdivision=True
"""Steps of presolve inside one edge's table or one node's costs. Nothing here queues work or changes which edges there are."""

from __future__ import annotations

from .constants import (
    CONSTANT,
    FIRST_FOLLOWS,
    INFEASIBLE,
    IS_ZERO,
    LOST_FIRST,
    LOST_SECOND,
    MOVED_FIRST,
    MOVED_SECOND,
    NEVER,
    SECOND_FOLLOWS,
    UPPER,
    VISITED,
)
from .views import Network

MOVED, ALONE, FLAT = 1, 2, 4
"""What ``take_minima`` found, added together: a minimum above 0; one allowed entry in each row; equal entries in each row."""


def plus(a: int, b: int) -> int:
    """Add two costs."""
    return NEVER if a >= NEVER or b >= NEVER else a + b


def size_of(net: Network, node: int) -> int:
    """Count the choices that a node had at first."""
    return net.ptr[node + 1] - net.ptr[node]


def step_along(net: Network, e: int, node: int) -> int:
    """Return the stride in edge e's table for a choice of ``node``."""
    return size_of(net, net.ev[e]) if net.eu[e] == node else 1


def step_across(net: Network, e: int, node: int) -> int:
    """Return the stride in edge e's table for a choice of the node that is not ``node``."""
    return 1 if net.eu[e] == node else size_of(net, net.ev[e])


def drop_forbidden(net: Network, node: int) -> bool:
    """Remove choices too dear for an answer below the upper bound; move the least cost to the constant. True when any went."""
    begin, kept, least = net.ptr[node], 0, NEVER
    most = min(net.scalars[UPPER] - net.scalars[CONSTANT], NEVER)
    for i in range(net.live_count[node]):
        k = net.live[begin + i]
        if net.cost[begin + k] < most:
            net.live[begin + kept] = k
            kept += 1
            least = min(least, net.cost[begin + k])
    before = net.live_count[node]
    net.live_count[node] = kept
    if kept == 0:
        net.scalars[INFEASIBLE] = 1
        return True
    if least > 0:
        net.scalars[CONSTANT] += least
        for i in range(kept):
            net.cost[begin + net.live[begin + i]] -= least
    return kept < before


def tighten(net: Network, e: int) -> int:
    """Make edge e arc consistent, and move its minima to the costs of its nodes, rows first; returns what was found."""
    u, v, found = net.eu[e], net.ev[e], 0
    net.scalars[VISITED] += 3 * net.live_count[u] * net.live_count[v]
    forbid_dear(net, e, u, v)
    if drop_unsupported(net, e, u, v):
        found += LOST_FIRST
    if net.scalars[INFEASIBLE]:
        return found
    if drop_unsupported(net, e, v, u):
        found += LOST_SECOND
    rows = take_minima(net, e, u, v)
    columns = take_minima(net, e, v, u)
    found += MOVED_FIRST if rows & MOVED else 0
    found += MOVED_SECOND if columns & MOVED else 0
    if not found & (LOST_FIRST | LOST_SECOND):
        found += IS_ZERO if columns & FLAT else 0
        found += FIRST_FOLLOWS if columns & ALONE else 0
        found += SECOND_FOLLOWS if rows & ALONE else 0
    return found


def forbid_dear(net: Network, e: int, u: int, v: int) -> None:
    """Forbid the pairs of edge e that no answer below the upper bound contains."""
    room, first, second, width = net.scalars[UPPER] - net.scalars[CONSTANT], net.ptr[u], net.ptr[v], size_of(net, v)
    for i in range(net.live_count[u]):
        k = net.live[first + i]
        row, most = net.at[e] + k * width, room - net.cost[first + k]
        for j in range(net.live_count[v]):
            m = net.live[second + j]
            if net.pool[row + m] < NEVER and net.pool[row + m] + net.cost[second + m] >= most:
                net.pool[row + m] = NEVER


def drop_unsupported(net: Network, e: int, u: int, v: int) -> bool:
    """Remove the choices of u that no choice of v goes with; True when any went."""
    begin, along, across, kept = net.ptr[u], step_along(net, e, u), step_across(net, e, u), 0
    before = net.live_count[u]
    for i in range(before):
        k, j = net.live[begin + i], 0
        while j < net.live_count[v] and net.pool[net.at[e] + k * along + net.live[net.ptr[v] + j] * across] >= NEVER:
            j += 1
        if j < net.live_count[v]:
            net.live[begin + kept] = k
            kept += 1
    net.live_count[u] = kept
    if kept == 0:
        net.scalars[INFEASIBLE] = 1
    return kept < before


def take_minima(net: Network, e: int, u: int, v: int) -> int:
    """Move the least entry of each row, a choice of u, from the table to the choice's cost; returns what was found."""
    along, across, found = step_along(net, e, u), step_across(net, e, u), ALONE | FLAT
    for i in range(net.live_count[u]):
        k, least, most, allowed = net.live[net.ptr[u] + i], NEVER, 0, 0
        row = net.at[e] + k * along
        for j in range(net.live_count[v]):
            cost = net.pool[row + net.live[net.ptr[v] + j] * across]
            least, most = min(least, cost), max(most, cost)
            if cost < NEVER:
                allowed += 1
        if allowed > 1:
            found &= ~ALONE
        if most > least:
            found &= ~FLAT
        if least > 0:
            found |= MOVED
            net.cost[net.ptr[u] + k] += least
            for j in range(net.live_count[v]):
                place = row + net.live[net.ptr[v] + j] * across
                if net.pool[place] < NEVER:
                    net.pool[place] -= least
    return found


def add_table(net: Network, to: int, along: int, across: int, e: int, u: int, v: int, w: int, data: int) -> None:
    """Add the table of edge e, between u and w, to a table between v and w.

    Args:
        to, along, across: where the sum begins in the pool, its strides for a choice of v and of w.
        data: where ``log_data`` says which choice of u each of v stands for; -1 where u is v.
    """
    su, sw = step_along(net, e, u), step_across(net, e, u)
    for j in range(net.live_count[v]):
        m = net.live[net.ptr[v] + j]
        k = m if data < 0 else net.log_data[data + m]
        for i in range(net.live_count[w]):
            x = net.live[net.ptr[w] + i]
            place = to + m * along + x * across
            net.pool[place] = plus(net.pool[place], net.pool[net.at[e] + k * su + x * sw])


def add_row(net: Network, e: int, i: int, k: int, w: int) -> None:
    """Add what edge e costs with choice k of i to the costs of w."""
    row, sw = net.at[e] + k * step_along(net, e, i), step_across(net, e, i)
    for j in range(net.live_count[w]):
        m = net.live[net.ptr[w] + j]
        net.cost[net.ptr[w] + m] = plus(net.cost[net.ptr[w] + m], net.pool[row + m * sw])


def least_by_one(net: Network, e: int, i: int, v: int, data: int) -> None:
    """Write the best choice of i given each of v to ``log_data``, and add its cost to v's."""
    pi, pv, si, sv = net.ptr[i], net.ptr[v], step_along(net, e, i), step_across(net, e, i)
    for j in range(net.live_count[v]):
        m = net.live[pv + j]
        least, best = NEVER, net.live[pi]
        for place in range(net.live_count[i]):
            k = net.live[pi + place]
            total = plus(net.cost[pi + k], net.pool[net.at[e] + k * si + m * sv])
            if total < least:
                least, best = total, k
        net.log_data[data + m] = best
        net.cost[pv + m] = plus(net.cost[pv + m], least)


def least_by_pair(net: Network, e: int, f: int, i: int, v: int, w: int, data: int, new: int, along: int, across: int) -> None:
    """Write the best choice of i given each of v and w to ``log_data``, and its cost to a table.

    Args:
        e, f: the edges of i with v and with w.
        new, along, across: where the table begins in the pool, its strides for a choice of v and of w.
    """
    pi, pv, pw, wide, own = net.ptr[i], net.ptr[v], net.ptr[w], size_of(net, w), net.live_count[i]
    si, sv, ti, tw = step_along(net, e, i), step_across(net, e, i), step_along(net, f, i), step_across(net, f, i)
    net.scalars[VISITED] += own * net.live_count[v] * net.live_count[w]
    for j in range(net.live_count[v]):
        m = net.live[pv + j]
        row, to = data + m * wide, new + m * along
        for other in range(net.live_count[w]):
            x = net.live[pw + other]
            net.pool[to + x * across], net.log_data[row + x] = NEVER, net.live[pi]
        for place in range(own):
            k = net.live[pi + place]
            paid = plus(net.cost[pi + k], net.pool[net.at[e] + k * si + m * sv])
            if paid < NEVER:
                for other in range(net.live_count[w]):
                    x = net.live[pw + other]
                    cell = net.pool[net.at[f] + k * ti + x * tw]
                    if cell < NEVER and paid + cell < net.pool[to + x * across]:
                        net.pool[to + x * across] = paid + cell
                        net.log_data[row + x] = k
