"""Exact steps that need no memory: arc consistency, moving minima out of tables, fixing, merging nodes that follow another, and
elimination of nodes with at most two neighbours.

Every step keeps at least one best answer (below the upper bound) and logs how to undo itself. ``propagate`` runs them from queues
until none applies. Nodes with memory items are merged and fixed, never eliminated.
"""

from __future__ import annotations

from solvers.compiled import kernel
from solvers.network import (
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
    NODE_HEAD,
    NODE_TAIL,
    POOL,
    Network,
    far,
    grown,
    hang,
    joining,
    kill,
    wake_around,
    wake_edge,
    wake_node,
)
from solvers.tables import (
    FIRST_FOLLOWS,
    IS_ZERO,
    LOST_FIRST,
    LOST_SECOND,
    MOVED_FIRST,
    MOVED_SECOND,
    SECOND_FOLLOWS,
    add_followed,
    add_row,
    add_table,
    copy_followed,
    drop_forbidden,
    follow,
    least_by_one,
    least_by_pair,
    tighten,
    transpose,
)

LARGEST_TABLE = 20_000
"""Elimination of a node with two neighbours makes no table of more entries than this."""


def propagate(net: Network) -> Network:
    """Run all steps to their fixed point; the network may come back with larger arrays."""
    while run_queues(net):
        net = grown(net)
    return net


@kernel
def run_queues(net: Network) -> bool:
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
            if net.present[i] and simplify(net, i):
                wake_node(net, i)
                return True
        else:
            return False
    return False


@kernel
def revise(net: Network, e: int) -> bool:
    """Arc consistency and minima of one edge; then drop it if nothing is left in its table, or merge along it."""
    u, v = net.eu[e], net.ev[e]
    found = tighten(net, e)
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


@kernel
def log_step(net: Network, kind: int, node: int, first: int, second: int, room: int) -> int:
    """Open a log entry; returns where its ``room`` numbers go."""
    entry, at = net.scalars[LOG], net.scalars[LOG_DATA]
    net.log[entry, 0], net.log[entry, 1], net.log[entry, 2], net.log[entry, 3], net.log[entry, 4] = kind, node, first, second, at
    net.scalars[LOG] += 1
    net.scalars[LOG_DATA] += room
    net.present[node] = 0
    return int(at)


@kernel
def merge(net: Network, e: int, u: int, v: int) -> bool:
    """Replace u by what v's choice says it is. True when there is no room."""
    size_v, need, end = net.ptr[v + 1] - net.ptr[v], 0, net.head[u]
    while end >= 0:
        if net.edge_live[end >> 1]:
            w = far(net, end)
            need += size_v * (net.ptr[w + 1] - net.ptr[w])
        end = net.following[end]
    if net.scalars[POOL] + need > len(net.pool) or net.scalars[LOG_DATA] + size_v > len(net.log_data):
        net.scalars[NEED] = need + size_v
        return True
    data = log_step(net, FOLLOWS, u, v, 0, size_v)
    follow(net, e, u, v, data)
    kill(net, e)
    net.heavy[v] |= net.heavy[u]
    move_edges(net, u, v, data)
    if drop_forbidden(net, v):
        wake_around(net, v)
    wake_node(net, v)
    return False


@kernel
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


@kernel
def rehang(net: Network, end: int, u: int, v: int, w: int, data: int) -> None:
    """Turn edge (u, w) into (v, w) with a new table."""
    e, new = end >> 1, net.scalars[POOL]
    net.scalars[POOL] += (net.ptr[v + 1] - net.ptr[v]) * (net.ptr[w + 1] - net.ptr[w])
    copy_followed(net, e, u, v, w, data, new)
    if end & 1:
        net.ev[e] = v
    else:
        net.eu[e] = v
    net.at[e] = new
    hang(net, end, v)
    net.degree[v] += 1


@kernel
def simplify(net: Network, i: int) -> bool:
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
        return eliminate_between(net, i)
    return False


@kernel
def fix(net: Network, i: int, k: int) -> None:
    net.log_data[log_step(net, FIXED, i, 0, 0, 1)] = k
    net.scalars[CONSTANT] += net.cost[net.ptr[i] + k]
    end = net.head[i]
    while end >= 0:
        e = end >> 1
        if net.edge_live[e]:
            w = far(net, end)
            add_row(net, e, i, k, w)
            kill(net, e)
            if drop_forbidden(net, w):
                wake_around(net, w)
        end = net.following[end]


@kernel
def eliminate_leaf(net: Network, i: int) -> bool:
    end = net.head[i]
    while net.edge_live[end >> 1] == 0:
        end = net.following[end]
    e, v = end >> 1, far(net, end)
    size_v = net.ptr[v + 1] - net.ptr[v]
    if net.scalars[LOG_DATA] + size_v > len(net.log_data):
        net.scalars[NEED] = size_v
        return True
    least_by_one(net, e, i, v, log_step(net, FOLLOWS, i, v, 0, size_v))
    kill(net, e)
    if drop_forbidden(net, v):
        wake_around(net, v)
    return False


@kernel
def eliminate_between(net: Network, i: int) -> bool:
    """Replace a node with two neighbours v, w by the table of its least cost given theirs."""
    end = net.head[i]
    while net.edge_live[end >> 1] == 0:
        end = net.following[end]
    last = net.following[end]
    while net.edge_live[last >> 1] == 0:
        last = net.following[last]
    e, f, v, w = end >> 1, last >> 1, far(net, end), far(net, last)
    size_v, size_w = net.ptr[v + 1] - net.ptr[v], net.ptr[w + 1] - net.ptr[w]
    if net.live_count[v] * net.live_count[w] > LARGEST_TABLE:
        return False
    if max(net.scalars[POOL] + size_v * size_w - len(net.pool), net.scalars[LOG_DATA] + size_v * size_w - len(net.log_data)) > 0:
        net.scalars[NEED] = size_v * size_w
        return True
    data = log_step(net, BY_PAIR, i, v, w, size_v * size_w)
    new = net.scalars[POOL]
    net.scalars[POOL] += size_v * size_w
    least_by_pair(net, e, f, i, v, w, data, new)
    kill(net, f)
    known = joining(net, v, w)
    net.eu[e], net.ev[e], net.at[e] = v, w, new
    join(net, e, end, v, w, known)
    return False


@kernel
def join(net: Network, e: int, end: int, v: int, w: int, known: int) -> None:
    """Edge e, which hung on v by its end other than ``end``, now joins v and w; add it to the edge that already does, if any."""
    if end & 1 == 0:  # its end 2 e + 1 hangs on v
        net.eu[e], net.ev[e] = w, v
        transpose(net, e, v, w)
    net.degree[w] += 1
    if known >= 0:
        add_table(net, known, e, v, w)
        wake_edge(net, known)
        kill(net, e)
        return
    hang(net, end, w)
    wake_edge(net, e)
