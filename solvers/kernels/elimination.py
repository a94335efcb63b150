# cython: infer_types=True, annotation_typing=False, boundscheck=False, wraparound=False, initializedcheck=False, cdivision=True
"""Elimination sweeps: the exact best choices of nearly all nodes at once.

A sweep eliminates nodes while tables stay small, holds a few at their current choice where they would not, and reads the best choices
back. Which nodes are held is random, so that every sweep solves a different large neighbourhood exactly.
"""

from __future__ import annotations

from ..arrays import Bytes, Floats, Ints
from .constants import ACTIVE, FACTORS, GONE, HELD, MEMBERS
from .views import Graph, Workspace


def sweep(graph: Graph, theta: Floats, choices: Ints, count: int, work: Workspace) -> None:
    """Replace ``choices`` by the best ones of the ``count`` nodes in the order that ``plan_order`` has left in the workspace."""
    fill_tables(graph, theta, choices, count, work)
    for turn in range(count - 1, -1, -1):
        i, at = work.order[turn], 0
        for member in range(work.scope_ptr[turn], work.scope_ptr[turn + 1]):
            s = work.scope[member]
            if work.state[s] == GONE:
                at = at * (graph.ptr[s + 1] - graph.ptr[s]) + choices[s]
        choices[i] = work.best[work.table_at[i] + at]


def plan_order(graph: Graph, held: Bytes, jitter: Floats, points: Floats, largest: float, room: int, work: Workspace) -> int:
    """Choose an order of elimination and the nodes to hold; returns how many are eliminated. Scopes are the neighbours at elimination.

    Args:
        jitter: factors of the nodes' priorities.
        points: random numbers in [0, 1), one a node, that decide which nodes are held.
        largest: entries looked at for one node, at most.
        room: entries of all tables, at most.
    """
    nodes, waiting, used, scoped, count, draws = len(graph.split), 0, 0.0, 0, 0, 0
    for i in range(nodes):
        work.state[i] = HELD if held[i] else ACTIVE
    for i in range(nodes):
        work.near_count[i] = 0
        if work.state[i] == ACTIVE:
            for place in range(graph.adj_ptr[i], graph.adj_ptr[i + 1]):
                e = graph.adj[place]
                j = graph.low[e] if place < graph.split[i] else graph.high[e]
                if work.state[j] == ACTIVE:
                    work.near[work.near_ptr[i] + work.near_count[i]] = j
                    work.near_count[i] += 1
            work.key[i] = weight(graph, i, work)
            waiting = push(work, waiting, work.key[i] * jitter[i], i)
    work.scope_ptr[0] = 0
    while waiting > 0:
        priority, i = work.heap_key[0], work.heap_node[0]
        waiting = pop(work, waiting)
        if work.state[i] != ACTIVE or priority != work.key[i] * jitter[i]:
            continue
        begin, near, chosen = work.near_ptr[i], work.near_count[i], -1
        entries = work.entries[i]
        table = entries / (graph.ptr[i + 1] - graph.ptr[i])
        if used + 2.0 * table > room - 2.0 * largest or scoped + near > len(work.scope) or near > MEMBERS:
            chosen = i
        elif entries > largest:
            chosen = draw(i, points[draws], work)
            draws += 1
        else:
            for place in range(begin, begin + near):
                j = work.near[place]
                if work.near_count[j] + near - 2 > work.near_ptr[j + 1] - work.near_ptr[j]:
                    chosen = j
        if chosen >= 0:
            work.state[chosen] = HELD
            for place in range(work.near_ptr[chosen], work.near_ptr[chosen] + work.near_count[chosen]):
                j = work.near[place]
                forget(j, chosen, work)
                work.key[j] = weight(graph, j, work)
                waiting = push(work, waiting, work.key[j] * jitter[j], j)
            if chosen != i:
                waiting = push(work, waiting, work.key[i] * jitter[i], i)
            continue
        used += table
        work.state[i] = GONE
        work.order[count] = i
        work.position[i] = count
        for place in range(begin, begin + near):
            work.scope[scoped] = work.near[place]
            scoped += 1
            forget(work.near[place], i, work)
        count += 1
        work.scope_ptr[count] = scoped
        for place in range(begin, begin + near):
            for other in range(place + 1, begin + near):
                meet(work.near[place], work.near[other], work)
        for place in range(begin, begin + near):
            j = work.near[place]
            work.key[j] = weight(graph, j, work)
            waiting = push(work, waiting, work.key[j] * jitter[j], j)
    return count


def push(work: Workspace, waiting: int, key: float, node: int) -> int:
    """Add to the heap, which has no more than one place an edge and one a node: old entries go first. Returns its size."""
    if waiting == len(work.heap_node):
        return waiting
    at = waiting
    while at > 0:
        above = (at - 1) >> 1
        if work.heap_key[above] < key or (work.heap_key[above] == key and work.heap_node[above] <= node):
            break
        work.heap_key[at], work.heap_node[at] = work.heap_key[above], work.heap_node[above]
        at = above
    work.heap_key[at], work.heap_node[at] = key, node
    return waiting + 1


def pop(work: Workspace, waiting: int) -> int:
    """Take the first away; returns the heap's size."""
    last, at = waiting - 1, 0
    key, node = work.heap_key[last], work.heap_node[last]
    while True:
        below = 2 * at + 1
        if below >= last:
            break
        if below + 1 < last:
            one, other = work.heap_key[below], work.heap_key[below + 1]
            if other < one or (other == one and work.heap_node[below + 1] < work.heap_node[below]):
                below += 1
        if work.heap_key[below] > key or (work.heap_key[below] == key and work.heap_node[below] >= node):
            break
        work.heap_key[at], work.heap_node[at] = work.heap_key[below], work.heap_node[below]
        at = below
    work.heap_key[at], work.heap_node[at] = key, node
    return last


def weight(graph: Graph, i: int, work: Workspace) -> float:
    """Entries looked at when i is eliminated now, as a priority: the same order as the product of the sizes has."""
    total = 1.0 * (graph.ptr[i + 1] - graph.ptr[i])
    for place in range(work.near_ptr[i], work.near_ptr[i] + work.near_count[i]):
        j = work.near[place]
        total = min(total * (graph.ptr[j + 1] - graph.ptr[j]), 1e200)  # a node of many neighbours; no table is as large
    work.entries[i] = total
    return log2(total)


def log2(value: float) -> float:
    """About the logarithm: straight lines between the powers of 2, which keep the order."""
    power, left = 0.0, value
    while left >= 65536.0:
        left /= 65536.0
        power += 16.0
    while left >= 2.0:
        left /= 2.0
        power += 1.0
    return power + left - 1.0


def draw(i: int, point: float, work: Workspace) -> int:
    """A random node of i and its neighbours, likelier the more neighbours it has."""
    begin, near = work.near_ptr[i], work.near_count[i]
    total = near + 1.0
    for place in range(begin, begin + near):
        total += work.near_count[work.near[place]] + 1.0
    left = point * total - (near + 1.0)
    for place in range(begin, begin + near):
        if left < 0.0:
            break
        j = work.near[place]
        left -= work.near_count[j] + 1.0
        if left < 0.0:
            return j
    return i


def forget(j: int, i: int, work: Workspace) -> None:
    """Take i from j's neighbours."""
    begin, last = work.near_ptr[j], work.near_ptr[j] + work.near_count[j] - 1
    for place in range(begin, last + 1):
        if work.near[place] == i:
            work.near[place] = work.near[last]
            work.near_count[j] -= 1
            return


def meet(one: int, other: int, work: Workspace) -> None:
    """Make two nodes neighbours if they are not."""
    a = one if work.near_count[one] <= work.near_count[other] else other
    b = one + other - a
    for place in range(work.near_ptr[a], work.near_ptr[a] + work.near_count[a]):
        if work.near[place] == b:
            return
    work.near[work.near_ptr[a] + work.near_count[a]] = b
    work.near[work.near_ptr[b] + work.near_count[b]] = a
    work.near_count[a] += 1
    work.near_count[b] += 1


def fill_tables(graph: Graph, theta: Floats, choices: Ints, count: int, work: Workspace) -> None:
    """Least cost and best choice of each eliminated node for all choices of its scope, in order."""
    used = 0
    for i in range(len(graph.split)):
        work.bucket[i] = -1
    for turn in range(count):
        i = work.order[turn]
        size, rank, entries, factors = graph.ptr[i + 1] - graph.ptr[i], sort_scope(graph, turn, work), 1, 0
        for d in range(rank):
            entries *= work.ints[MEMBERS + d]
        work.table_at[i] = used
        free = used + entries
        for k in range(size):
            work.sums[k] = theta[graph.ptr[i] + k]
        for place in range(graph.adj_ptr[i], graph.adj_ptr[i + 1]):
            e, lower = graph.adj[place], place < graph.split[i]
            j = graph.low[e] if lower else graph.high[e]
            if work.state[j] == HELD:
                begin = graph.at[e] + choices[j] * size
                for k in range(size):
                    work.sums[k] += graph.table[begin + k] if lower else graph.turned[begin + k]
            elif work.position[j] > turn:
                wide = graph.ptr[j + 1] - graph.ptr[j]
                if free + wide * size > len(work.pool) or factors == FACTORS:
                    continue  # cannot happen: plan_order leaves this room
                for k in range(wide * size):
                    work.pool[free + k] = graph.table[graph.at[e] + k] if lower else graph.turned[graph.at[e] + k]
                work.level[FACTORS + factors] = free
                free += wide * size
                for d in range(rank):
                    work.stride[factors * MEMBERS + d] = 0
                    if work.ints[d] == j:
                        work.stride[factors * MEMBERS + d] = size
                        work.level[factors] = d
                factors += 1
        c = work.bucket[i]
        while c >= 0:
            if take_table(graph, c, rank, factors, work):
                factors += 1
            else:
                for k in range(size):
                    work.sums[k] += work.pool[work.table_at[c] + k]
            c = work.bucket_next[c]
        minimise(graph, size, rank, factors, used, work)
        used += entries
        if rank > 0:
            heir = work.ints[rank - 1]
            work.bucket_next[i] = work.bucket[heir]
            work.bucket[heir] = i


def take_table(graph: Graph, c: int, rank: int, factor: int, work: Workspace) -> bool:
    """Make the table of an eliminated node a factor; False where it has no node of the scope but the one that is eliminated now."""
    turn, step, level = work.position[c], 1, -1
    work.level[FACTORS + factor] = work.table_at[c]
    for d in range(rank):
        work.stride[factor * MEMBERS + d] = 0
    for member in range(work.scope_ptr[turn + 1] - 1, work.scope_ptr[turn] - 1, -1):
        s = work.scope[member]
        if work.state[s] == GONE:
            for d in range(rank):
                if work.ints[d] == s:
                    work.stride[factor * MEMBERS + d] = step
                    level = max(level, d)
            step *= graph.ptr[s + 1] - graph.ptr[s]
    work.level[factor] = level
    return level >= 0


def sort_scope(graph: Graph, turn: int, work: Workspace) -> int:
    """The scope's nodes that are eliminated themselves, the one whose turn comes first at the end, and their sizes; returns how many.

    They go to ``work.ints``, the sizes ``MEMBERS`` places behind; the scope itself is sorted too.
    """
    rank, begin, end = 0, work.scope_ptr[turn], work.scope_ptr[turn + 1]
    for place in range(begin + 1, end):
        s, at = work.scope[place], place
        spot = work.position[s] if work.state[s] == GONE else -1
        while at > begin:
            before = work.scope[at - 1]
            if (work.position[before] if work.state[before] == GONE else -1) >= spot:
                break
            work.scope[at] = before
            at -= 1
        work.scope[at] = s
    for place in range(begin, end):
        s = work.scope[place]
        if work.state[s] == GONE:
            work.ints[rank], work.ints[MEMBERS + rank] = s, graph.ptr[s + 1] - graph.ptr[s]
            rank += 1
    return rank


def minimise(graph: Graph, size: int, rank: int, factors: int, used: int, work: Workspace) -> None:
    """For all choices of the scope: the least sum over the node's own choices, which lie one after the other in every factor.

    Row d + 1 of ``sums`` holds what the choices of the first d + 1 members decide, so that only the last members' factors are added anew.
    """
    wide, index, level, out = len(graph.scratch) // 4, 2 * MEMBERS, 0, used
    for d in range(rank):
        work.ints[index + d] = 0
    while True:
        for d in range(level, rank):
            row = (d + 1) * wide
            for k in range(size):
                work.sums[row + k] = work.sums[row - wide + k]
            for f in range(factors):
                if work.level[f] == d:
                    at = work.level[FACTORS + f]
                    for other in range(d + 1):
                        at += work.ints[index + other] * work.stride[f * MEMBERS + other]
                    for k in range(size):
                        work.sums[row + k] += work.pool[at + k]
        row, choice = rank * wide, 0
        least = work.sums[row]
        for k in range(1, size):
            if work.sums[row + k] < least:
                least, choice = work.sums[row + k], k
        work.pool[out] = least
        work.best[out] = choice
        out += 1
        level = rank - 1
        while level >= 0:
            work.ints[index + level] += 1
            if work.ints[index + level] < work.ints[MEMBERS + level]:
                break
            work.ints[index + level] = 0
            level -= 1
        if level < 0:
            return
