# cython: infer_types=True, annotation_typing=False, boundscheck=False, wraparound=False, initializedcheck=False, cdivision=True
"""Exact steps that need no memory, on a Network: arc consistency, moving minima out of tables, fixing, merging nodes that follow another,
and elimination of nodes with at most two neighbours.

Every step keeps at least one best answer (below the upper bound) and logs how to undo itself. Nodes with memory items are merged and
fixed, never eliminated.
"""

from __future__ import annotations

from solvers.arrays import Bytes, Ints
from solvers.kernels.constants import (
    BY_PAIR,
    CONSTANT,
    EDGE_HEAD,
    EDGE_TAIL,
    FIXED,
    FOLLOWS,
    INFEASIBLE,
    LOG,
    LOG_DATA,
    NEED,
    NEVER,
    NODE_HEAD,
    NODE_TAIL,
    POOL,
    UPPER,
    VISITED,
)
from solvers.kernels.views import Network

LOST_FIRST, LOST_SECOND, MOVED_FIRST, MOVED_SECOND, IS_ZERO, FIRST_FOLLOWS, SECOND_FOLLOWS = 1, 2, 4, 8, 16, 32, 64
"""What ``tighten`` found, added together; the last three are told only where no choice was lost."""


def plus(a: int, b: int) -> int:
    """The sum of two costs."""
    return NEVER if a >= NEVER or b >= NEVER else a + b


# Lists, queues and the log.


def hang(net: Network, end: int, node: int) -> None:
    """Put an edge's end first in its node's list."""
    net.following[end] = net.head[node]
    net.head[node] = end


def far(net: Network, end: int) -> int:
    """The node at the other end."""
    return net.eu[end >> 1] if end & 1 else net.ev[end >> 1]


def size_of(net: Network, node: int) -> int:
    """Choices that a node had at first."""
    return net.ptr[node + 1] - net.ptr[node]


def kill(net: Network, e: int) -> None:
    """Take an edge away."""
    net.edge_live[e] = 0
    for node in range(2):
        i = net.ev[e] if node else net.eu[e]
        net.changed[i] = 1
        net.degree[i] -= 1
        wake_node(net, i)


def joining(net: Network, v: int, w: int) -> int:
    """The edge between v and w, or -1. Takes dead edges that it passes out of a list; nobody else may be on the way through it."""
    near = v if net.degree[v] <= net.degree[w] else w
    other = v + w - near
    before, end = -1, net.head[near]
    while end >= 0:
        after = net.following[end]
        if net.edge_live[end >> 1]:
            if net.eu[end >> 1] == other or net.ev[end >> 1] == other:
                return end >> 1
            before = end
        elif before < 0:
            net.head[near] = after
        else:
            net.following[before] = after
        end = after
    return -1


def wake_edge(net: Network, e: int) -> None:
    """Queue an edge."""
    net.changed[net.eu[e]] = 1
    net.changed[net.ev[e]] = 1
    if net.edge_waits[e] == 0:
        net.edge_waits[e] = 1
        net.edge_queue[net.scalars[EDGE_TAIL]] = e
        net.scalars[EDGE_TAIL] = (net.scalars[EDGE_TAIL] + 1) % len(net.edge_queue)


def wake_node(net: Network, node: int) -> None:
    """Queue a node."""
    if net.node_waits[node] == 0 and net.present[node]:
        net.node_waits[node] = 1
        net.node_queue[net.scalars[NODE_TAIL]] = node
        net.scalars[NODE_TAIL] = (net.scalars[NODE_TAIL] + 1) % len(net.node_queue)


def wake_around(net: Network, node: int) -> None:
    """Queue a node, its edges and its neighbours: it has lost choices, and a table may have become small enough."""
    wake_node(net, node)
    end = net.head[node]
    while end >= 0:
        if net.edge_live[end >> 1]:
            wake_edge(net, end >> 1)
            wake_node(net, far(net, end))
        end = net.following[end]


def wake(net: Network, nodes: Ints, around: int) -> None:
    """Queue some nodes, and with ``around`` what is around them."""
    for place in range(len(nodes)):
        if around:
            wake_around(net, nodes[place])
        else:
            wake_node(net, nodes[place])


def link(net: Network) -> None:
    """Hang every edge on its nodes, add parallel edges together, and queue everything."""
    for e in range(len(net.eu)):
        hang(net, 2 * e, net.eu[e])
        hang(net, 2 * e + 1, net.ev[e])
        net.degree[net.eu[e]] += 1
        net.degree[net.ev[e]] += 1
    for i in range(len(net.live_count)):
        end = net.head[i]
        while end >= 0:
            if net.edge_live[end >> 1]:
                other = far(net, end)
                if net.mark[other] >= 0:
                    add_table(net, net.mark[other], end >> 1, i, other)
                    kill(net, end >> 1)
                else:
                    net.mark[other] = end >> 1
            end = net.following[end]
        end = net.head[i]
        while end >= 0:
            net.mark[far(net, end)] = -1
            end = net.following[end]
    for i in range(len(net.live_count)):
        drop_forbidden(net, i)
        wake_node(net, i)
    for e in range(len(net.eu)):
        if net.edge_live[e]:
            wake_edge(net, e)


def log_step(net: Network, kind: int, node: int, first: int, second: int, room: int) -> int:
    """Open a log entry; returns where its ``room`` numbers go."""
    entry, at = net.scalars[LOG], net.scalars[LOG_DATA]
    net.log[entry, 0], net.log[entry, 1], net.log[entry, 2], net.log[entry, 3], net.log[entry, 4] = kind, node, first, second, at
    net.scalars[LOG] += 1
    net.scalars[LOG_DATA] += room
    net.present[node] = 0
    return at


def replay(net: Network, choices: Ints) -> None:
    """Follow the log backwards: choices of all nodes from those of the nodes still present."""
    for entry in range(net.scalars[LOG] - 1, -1, -1):
        at = net.log[entry, 4]
        if net.log[entry, 0] == FOLLOWS:
            at += choices[net.log[entry, 2]]
        elif net.log[entry, 0] == BY_PAIR:
            at += choices[net.log[entry, 2]] * size_of(net, net.log[entry, 3]) + choices[net.log[entry, 3]]
        choices[net.log[entry, 1]] = net.log_data[at]


def trace(net: Network, first_log: int, root: Ints, map_at: Ints, maps: Ints) -> int:
    """For each node the present node it follows, and its choice for each live choice of that one (root -1: the one choice, in map_at).

    Returns how many numbers ``maps`` needs, and writes them where it has room.
    """
    used, fill = 0, len(maps) > 0
    for i in range(len(root)):
        if net.present[i]:
            map_at[i] = used
            if fill:
                for place in range(net.live_count[i]):
                    maps[used + place] = net.live[net.ptr[i] + place]
            used += net.live_count[i]
    for entry in range(net.scalars[LOG] - 1, first_log - 1, -1):
        node, first, data = net.log[entry, 1], net.log[entry, 2], net.log[entry, 4]
        if net.log[entry, 0] == FIXED:
            root[node], map_at[node] = -1, net.log_data[data]
        elif net.log[entry, 0] == FOLLOWS:
            root[node] = root[first]
            if root[first] == -1:
                map_at[node] = net.log_data[data + map_at[first]]
            elif root[first] >= 0:
                map_at[node] = used
                if fill:
                    for place in range(net.live_count[root[first]]):
                        maps[used + place] = net.log_data[data + maps[map_at[first] + place]]
                used += net.live_count[root[first]]
    return used


def maximal_times(binding: Bytes, capacity: Ints, begins: Ints, ends: Ints, kept: Bytes) -> None:
    """Of the binding times, mark those that no neighbour implies: one with the same items or more, and no more room.

    Args:
        begins, ends: how many items begin and end at each time.
        kept: written to.
    """
    last, begun, ended = -1, 0, 0
    for t in range(len(capacity)):
        begun += begins[t]
        ended += ends[t]
        if binding[t] and not (last >= 0 and begun == 0 and capacity[last] <= capacity[t]):
            if last >= 0 and ended == 0 and capacity[t] <= capacity[last]:
                kept[last] = 0
            kept[t] = 1
            last, begun, ended = t, 0, 0


# One edge's table, or the costs of a node.


def step_along(net: Network, e: int, node: int) -> int:
    """Stride in edge e's table for a choice of ``node``."""
    return size_of(net, net.ev[e]) if net.eu[e] == node else 1


def step_across(net: Network, e: int, node: int) -> int:
    """Stride in edge e's table for a choice of the node that is not ``node``."""
    return 1 if net.eu[e] == node else size_of(net, net.ev[e])


def drop_forbidden(net: Network, node: int) -> bool:
    """Remove choices that cost too much for an answer below the upper bound, and move the least cost to the constant."""
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
    """Arc consistency of edge e, and its minima moved to the costs of its nodes, rows first; says what was found."""
    u, v, at = net.eu[e], net.ev[e], net.at[e]
    first, second, width = net.ptr[u], net.ptr[v], size_of(net, v)
    room, rows, columns = net.scalars[UPPER] - net.scalars[CONSTANT], 0, 0
    net.scalars[VISITED] += 3 * net.live_count[u] * net.live_count[v]
    for i in range(net.live_count[u]):
        k, supported = net.live[first + i], False
        row, most = at + k * width, room - net.cost[first + k]
        for j in range(net.live_count[v]):
            m = net.live[second + j]
            if net.pool[row + m] < NEVER:
                if net.pool[row + m] + net.cost[second + m] >= most:
                    net.pool[row + m] = NEVER
                else:
                    supported = True
        if supported:
            net.live[first + rows] = k
            rows += 1
    found = LOST_FIRST if rows < net.live_count[u] else 0
    net.live_count[u] = rows
    if rows == 0:
        net.scalars[INFEASIBLE] = 1
        return found
    alone_in_column, alone_in_row, moved, zero = True, True, False, True
    for j in range(net.live_count[v]):
        m, allowed = net.live[second + j], 0
        for i in range(rows):
            if net.pool[at + net.live[first + i] * width + m] < NEVER:
                allowed += 1
        if allowed > 0:
            net.live[second + columns] = m
            columns += 1
        if allowed > 1:
            alone_in_column = False
    if columns < net.live_count[v]:
        found += LOST_SECOND
    net.live_count[v] = columns
    for i in range(rows):
        row, least, allowed = at + net.live[first + i] * width, NEVER, 0
        for j in range(columns):
            cost = net.pool[row + net.live[second + j]]
            if cost < NEVER:
                allowed += 1
            least = min(least, cost)
        if allowed > 1:
            alone_in_row = False
        if least > 0:
            moved = True
            net.cost[first + net.live[first + i]] += least
            for j in range(columns):
                if net.pool[row + net.live[second + j]] < NEVER:
                    net.pool[row + net.live[second + j]] -= least
    found += MOVED_FIRST if moved else 0
    moved = False
    for j in range(columns):
        m, least, most = net.live[second + j], NEVER, 0
        for i in range(rows):
            cost = net.pool[at + net.live[first + i] * width + m]
            least, most = min(least, cost), max(most, cost)
        if least > 0:
            moved = True
            net.cost[second + m] += least
            for i in range(rows):
                if net.pool[at + net.live[first + i] * width + m] < NEVER:
                    net.pool[at + net.live[first + i] * width + m] -= least
        if most > least:
            zero = False
    found += MOVED_SECOND if moved else 0
    if not found & (LOST_FIRST | LOST_SECOND):
        found += IS_ZERO if zero else 0
        found += FIRST_FOLLOWS if alone_in_column else 0
        found += SECOND_FOLLOWS if alone_in_row else 0
    return found


def add_table(net: Network, target: int, source: int, first: int, second: int) -> None:
    """Add the table of edge ``source`` to that of ``target``; both join ``first`` and ``second``."""
    a, b = step_along(net, target, first), step_across(net, target, first)
    c, d = step_along(net, source, first), step_across(net, source, first)
    for i in range(net.live_count[first]):
        k = net.live[net.ptr[first] + i]
        for j in range(net.live_count[second]):
            m = net.live[net.ptr[second] + j]
            place = net.at[target] + k * a + m * b
            net.pool[place] = plus(net.pool[place], net.pool[net.at[source] + k * c + m * d])


def follow(net: Network, e: int, u: int, v: int, data: int) -> None:
    """Write the one choice of u that each choice of v leaves to ``log_data``, and add what it costs to v's."""
    pu, pv, su, sv = net.ptr[u], net.ptr[v], step_along(net, e, u), step_across(net, e, u)
    for j in range(net.live_count[v]):
        m = net.live[pv + j]
        for i in range(net.live_count[u]):
            k = net.live[pu + i]
            cell = net.pool[net.at[e] + k * su + m * sv]
            if cell < NEVER:
                net.log_data[data + m] = k
                net.cost[pv + m] = plus(net.cost[pv + m], plus(net.cost[pu + k], cell))


def add_followed(net: Network, target: int, source: int, u: int, v: int, w: int, data: int) -> None:
    """Add the table of edge ``source`` between u and w to that of ``target`` between v and w; v's choices stand for u's."""
    sv, sw = step_along(net, target, v), step_across(net, target, v)
    tu, tw = step_along(net, source, u), step_across(net, source, u)
    for j in range(net.live_count[v]):
        m = net.live[net.ptr[v] + j]
        k = net.log_data[data + m]
        for i in range(net.live_count[w]):
            x = net.live[net.ptr[w] + i]
            place = net.at[target] + m * sv + x * sw
            net.pool[place] = plus(net.pool[place], net.pool[net.at[source] + k * tu + x * tw])


def copy_followed(net: Network, e: int, u: int, v: int, w: int, data: int, new: int) -> None:
    """Write the table that edge e between u and w has when v is in u's place, to ``new`` in the pool."""
    tu, tw, sv, sw = step_along(net, e, u), step_across(net, e, u), size_of(net, w), 1
    if net.eu[e] != u:
        sv, sw = 1, size_of(net, v)
    for j in range(net.live_count[v]):
        m = net.live[net.ptr[v] + j]
        k = net.log_data[data + m]
        for i in range(net.live_count[w]):
            x = net.live[net.ptr[w] + i]
            net.pool[new + m * sv + x * sw] = net.pool[net.at[e] + k * tu + x * tw]


def add_row(net: Network, e: int, i: int, k: int, w: int) -> None:
    """Add what edge e costs with choice k of i to the costs of w."""
    row, sw = net.at[e] + k * step_along(net, e, i), step_across(net, e, i)
    for j in range(net.live_count[w]):
        m = net.live[net.ptr[w] + j]
        net.cost[net.ptr[w] + m] = plus(net.cost[net.ptr[w] + m], net.pool[row + m * sw])


def least_by_one(net: Network, e: int, i: int, v: int, data: int) -> None:
    """Write the best choice of i given each of v to ``log_data``, and add what it costs to v's."""
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


def least_by_pair(net: Network, e: int, f: int, i: int, v: int, w: int, data: int, new: int) -> None:
    """Write the best choice of i given each of v and of w to ``log_data``, and what it costs to a table at ``new`` in the pool."""
    pi, pv, pw, wide, own = net.ptr[i], net.ptr[v], net.ptr[w], size_of(net, w), net.live_count[i]
    si, sv, ti, tw = step_along(net, e, i), step_across(net, e, i), step_along(net, f, i), step_across(net, f, i)
    net.scalars[VISITED] += own * net.live_count[v] * net.live_count[w]
    for j in range(net.live_count[v]):
        m = net.live[pv + j]
        to = m * wide
        for other in range(net.live_count[w]):
            x = net.live[pw + other]
            net.pool[new + to + x], net.log_data[data + to + x] = NEVER, net.live[pi]
        for place in range(own):
            k = net.live[pi + place]
            paid = plus(net.cost[pi + k], net.pool[net.at[e] + k * si + m * sv])
            row = net.at[f] + k * ti
            if paid < NEVER:
                for other in range(net.live_count[w]):
                    x = net.live[pw + other]
                    cell = net.pool[row + x * tw]
                    if cell < NEVER and paid + cell < net.pool[new + to + x]:
                        net.pool[new + to + x] = paid + cell
                        net.log_data[data + to + x] = k


def transpose(net: Network, e: int, v: int, w: int, new: int) -> None:
    """The table of e is laid out (v, w): write it to ``new`` in the pool, laid out (w, v)."""
    rows, columns = size_of(net, v), size_of(net, w)
    for k in range(rows):
        for m in range(columns):
            net.pool[new + m * rows + k] = net.pool[net.at[e] + k * columns + m]
    net.at[e] = new


def copy_tables(net: Network, edges: Ints, edge_ptr: Ints, tables: Ints) -> None:
    """Write what remains of each edge's table to ``tables``, one after the other."""
    for place in range(len(edges)):
        e, to = edges[place], edge_ptr[place]
        u, v = net.eu[e], net.ev[e]
        for i in range(net.live_count[u]):
            row = net.at[e] + net.live[net.ptr[u] + i] * size_of(net, v)
            for j in range(net.live_count[v]):
                tables[to] = net.pool[row + net.live[net.ptr[v] + j]]
                to += 1


# The steps, from queues until none applies.


def run_queues(net: Network, largest_table: int) -> bool:
    """True when an array is too small for the next step, which then still waits."""
    while net.scalars[INFEASIBLE] == 0:
        if net.scalars[EDGE_HEAD] != net.scalars[EDGE_TAIL]:
            e = net.edge_queue[net.scalars[EDGE_HEAD]]
            net.scalars[EDGE_HEAD] = (net.scalars[EDGE_HEAD] + 1) % len(net.edge_queue)
            net.edge_waits[e] = 0
            if net.edge_live[e] and revise(net, e):
                wake_edge(net, e)
                return True
        elif net.scalars[NODE_HEAD] != net.scalars[NODE_TAIL]:
            i = net.node_queue[net.scalars[NODE_HEAD]]
            net.scalars[NODE_HEAD] = (net.scalars[NODE_HEAD] + 1) % len(net.node_queue)
            net.node_waits[i] = 0
            if net.present[i] and simplify(net, i, largest_table):
                wake_node(net, i)
                return True
        else:
            return False
    return False


def revise(net: Network, e: int) -> bool:
    """Arc consistency and minima of one edge; then drop it if nothing is left in its table, or merge along it."""
    u, v, found = net.eu[e], net.ev[e], tighten(net, e)
    if net.scalars[INFEASIBLE]:
        return False
    if found & LOST_FIRST:
        wake_around(net, u)
    if found & LOST_SECOND:
        wake_around(net, v)
    if found & MOVED_FIRST:
        wake_node(net, u)
    if found & MOVED_SECOND:
        wake_node(net, v)
    if found & (LOST_FIRST | LOST_SECOND):
        return False  # it waits again
    if found & IS_ZERO:
        kill(net, e)
        return False
    if found & FIRST_FOLLOWS and (not found & SECOND_FOLLOWS or net.degree[u] <= net.degree[v]):
        return merge(net, e, u, v)
    if found & SECOND_FOLLOWS:
        return merge(net, e, v, u)
    return False


def merge(net: Network, e: int, u: int, v: int) -> bool:
    """Replace u by what v's choice says it is. True when there is no room."""
    size, need, end = size_of(net, v), 0, net.head[u]
    while end >= 0:
        if net.edge_live[end >> 1]:
            need += size * size_of(net, far(net, end))
        end = net.following[end]
    if net.scalars[POOL] + need > len(net.pool) or net.scalars[LOG_DATA] + size > len(net.log_data):
        net.scalars[NEED] = need + size
        return True
    net.scalars[VISITED] += need
    data = log_step(net, FOLLOWS, u, v, 0, size)
    follow(net, e, u, v, data)
    kill(net, e)
    net.heavy[v] |= net.heavy[u]
    move_edges(net, u, v, data)
    if drop_forbidden(net, v):
        wake_around(net, v)
    wake_node(net, v)
    return False


def move_edges(net: Network, u: int, v: int, data: int) -> None:
    """Hang u's edges on v, whose choice m stands for u's choice ``log_data[data + m]``."""
    end = net.head[u]
    while end >= 0:
        following, e = net.following[end], end >> 1
        if net.edge_live[e]:
            w = far(net, end)
            known = joining(net, v, w)
            if known >= 0:
                add_followed(net, known, e, u, v, w, data)
                kill(net, e)
                wake_edge(net, known)
            else:
                rehang(net, end, u, v, w, data)
                wake_edge(net, e)
        end = following


def rehang(net: Network, end: int, u: int, v: int, w: int, data: int) -> None:
    """Turn edge (u, w) into (v, w) with a new table."""
    e, new = end >> 1, net.scalars[POOL]
    net.scalars[POOL] += size_of(net, v) * size_of(net, w)
    copy_followed(net, e, u, v, w, data, new)
    if end & 1:
        net.ev[e] = v
    else:
        net.eu[e] = v
    net.at[e] = new
    hang(net, end, v)
    net.degree[v] += 1


def simplify(net: Network, i: int, largest_table: int) -> bool:
    """Fix or eliminate node i if it can be. True when there is no room."""
    if net.scalars[LOG_DATA] + 1 > len(net.log_data):
        net.scalars[NEED] = 1
        return True
    if drop_forbidden(net, i):
        if net.scalars[INFEASIBLE]:
            return False
        wake_around(net, i)
    if net.live_count[i] == 1:
        fix(net, i, net.live[net.ptr[i]])
    elif net.heavy[i] == 0 and net.degree[i] == 0:
        best = net.live[net.ptr[i]]
        for place in range(1, net.live_count[i]):
            k = net.live[net.ptr[i] + place]
            if net.cost[net.ptr[i] + k] < net.cost[net.ptr[i] + best]:
                best = k
        fix(net, i, best)
    elif net.heavy[i] == 0 and net.degree[i] == 1:
        return eliminate_leaf(net, i)
    elif net.heavy[i] == 0 and net.degree[i] == 2:
        return eliminate_between(net, i, largest_table)
    return False


def fix(net: Network, i: int, k: int) -> None:
    """Make a choice for good."""
    net.log_data[log_step(net, FIXED, i, 0, 0, 1)] = k
    net.scalars[CONSTANT] += net.cost[net.ptr[i] + k]
    end = net.head[i]
    while end >= 0:
        if net.edge_live[end >> 1]:
            w = far(net, end)
            add_row(net, end >> 1, i, k, w)
            kill(net, end >> 1)
            if drop_forbidden(net, w):
                wake_around(net, w)
        end = net.following[end]


def first_live(net: Network, end: int) -> int:
    """The first end of a list, from this one on, whose edge is there."""
    while net.edge_live[end >> 1] == 0:
        end = net.following[end]
    return end


def eliminate_leaf(net: Network, i: int) -> bool:
    """Replace a node with one neighbour by its least cost given that one's choice. True when there is no room."""
    end = first_live(net, net.head[i])
    e, v = end >> 1, far(net, end)
    if net.scalars[LOG_DATA] + size_of(net, v) > len(net.log_data):
        net.scalars[NEED] = size_of(net, v)
        return True
    least_by_one(net, e, i, v, log_step(net, FOLLOWS, i, v, 0, size_of(net, v)))
    kill(net, e)
    if drop_forbidden(net, v):
        wake_around(net, v)
    return False


def eliminate_between(net: Network, i: int, largest_table: int) -> bool:
    """Replace a node with two neighbours v, w by the table of its least cost given theirs. True when there is no room."""
    end = first_live(net, net.head[i])
    last = first_live(net, net.following[end])
    e, f, v, w = end >> 1, last >> 1, far(net, end), far(net, last)
    entries = size_of(net, v) * size_of(net, w)
    if net.live_count[v] * net.live_count[w] > largest_table:
        return False
    if net.scalars[POOL] + 2 * entries > len(net.pool) or net.scalars[LOG_DATA] + entries > len(net.log_data):
        net.scalars[NEED] = 2 * entries
        return True
    data, new = log_step(net, BY_PAIR, i, v, w, entries), net.scalars[POOL]
    net.scalars[POOL] += entries
    least_by_pair(net, e, f, i, v, w, data, new)
    kill(net, f)
    known = joining(net, v, w)
    net.eu[e], net.ev[e], net.at[e] = v, w, new
    if end & 1 == 0:  # its end 2 e + 1 hangs on v
        net.eu[e], net.ev[e] = w, v
        transpose(net, e, v, w, net.scalars[POOL])
        net.scalars[POOL] += entries
    net.degree[w] += 1
    if known >= 0:
        add_table(net, known, e, v, w)
        wake_edge(net, known)
        kill(net, e)
    else:
        hang(net, end, w)
        wake_edge(net, e)
    return False
