"""Exact steps that need no memory: arc consistency, moving minima out of tables, fixing, merging nodes that follow another, and
elimination of nodes with at most two neighbours.

Every step keeps at least one best answer (below the upper bound) and logs how to undo itself. ``propagate`` runs them from queues
until none applies. Nodes with memory items are merged and fixed, never eliminated.
"""

from __future__ import annotations

import numpy as np

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
    NEVER,
    NODE_HEAD,
    NODE_TAIL,
    POOL,
    UPPER,
    Network,
    add_table,
    drop_forbidden,
    far,
    grown,
    hang,
    joining,
    kill,
    plus,
    steps,
    wake_around,
    wake_edge,
    wake_node,
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
    lost_u, lost_v = forbid_and_support(net, e, u, v), False
    if net.scalars[INFEASIBLE]:
        return False
    lost_v = forbid_and_support(net, e, v, u)
    if net.scalars[INFEASIBLE]:
        return False
    moved_u = move_minima(net, e, u, v)
    moved_v = move_minima(net, e, v, u)
    if lost_u:
        wake_around(net, u)
    if lost_v:
        wake_around(net, v)
    if moved_u:
        wake_node(net, u)
    if moved_v:
        wake_node(net, v)
    if lost_u or lost_v:
        return False  # it waits again
    if is_zero(net, e, u, v):
        kill(net, e)
        return False
    u_follows, v_follows = follows(net, e, u, v), follows(net, e, v, u)
    if u_follows and (not v_follows or net.degree[u] <= net.degree[v]):
        return merge(net, e, u, v)
    if v_follows:
        return merge(net, e, v, u)
    return False


@kernel
def forbid_and_support(net: Network, e: int, u: int, v: int) -> bool:
    """Forbid pairs that cost too much; remove choices of u that no choice of v allows."""
    su, sv = steps(net, e, u)
    at, pu, pv = net.at[e], net.ptr[u], net.ptr[v]
    kept = 0
    for i in range(net.live_count[u]):
        k = net.live[pu + i]
        room = net.scalars[UPPER] - net.scalars[CONSTANT] - net.cost[pu + k]
        supported = False
        for j in range(net.live_count[v]):
            m = net.live[pv + j]
            place = at + k * su + m * sv
            if net.pool[place] < NEVER:
                if net.pool[place] + net.cost[pv + m] >= room:
                    net.pool[place] = NEVER
                else:
                    supported = True
        if supported:
            net.live[pu + kept] = k
            kept += 1
    lost = kept < net.live_count[u]
    net.live_count[u] = kept
    if kept == 0:
        net.scalars[INFEASIBLE] = 1
    return bool(lost)


@kernel
def move_minima(net: Network, e: int, u: int, v: int) -> bool:
    """Move the least cost of each row of u into the cost of that choice."""
    su, sv = steps(net, e, u)
    at, pu, pv = net.at[e], net.ptr[u], net.ptr[v]
    moved = False
    for i in range(net.live_count[u]):
        k = net.live[pu + i]
        least = NEVER
        for j in range(net.live_count[v]):
            least = min(least, net.pool[at + k * su + net.live[pv + j] * sv])
        if 0 < least < NEVER:
            moved = True
            net.cost[pu + k] += least
            for j in range(net.live_count[v]):
                place = at + k * su + net.live[pv + j] * sv
                if net.pool[place] < NEVER:
                    net.pool[place] -= least
    return moved


@kernel
def is_zero(net: Network, e: int, u: int, v: int) -> bool:
    su, sv = steps(net, e, u)
    for i in range(net.live_count[u]):
        row = net.at[e] + net.live[net.ptr[u] + i] * su
        for j in range(net.live_count[v]):
            if net.pool[row + net.live[net.ptr[v] + j] * sv] != 0:
                return False
    return True


@kernel
def follows(net: Network, e: int, u: int, v: int) -> bool:
    """Whether each choice of v leaves exactly one of u."""
    su, sv = steps(net, e, u)
    for j in range(net.live_count[v]):
        column, allowed = net.at[e] + net.live[net.ptr[v] + j] * sv, 0
        for i in range(net.live_count[u]):
            allowed += net.pool[column + net.live[net.ptr[u] + i] * su] < NEVER
        if allowed != 1:
            return False
    return True


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
    pu, pv = net.ptr[u], net.ptr[v]
    size_v, need, end = net.ptr[v + 1] - pv, 0, net.head[u]
    while end >= 0:
        if net.edge_live[end >> 1]:
            w = far(net, end)
            need += size_v * (net.ptr[w + 1] - net.ptr[w])
        end = net.following[end]
    if net.scalars[POOL] + need > len(net.pool) or net.scalars[LOG_DATA] + size_v > len(net.log_data):
        net.scalars[NEED] = need + size_v
        return True
    data = log_step(net, FOLLOWS, u, v, 0, size_v)
    su, sv = steps(net, e, u)
    for j in range(net.live_count[v]):
        m = net.live[pv + j]
        for i in range(net.live_count[u]):
            k = net.live[pu + i]
            cell = net.pool[net.at[e] + k * su + m * sv]
            if cell < NEVER:
                net.log_data[data + m] = k
                net.cost[pv + m] = plus(net.cost[pv + m], plus(net.cost[pu + k], cell))
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
def add_followed(net: Network, target: int, source: int, u: int, v: int, w: int, data: int) -> None:
    sv, sw = steps(net, target, v)
    tu, tw = steps(net, source, u)
    for j in range(net.live_count[v]):
        m = net.live[net.ptr[v] + j]
        k = net.log_data[data + m]
        for i in range(net.live_count[w]):
            x = net.live[net.ptr[w] + i]
            place = net.at[target] + m * sv + x * sw
            net.pool[place] = plus(net.pool[place], net.pool[net.at[source] + k * tu + x * tw])


@kernel
def rehang(net: Network, end: int, u: int, v: int, w: int, data: int) -> None:
    """Turn edge (u, w) into (v, w) with a new table."""
    e = end >> 1
    tu, tw = steps(net, e, u)
    old, new = net.at[e], net.scalars[POOL]
    size_v, size_w = net.ptr[v + 1] - net.ptr[v], net.ptr[w + 1] - net.ptr[w]
    net.scalars[POOL] += size_v * size_w
    if end & 1:
        net.ev[e] = v
    else:
        net.eu[e] = v
    sv, sw = steps(net, e, v)
    for j in range(net.live_count[v]):
        m = net.live[net.ptr[v] + j]
        k = net.log_data[data + m]
        for i in range(net.live_count[w]):
            x = net.live[net.ptr[w] + i]
            net.pool[new + m * sv + x * sw] = net.pool[old + k * tu + x * tw]
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
            si, sw = steps(net, e, i)
            for j in range(net.live_count[w]):
                m = net.live[net.ptr[w] + j]
                net.cost[net.ptr[w] + m] = plus(net.cost[net.ptr[w] + m], net.pool[net.at[e] + k * si + m * sw])
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
    pi, pv = net.ptr[i], net.ptr[v]
    if net.scalars[LOG_DATA] + net.ptr[v + 1] - pv > len(net.log_data):
        net.scalars[NEED] = net.ptr[v + 1] - pv
        return True
    data = log_step(net, FOLLOWS, i, v, 0, net.ptr[v + 1] - pv)
    si, sv = steps(net, e, i)
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
    pi, size_v, size_w = net.ptr[i], net.ptr[v + 1] - net.ptr[v], net.ptr[w + 1] - net.ptr[w]
    if net.live_count[v] * net.live_count[w] > LARGEST_TABLE:
        return False
    if max(net.scalars[POOL] + size_v * size_w - len(net.pool), net.scalars[LOG_DATA] + size_v * size_w - len(net.log_data)) > 0:
        net.scalars[NEED] = size_v * size_w
        return True
    data = log_step(net, BY_PAIR, i, v, w, size_v * size_w)
    si, sv = steps(net, e, i)
    ti, tw = steps(net, f, i)
    new = net.scalars[POOL]
    net.scalars[POOL] += size_v * size_w
    row = np.empty(net.live_count[i], dtype=np.int64)
    for a in range(net.live_count[v]):
        m = net.live[net.ptr[v] + a]
        for place in range(net.live_count[i]):
            k = net.live[pi + place]
            row[place] = plus(net.cost[pi + k], net.pool[net.at[e] + k * si + m * sv])
        for b in range(net.live_count[w]):
            x = net.live[net.ptr[w] + b]
            least, best = NEVER, net.live[pi]
            for place in range(net.live_count[i]):
                k = net.live[pi + place]
                total = plus(row[place], net.pool[net.at[f] + k * ti + x * tw])
                if total < least:
                    least, best = total, k
            net.log_data[data + m * size_w + x] = best
            net.pool[new + m * size_w + x] = least
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


@kernel
def transpose(net: Network, e: int, v: int, w: int) -> None:
    """The table of e is laid out (v, w); turn it into (w, v)."""
    size_v, size_w = net.ptr[v + 1] - net.ptr[v], net.ptr[w + 1] - net.ptr[w]
    turned = np.empty(size_v * size_w, dtype=np.int64)
    for m in range(size_v):
        for x in range(size_w):
            turned[x * size_v + m] = net.pool[net.at[e] + m * size_w + x]
    net.pool[net.at[e] : net.at[e] + size_v * size_w] = turned
