"""What reduction does to one edge's table, or with it to the costs of a node; ``propagation`` says when.

Loops over a table are kernels with a second form, ``plain_...``, in NumPy for where nothing is compiled; both do the same.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from solvers.arrays import Ints
from solvers.compiled import kernel, kernel_or
from solvers.network import CONSTANT, INFEASIBLE, NEVER, UPPER, Network

LOST_FIRST, LOST_SECOND, MOVED_FIRST, MOVED_SECOND, IS_ZERO, FIRST_FOLLOWS, SECOND_FOLLOWS = (1 << bit for bit in range(7))
"""What ``tighten`` found, added together; the last three are told only where no choice was lost."""


def choices(net: Network, node: int) -> Ints:
    """The remaining choices, in order; a view."""
    begin = net.ptr[node]
    return net.live[begin : begin + net.live_count[node]]


def costs(net: Network, node: int) -> Ints:
    """The costs of all choices, gone or not; a view."""
    return net.cost[net.ptr[node] : net.ptr[node + 1]]


def table(net: Network, e: int, node: int) -> Ints:
    """The table of edge e, a row for each choice of ``node``, gone or not; a view."""
    u, v, at = net.eu[e], net.ev[e], net.at[e]
    rows, columns = net.ptr[u + 1] - net.ptr[u], net.ptr[v + 1] - net.ptr[v]
    shaped = net.pool[at : at + rows * columns].reshape(rows, columns)
    return shaped if u == node else shaped.T


def remaining(net: Network, e: int, first: int) -> Ints:
    """The table of edge e, a row for each remaining choice of ``first``; a view only where none of its nodes' has gone."""
    found, rows, columns = table(net, e, net.eu[e]), choices(net, net.eu[e]), choices(net, net.ev[e])
    if found.shape != (len(rows), len(columns)):
        found = found.take(rows, axis=0).take(columns, axis=1)
    return found if first == net.eu[e] else found.T


def put(net: Network, e: int, first: int, second: int, values: Ints) -> None:
    """Write what ``remaining`` gave, changed."""
    full, rows, columns = table(net, e, first), choices(net, first), choices(net, second)
    if full.shape == values.shape:
        full[:] = values
    else:
        full[rows[:, None], columns] = values


def sums(a: Ints, b: Ints) -> Ints:
    """``plus`` of arrays."""
    return np.where((a >= NEVER) | (b >= NEVER), NEVER, a + b)


@kernel
def plus(a: int, b: int) -> int:
    if a >= NEVER or b >= NEVER:
        return NEVER
    return a + b


@kernel
def steps(net: Network, e: int, node: int) -> tuple[int, int]:
    """Strides in edge e's table for a choice of ``node`` and for one of the other node."""
    u, v = net.eu[e], net.ev[e]
    width = net.ptr[v + 1] - net.ptr[v]
    if u == node:
        return width, 1
    return 1, width


def plain_drop_forbidden(net: Network, node: int) -> bool:
    left, cost = choices(net, node), costs(net, node)
    paid = cost[left]
    kept = paid < min(net.scalars[UPPER] - net.scalars[CONSTANT], NEVER)
    changed = not kept.all()
    if changed:
        left, paid = keep(net, node, kept), paid[kept]
        if len(left) == 0:
            return True
    least = paid.min()
    if least > 0:
        net.scalars[CONSTANT] += least
        cost[left] = paid - least
    return changed


@kernel_or(plain_drop_forbidden)
def drop_forbidden(net: Network, node: int) -> bool:
    """Remove choices that cost too much for an answer below the upper bound, and move the least cost to the constant."""
    begin, kept = net.ptr[node], 0
    least = NEVER
    for i in range(net.live_count[node]):
        k = net.live[begin + i]
        if net.cost[begin + k] < net.scalars[UPPER] - net.scalars[CONSTANT] and net.cost[begin + k] < NEVER:
            net.live[begin + kept] = k
            kept += 1
            least = min(least, net.cost[begin + k])
    changed = kept < net.live_count[node]
    net.live_count[node] = kept
    if kept == 0:
        net.scalars[INFEASIBLE] = 1
        return True
    if least > 0:
        net.scalars[CONSTANT] += least
        for i in range(kept):
            net.cost[begin + net.live[begin + i]] -= least
    return bool(changed)


def plain_tighten(net: Network, e: int, u: int, v: int) -> int:
    cells, rows, columns = remaining(net, e, u), choices(net, u), choices(net, v)
    cost_u, cost_v = costs(net, u), costs(net, v)
    room = net.scalars[UPPER] - net.scalars[CONSTANT] - cost_u[rows]
    allowed = cells < NEVER
    too_much = allowed & (cells + cost_v[columns] >= room[:, None])
    if too_much.any():
        cells = np.where(too_much, NEVER, cells)
        allowed = cells < NEVER
        put(net, e, u, v, cells)
    kept_u, kept_v = np.asarray(allowed.any(axis=1)), np.asarray(allowed.any(axis=0))
    found = 0
    if not kept_u.all():
        found, cells, allowed, rows = LOST_FIRST, cells[kept_u], allowed[kept_u], keep(net, u, kept_u)
        if len(rows) == 0:
            return found
    if not kept_v.all():
        found, cells, allowed, columns = found + LOST_SECOND, cells[:, kept_v], allowed[:, kept_v], keep(net, v, kept_v)
    least = cells.min(axis=1)
    if least.any():
        found += MOVED_FIRST
        cost_u[rows] += least
        cells = np.where(allowed, cells - least[:, None], NEVER)
    least = cells.min(axis=0)
    if least.any():
        found += MOVED_SECOND
        cost_v[columns] += least
        cells = np.where(allowed, cells - least, NEVER)
    if found & (MOVED_FIRST | MOVED_SECOND):
        put(net, e, u, v, cells)
    if found & (LOST_FIRST | LOST_SECOND):
        return found
    found += 0 if cells.any() else IS_ZERO
    found += FIRST_FOLLOWS if (allowed.sum(axis=0) == 1).all() else 0
    return found + (SECOND_FOLLOWS if (allowed.sum(axis=1) == 1).all() else 0)


def keep(net: Network, node: int, kept: NDArray[np.bool_]) -> Ints:
    """Of the remaining choices those that are kept; marks infeasibility."""
    left = choices(net, node)[kept]
    net.live[net.ptr[node] : net.ptr[node] + len(left)] = left
    net.live_count[node] = len(left)
    if len(left) == 0:
        net.scalars[INFEASIBLE] = 1
    return left


@kernel_or(plain_tighten)
def tighten(net: Network, e: int, u: int, v: int) -> int:
    """Arc consistency of edge e between u and v, and its minima moved to their costs; says what was found."""
    found = 0
    if forbid_and_support(net, e, u, v):
        found += LOST_FIRST
        if net.scalars[INFEASIBLE]:
            return found
    if forbid_and_support(net, e, v, u):
        found += LOST_SECOND
    if move_minima(net, e, u, v):
        found += MOVED_FIRST
    if move_minima(net, e, v, u):
        found += MOVED_SECOND
    if found & (LOST_FIRST | LOST_SECOND):
        return found
    if is_zero(net, e, u, v):
        found += IS_ZERO
    if follows(net, e, u, v):
        found += FIRST_FOLLOWS
    if follows(net, e, v, u):
        found += SECOND_FOLLOWS
    return found


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


def plain_add_table(net: Network, target: int, source: int, first: int, second: int) -> None:
    put(net, target, first, second, sums(remaining(net, target, first), remaining(net, source, first)))


@kernel_or(plain_add_table)
def add_table(net: Network, target: int, source: int, first: int, second: int) -> None:
    """Add the table of edge ``source`` to that of ``target``; both join ``first`` and ``second``."""
    a, b = steps(net, target, first)
    c, d = steps(net, source, first)
    for i in range(net.live_count[first]):
        k = net.live[net.ptr[first] + i]
        for j in range(net.live_count[second]):
            m = net.live[net.ptr[second] + j]
            place = net.at[target] + k * a + m * b
            net.pool[place] = plus(net.pool[place], net.pool[net.at[source] + k * c + m * d])


def plain_follow(net: Network, e: int, u: int, v: int, data: int) -> None:
    cells, own, other = remaining(net, e, u), choices(net, u), choices(net, v)
    place = (cells < NEVER).argmax(axis=0)
    chosen = own[place]
    net.log_data[data + other] = chosen
    cost = costs(net, v)
    cost[other] = sums(cost[other], sums(costs(net, u)[chosen], cells[place, np.arange(len(other))]))


@kernel_or(plain_follow)
def follow(net: Network, e: int, u: int, v: int, data: int) -> None:
    """Write the one choice of u that each choice of v leaves to ``log_data``, and add what it costs to v's."""
    pu, pv = net.ptr[u], net.ptr[v]
    su, sv = steps(net, e, u)
    for j in range(net.live_count[v]):
        m = net.live[pv + j]
        for i in range(net.live_count[u]):
            k = net.live[pu + i]
            cell = net.pool[net.at[e] + k * su + m * sv]
            if cell < NEVER:
                net.log_data[data + m] = k
                net.cost[pv + m] = plus(net.cost[pv + m], plus(net.cost[pu + k], cell))


def followed(net: Network, e: int, u: int, v: int, w: int, data: int) -> Ints:
    """The table of edge e between u and w as one of v, whose choice m stands for u's choice ``log_data[data + m]``."""
    return table(net, e, u)[net.log_data[data + choices(net, v)][:, None], choices(net, w)]


def plain_add_followed(net: Network, target: int, source: int, u: int, v: int, w: int, data: int) -> None:
    put(net, target, v, w, sums(remaining(net, target, v), followed(net, source, u, v, w, data)))


@kernel_or(plain_add_followed)
def add_followed(net: Network, target: int, source: int, u: int, v: int, w: int, data: int) -> None:
    """Add the table of edge ``source`` between u and w to that of ``target`` between v and w; v's choices stand for u's."""
    sv, sw = steps(net, target, v)
    tu, tw = steps(net, source, u)
    for j in range(net.live_count[v]):
        m = net.live[net.ptr[v] + j]
        k = net.log_data[data + m]
        for i in range(net.live_count[w]):
            x = net.live[net.ptr[w] + i]
            place = net.at[target] + m * sv + x * sw
            net.pool[place] = plus(net.pool[place], net.pool[net.at[source] + k * tu + x * tw])


def plain_copy_followed(net: Network, e: int, u: int, v: int, w: int, data: int, new: int) -> None:
    rows, columns = net.ptr[v + 1] - net.ptr[v], net.ptr[w + 1] - net.ptr[w]
    place = net.pool[new : new + rows * columns]
    to = place.reshape(rows, columns) if net.eu[e] == u else place.reshape(columns, rows).T
    to[choices(net, v)[:, None], choices(net, w)] = followed(net, e, u, v, w, data)


@kernel_or(plain_copy_followed)
def copy_followed(net: Network, e: int, u: int, v: int, w: int, data: int, new: int) -> None:
    """Write the table that edge e between u and w has when v is in u's place, to ``new`` in the pool."""
    tu, tw = steps(net, e, u)
    sv, sw = (net.ptr[w + 1] - net.ptr[w], 1) if net.eu[e] == u else (1, net.ptr[v + 1] - net.ptr[v])
    for j in range(net.live_count[v]):
        m = net.live[net.ptr[v] + j]
        k = net.log_data[data + m]
        for i in range(net.live_count[w]):
            x = net.live[net.ptr[w] + i]
            net.pool[new + m * sv + x * sw] = net.pool[net.at[e] + k * tu + x * tw]


def plain_add_row(net: Network, e: int, i: int, k: int, w: int) -> None:
    cost, other = costs(net, w), choices(net, w)
    cost[other] = sums(cost[other], table(net, e, i)[k, other])


@kernel_or(plain_add_row)
def add_row(net: Network, e: int, i: int, k: int, w: int) -> None:
    """Add what edge e costs with choice k of i to the costs of w."""
    si, sw = steps(net, e, i)
    for j in range(net.live_count[w]):
        m = net.live[net.ptr[w] + j]
        net.cost[net.ptr[w] + m] = plus(net.cost[net.ptr[w] + m], net.pool[net.at[e] + k * si + m * sw])


def plain_least_by_one(net: Network, e: int, i: int, v: int, data: int) -> None:
    own, other = choices(net, i), choices(net, v)
    total = sums(costs(net, i)[own][:, None], remaining(net, e, i))
    net.log_data[data + other] = own[total.argmin(axis=0)]
    cost = costs(net, v)
    cost[other] = sums(cost[other], total.min(axis=0))


@kernel_or(plain_least_by_one)
def least_by_one(net: Network, e: int, i: int, v: int, data: int) -> None:
    """Write the best choice of i given each of v to ``log_data``, and add what it costs to v's."""
    pi, pv = net.ptr[i], net.ptr[v]
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


def plain_least_by_pair(net: Network, e: int, f: int, i: int, v: int, w: int, data: int, new: int) -> None:
    own, rows, columns = choices(net, i), choices(net, v), choices(net, w)
    left = sums(costs(net, i)[own][:, None], remaining(net, e, i))
    right = remaining(net, f, i)
    least = np.full((len(rows), len(columns)), NEVER, dtype=np.int64)
    best = np.full(least.shape, own[0], dtype=np.int64)
    for place, k in enumerate(own):
        total = sums(left[place][:, None], right[place])
        best[total < least] = k
        least = np.minimum(least, total)
    to = rows[:, None] * (net.ptr[w + 1] - net.ptr[w]) + columns
    net.log_data[data + to], net.pool[new + to] = best, least


@kernel_or(plain_least_by_pair)
def least_by_pair(net: Network, e: int, f: int, i: int, v: int, w: int, data: int, new: int) -> None:
    """Write the best choice of i given each of v and of w to ``log_data``, and what it costs to a table at ``new`` in the pool."""
    pi, size_w = net.ptr[i], net.ptr[w + 1] - net.ptr[w]
    si, sv = steps(net, e, i)
    ti, tw = steps(net, f, i)
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


@kernel
def transpose(net: Network, e: int, v: int, w: int) -> None:
    """The table of e is laid out (v, w); turn it into (w, v)."""
    size_v, size_w = net.ptr[v + 1] - net.ptr[v], net.ptr[w + 1] - net.ptr[w]
    cells = net.pool[net.at[e] : net.at[e] + size_v * size_w]
    cells[:] = cells.copy().reshape((size_v, size_w)).T.copy().reshape(-1)


def plain_copy_tables(net: Network, edges: Ints, edge_ptr: Ints, tables: Ints) -> None:
    for place, e in enumerate(edges):
        tables[edge_ptr[place] : edge_ptr[place + 1]] = remaining(net, e, net.eu[e]).reshape(-1)


@kernel_or(plain_copy_tables)
def copy_tables(net: Network, edges: Ints, edge_ptr: Ints, tables: Ints) -> None:
    """Write what remains of each edge's table to ``tables``, one after the other."""
    for place in range(len(edges)):
        e, to = edges[place], edge_ptr[place]
        u, v = net.eu[e], net.ev[e]
        width = net.ptr[v + 1] - net.ptr[v]
        for i in range(net.live_count[u]):
            row = net.at[e] + net.live[net.ptr[u] + i] * width
            for j in range(net.live_count[v]):
                tables[to] = net.pool[row + net.live[net.ptr[v] + j]]
                to += 1
