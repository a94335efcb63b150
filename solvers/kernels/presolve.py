# cython: infer_types=True, annotation_typing=False, boundscheck=False, wraparound=False, initializedcheck=False, cdivision=True
"""Exact steps of presolve on a Network, from queues until none applies: arc consistency, moving minima out of tables, fixing, merging
nodes that follow another, elimination of nodes with at most two neighbours.

Every step keeps at least one best answer below the upper bound, and logs how to undo itself. Nodes with memory items are merged and
fixed, never eliminated.
"""

from __future__ import annotations

from ..arrays import Ints
from .constants import (
    BY_PAIR,
    CONSTANT,
    EDGE_HEAD,
    EDGE_TAIL,
    FIRST_FOLLOWS,
    FIXED,
    FOLLOWS,
    INFEASIBLE,
    IS_ZERO,
    LOG,
    LOG_DATA,
    LOST_FIRST,
    LOST_SECOND,
    MOVED_FIRST,
    MOVED_SECOND,
    NEED,
    NODE_HEAD,
    NODE_TAIL,
    POOL,
    SECOND_FOLLOWS,
    VISITED,
)
from .tables import (
    add_row,
    add_table,
    drop_forbidden,
    least_by_one,
    least_by_pair,
    size_of,
    step_across,
    step_along,
    tighten,
)
from .views import Network


def hang(net: Network, end: int, node: int) -> None:
    """Put an edge's end first in its node's list."""
    net.following[end] = net.head[node]
    net.head[node] = end


def far(net: Network, end: int) -> int:
    """Return the node at the other end."""
    return net.eu[end >> 1] if end & 1 else net.ev[end >> 1]


def kill(net: Network, e: int) -> None:
    """Take an edge away."""
    net.edge_live[e] = 0
    for node in range(2):
        i = net.ev[e] if node else net.eu[e]
        net.degree[i] -= 1
        wake_node(net, i)


def joining(net: Network, v: int, w: int) -> int:
    """Find the edge between v and w, or -1.

    Dead edges on the way leave the list, so nobody else may be walking through it.
    """
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
    if net.edge_waits[e] == 0:
        net.edge_waits[e] = 1
        net.edge_queue[net.scalars[EDGE_TAIL]] = e
        net.scalars[EDGE_TAIL] = (net.scalars[EDGE_TAIL] + 1) % len(net.edge_queue)


def wake_node(net: Network, node: int) -> None:
    """Queue a node."""
    net.touched[node] = 1
    if net.node_waits[node] == 0 and net.present[node]:
        net.node_waits[node] = 1
        net.node_queue[net.scalars[NODE_TAIL]] = node
        net.scalars[NODE_TAIL] = (net.scalars[NODE_TAIL] + 1) % len(net.node_queue)


def wake_around(net: Network, node: int) -> None:
    """Queue a node that has lost choices, its edges and its neighbours: a table may have become small enough."""
    wake_node(net, node)
    end = net.head[node]
    while end >= 0:
        if net.edge_live[end >> 1]:
            wake_edge(net, end >> 1)
            wake_node(net, far(net, end))
        end = net.following[end]


def wake(net: Network, nodes: Ints, around: int) -> None:
    """Queue some nodes, with ``around`` also their edges and neighbours."""
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
                    known = net.mark[other]
                    add_table(net, net.at[known], step_along(net, known, i), step_across(net, known, i), end >> 1, i, i, other, -1)
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
    """Log that a node goes; returns where the ``room`` numbers of the entry begin."""
    entry, at = net.scalars[LOG], net.scalars[LOG_DATA]
    net.log[entry, 0], net.log[entry, 1], net.log[entry, 2], net.log[entry, 3], net.log[entry, 4] = kind, node, first, second, at
    net.scalars[LOG] += 1
    net.scalars[LOG_DATA] += room
    net.present[node] = 0
    return at


def run_queues(net: Network, largest_table: int) -> bool:
    """Take steps until none is queued. True when an array is too small for the next step, which then still waits."""
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
    """Tighten one edge; then drop it if its table is zero, or merge along it. True when there is no room."""
    u, v, found = net.eu[e], net.ev[e], tighten(net, e)
    net.touched[u], net.touched[v] = 1, 1
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
    """Replace u by its best choice given v's, where v's leaves one or u has no other neighbour. True when there is no room."""
    size, need, end = size_of(net, v), 0, net.head[u]
    while end >= 0:
        if net.edge_live[end >> 1] and end >> 1 != e:
            need += size * size_of(net, far(net, end))
        end = net.following[end]
    if net.scalars[POOL] + need > len(net.pool) or net.scalars[LOG_DATA] + size > len(net.log_data):
        net.scalars[NEED] = need + size
        return True
    net.scalars[VISITED] += need
    data = log_step(net, FOLLOWS, u, v, 0, size)
    least_by_one(net, e, u, v, data)
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
                add_table(net, net.at[known], step_along(net, known, v), step_across(net, known, v), e, u, v, w, data)
                kill(net, e)
                wake_edge(net, known)
            else:
                rehang(net, end, u, v, w, data)
                wake_edge(net, e)
        end = following


def rehang(net: Network, end: int, u: int, v: int, w: int, data: int) -> None:
    """Turn edge (u, w) into (v, w) with a new table."""
    e, new, along, across = end >> 1, net.scalars[POOL], size_of(net, w), 1
    if end & 1:
        along, across = 1, size_of(net, v)
    net.scalars[POOL] += size_of(net, v) * size_of(net, w)
    for place in range(new, net.scalars[POOL]):
        net.pool[place] = 0
    add_table(net, new, along, across, e, u, v, w, data)
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
        end = first_live(net, net.head[i])
        return merge(net, end >> 1, i, far(net, end))
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
    """Find the first end of a list, from this one on, whose edge is there."""
    while net.edge_live[end >> 1] == 0:
        end = net.following[end]
    return end


def eliminate_between(net: Network, i: int, largest_table: int) -> bool:
    """Replace a node with two neighbours v, w by the table of its least cost given theirs. True when there is no room."""
    end = first_live(net, net.head[i])
    last = first_live(net, net.following[end])
    e, f, v, w = end >> 1, last >> 1, far(net, end), far(net, last)
    entries = size_of(net, v) * size_of(net, w)
    if net.live_count[v] * net.live_count[w] > largest_table:
        return False
    if net.scalars[POOL] + entries > len(net.pool) or net.scalars[LOG_DATA] + entries > len(net.log_data):
        net.scalars[NEED] = entries
        return True
    data, new = log_step(net, BY_PAIR, i, v, w, entries), net.scalars[POOL]
    net.scalars[POOL] += entries
    first = end & 1  # the end of e that hangs on v is 2 e, so that v comes first in the new table
    least_by_pair(net, e, f, i, v, w, data, new, size_of(net, w) if first else 1, 1 if first else size_of(net, v))
    kill(net, f)
    known = joining(net, v, w)
    net.eu[e], net.ev[e], net.at[e] = v if first else w, w if first else v, new
    net.degree[w] += 1
    if known >= 0:
        add_table(net, net.at[known], step_along(net, known, v), step_across(net, known, v), e, v, v, w, -1)
        wake_edge(net, known)
        kill(net, e)
    else:
        hang(net, end, w)
        wake_edge(net, e)
    return False
