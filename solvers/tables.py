"""What reduction does to one edge's table, or with it to the costs of a node; ``propagation`` says when.

Loops over a table are kernels with a second form, ``plain_...``, in NumPy for where nothing is compiled; both do the same. Those in which
the time goes, ``..._table``, take the arrays that they read and not the network: they say all that ``translation`` needs to know.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from solvers.arrays import Ints
from solvers.compiled import kernel, kernel_or, loop_or
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
    found = rest(table(net, e, net.eu[e]), choices(net, net.eu[e]), choices(net, net.ev[e]))
    return found if first == net.eu[e] else found.T


def rest(cells: Ints, rows: Ints, columns: Ints) -> Ints:
    """Some rows and columns of a table; a view only where that is all of them."""
    return cells if cells.shape == (len(rows), len(columns)) else cells.take(rows, axis=0).take(columns, axis=1)


def put(net: Network, e: int, first: int, second: int, values: Ints) -> None:
    """Write what ``remaining`` gave, changed."""
    write(table(net, e, first), choices(net, first), choices(net, second), values)


def write(cells: Ints, rows: Ints, columns: Ints, values: Ints) -> None:
    """Write what ``rest`` gave, changed."""
    if cells.shape == values.shape:
        cells[:] = values
    else:
        cells[rows[:, None], columns] = values


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


@kernel
def tighten(net: Network, e: int) -> int:
    """Arc consistency of edge e, and its minima moved to the costs of its nodes, rows first; says what was found."""
    u, v, at = net.eu[e], net.ev[e], net.at[e]
    begin_u, end_u, begin_v, end_v = net.ptr[u], net.ptr[u + 1], net.ptr[v], net.ptr[v + 1]
    found, rows, columns = tighten_table(
        net.pool[at : at + (end_u - begin_u) * (end_v - begin_v)],
        net.live[begin_u : begin_u + net.live_count[u]],
        net.live[begin_v : begin_v + net.live_count[v]],
        net.cost[begin_u:end_u],
        net.cost[begin_v:end_v],
        net.scalars[UPPER] - net.scalars[CONSTANT],
    )
    net.live_count[u], net.live_count[v] = rows, columns
    if rows == 0:
        net.scalars[INFEASIBLE] = 1
    return int(found)


def plain_tighten_table(cells: Ints, first: Ints, second: Ints, first_cost: Ints, second_cost: Ints, room: int) -> tuple[int, int, int]:
    whole, rows, columns = cells.reshape(len(first_cost), -1), first, second
    left = rest(whole, rows, columns)
    allowed = left < NEVER
    too_much = allowed & (left + second_cost[columns] >= (room - first_cost[rows])[:, None])
    if too_much.any():
        left = np.where(too_much, NEVER, left)
        allowed = left < NEVER
        write(whole, rows, columns, left)
    kept_rows, kept_columns = np.asarray(allowed.any(axis=1)), np.asarray(allowed.any(axis=0))
    found = 0
    if not kept_rows.all():
        found, left, allowed, rows = LOST_FIRST, left[kept_rows], allowed[kept_rows], first[kept_rows]
        first[: len(rows)] = rows
        if len(rows) == 0:
            return found, 0, len(columns)
    if not kept_columns.all():
        found, left, allowed, columns = found + LOST_SECOND, left[:, kept_columns], allowed[:, kept_columns], second[kept_columns]
        second[: len(columns)] = columns
    least = left.min(axis=1)
    if least.any():
        found += MOVED_FIRST
        first_cost[rows] += least
        left = np.where(allowed, left - least[:, None], NEVER)
    least = left.min(axis=0)
    if least.any():
        found += MOVED_SECOND
        second_cost[columns] += least
        left = np.where(allowed, left - least, NEVER)
    if found & (MOVED_FIRST | MOVED_SECOND):
        write(whole, rows, columns, left)
    if not found & (LOST_FIRST | LOST_SECOND):
        found += 0 if left.any() else IS_ZERO
        found += FIRST_FOLLOWS if (allowed.sum(axis=0) == 1).all() else 0
        found += SECOND_FOLLOWS if (allowed.sum(axis=1) == 1).all() else 0
    return found, len(rows), len(columns)


@loop_or(plain_tighten_table)
def tighten_table(cells: Ints, first: Ints, second: Ints, first_cost: Ints, second_cost: Ints, room: int) -> tuple[int, int, int]:
    """Forbid pairs that leave no ``room``, drop choices that no pair allows, and move the least cost of each row, then of each column, to
    the costs; says what was found, and how many choices of each node are left, which are then the first in ``first`` and ``second``."""
    width, rows, columns = len(cells) // len(first_cost), 0, 0
    for i in range(len(first)):
        k, supported = first[i], False
        for j in range(len(second)):
            cost = cells[k * width + second[j]]
            if cost < NEVER:
                if cost + second_cost[second[j]] >= room - first_cost[k]:
                    cells[k * width + second[j]] = NEVER
                else:
                    supported = True
        if supported:
            first[rows] = k
            rows += 1
    found = LOST_FIRST if rows < len(first) else 0
    if rows == 0:
        return found, 0, len(second)
    alone_in_column, alone_in_row, moved = True, True, False
    for j in range(len(second)):
        allowed = 0
        for i in range(rows):
            allowed += cells[first[i] * width + second[j]] < NEVER
        if allowed > 0:
            second[columns] = second[j]
            columns += 1
            alone_in_column = alone_in_column and allowed == 1
    if columns < len(second):
        found += LOST_SECOND
    for i in range(rows):
        at, least, allowed = first[i] * width, NEVER, 0
        for j in range(columns):
            cost = cells[at + second[j]]
            allowed += cost < NEVER
            least = min(least, cost)
        alone_in_row = alone_in_row and allowed == 1
        if least > 0:
            moved = True
            first_cost[first[i]] += least
            for j in range(columns):
                if cells[at + second[j]] < NEVER:
                    cells[at + second[j]] -= least
    found += MOVED_FIRST if moved else 0
    moved, zero = False, True
    for j in range(columns):
        least = NEVER
        for i in range(rows):
            least = min(least, cells[first[i] * width + second[j]])
        if least > 0:
            moved = True
            second_cost[second[j]] += least
        for i in range(rows):
            if cells[first[i] * width + second[j]] < NEVER:
                cells[first[i] * width + second[j]] -= least
            zero = zero and cells[first[i] * width + second[j]] == 0
    found += MOVED_SECOND if moved else 0
    if not found & (LOST_FIRST | LOST_SECOND):
        found += IS_ZERO if zero else 0
        found += FIRST_FOLLOWS if alone_in_column else 0
        found += SECOND_FOLLOWS if alone_in_row else 0
    return found, rows, columns


def keep(net: Network, node: int, kept: NDArray[np.bool_]) -> Ints:
    """Of the remaining choices those that are kept; marks infeasibility."""
    left = choices(net, node)[kept]
    net.live[net.ptr[node] : net.ptr[node] + len(left)] = left
    net.live_count[node] = len(left)
    if len(left) == 0:
        net.scalars[INFEASIBLE] = 1
    return left


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


@kernel
def least_by_pair(net: Network, e: int, f: int, i: int, v: int, w: int, data: int, new: int) -> None:
    """Write the best choice of i given each of v and of w to ``log_data``, and what it costs to a table at ``new`` in the pool."""
    size, size_v, size_w = net.ptr[i + 1] - net.ptr[i], net.ptr[v + 1] - net.ptr[v], net.ptr[w + 1] - net.ptr[w]
    least_table(
        net.pool[net.at[e] : net.at[e] + size * size_v],
        net.eu[e] == i,
        net.pool[net.at[f] : net.at[f] + size * size_w],
        net.eu[f] == i,
        net.cost[net.ptr[i] : net.ptr[i + 1]],
        net.live[net.ptr[i] : net.ptr[i] + net.live_count[i]],
        net.live[net.ptr[v] : net.ptr[v] + net.live_count[v]],
        net.live[net.ptr[w] : net.ptr[w] + net.live_count[w]],
        net.log_data[data : data + size_v * size_w],
        net.pool[new : new + size_v * size_w],
    )


def plain_least_table(
    left: Ints, left_first: bool, right: Ints, right_first: bool, cost: Ints, own: Ints, rows: Ints, columns: Ints, best: Ints, least: Ints
) -> None:  # fmt: skip
    one = left.reshape(len(cost), -1) if left_first else left.reshape(-1, len(cost)).T
    other = right.reshape(len(cost), -1) if right_first else right.reshape(-1, len(cost)).T
    width = other.shape[1]
    one, other = sums(cost[own][:, None], rest(one, own, rows)), rest(other, own, columns)
    found = np.full((len(rows), len(columns)), NEVER, dtype=np.int64)
    chosen = np.full(found.shape, own[0], dtype=np.int64)
    for place, k in enumerate(own):
        total = sums(one[place][:, None], other[place])
        chosen[total < found] = k
        found = np.minimum(found, total)
    to = rows[:, None] * width + columns
    best[to], least[to] = chosen, found


@loop_or(plain_least_table)
def least_table(
    left: Ints, left_first: bool, right: Ints, right_first: bool, cost: Ints, own: Ints, rows: Ints, columns: Ints, best: Ints, least: Ints
) -> None:  # fmt: skip
    """For a node with two neighbours: its best choice for each of theirs, and what that costs.

    Args:
        left: its table with the neighbour of the ``rows``; ``left_first``: a row for each choice of its own.
        right: the same with that of the ``columns``.
        own: its choices that remain; ``rows`` and ``columns`` are the neighbours'.
        best, least: written to, a row for each choice of the first neighbour.
    """
    size, width = len(cost), len(right) // len(cost)
    step, across = (len(left) // size, 1) if left_first else (1, size)
    other_step, other_across = (width, 1) if right_first else (1, size)
    paid = np.empty(len(own), dtype=np.int64)
    for m in rows:
        for place in range(len(own)):
            k = own[place]
            cell = left[k * step + m * across]
            paid[place] = NEVER if cell >= NEVER or cost[k] >= NEVER else cell + cost[k]
        for x in columns:
            found, chosen = NEVER, own[0]
            for place in range(len(own)):
                cell = right[own[place] * other_step + x * other_across]
                if cell < NEVER and paid[place] < NEVER and paid[place] + cell < found:
                    found, chosen = paid[place] + cell, own[place]
            best[m * width + x] = chosen
            least[m * width + x] = found


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
