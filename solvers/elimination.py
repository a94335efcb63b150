"""Exact best choices of nearly all nodes at once: eliminate nodes while tables stay small, hold a few at their current choice where
they would not, and read the best choices back.

Which nodes are held is random, so that every sweep solves a different large neighbourhood exactly. The prices of memory are part of
the node costs; the hard limits are the caller's business.
"""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

from solvers.arrays import Floats, Ints
from solvers.compiled import kernel, kernel_or
from solvers.desk import Desk
from solvers.elimination_numpy import sweep as sweep_in_numpy
from solvers.pairs import Pairs

ACTIVE, GONE, HELD = range(3)


@kernel_or(sweep_in_numpy)
def sweep(graph: Pairs, theta: Floats, choices: Ints, held: NDArray[np.uint8], jitter: Floats, largest: float, work: Desk) -> None:
    """Replace ``choices`` by the best ones of all nodes but those held: the given ones and those the order of elimination needs.

    No table has more than ``largest`` entries; ``jitter`` scales each node's priority. Uses numpy's random state of the thread.
    """
    count = plan_order(graph, held, jitter, largest, work)
    fill_tables(graph, theta, choices, count, work)
    for place in range(count - 1, -1, -1):
        i = work.order[place]
        at = 0
        for member in range(work.scope_ptr[place], work.scope_ptr[place + 1]):
            s = work.scope[member]
            if work.state[s] == GONE:
                at = at * (graph.ptr[s + 1] - graph.ptr[s]) + choices[s]
        choices[i] = work.best[work.table_at[i] + at]


@kernel
def plan_order(graph: Pairs, held: NDArray[np.uint8], jitter: Floats, largest: float, work: Desk) -> int:
    """Choose an order of elimination and the nodes to hold; scopes are the neighbours at elimination."""
    nodes = len(graph.split)
    heap = [(0.0, 0)]
    heap.clear()
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
            heap.append((work.key[i] * jitter[i], i))
    heapq.heapify(heap)
    limit, used, scoped, count = np.log(largest), 0.0, 0, 0
    work.scope_ptr[0] = 0
    while len(heap) > 0:
        priority, i = heapq.heappop(heap)
        if work.state[i] != ACTIVE or priority != work.key[i] * jitter[i]:
            continue
        begin, near = work.near_ptr[i], work.near_count[i]
        table = np.exp(work.key[i] - np.log(graph.ptr[i + 1] - graph.ptr[i]))
        chosen = -1
        if used + 2.0 * table > len(work.pool) - 2.0 * largest or scoped + near > len(work.scope):
            chosen = i
        elif work.key[i] > limit:
            chosen = draw(graph, i, work)
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
                heapq.heappush(heap, (work.key[j] * jitter[j], j))
            if chosen != i and work.state[i] == ACTIVE:
                heapq.heappush(heap, (work.key[i] * jitter[i], i))
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
            heapq.heappush(heap, (work.key[j] * jitter[j], j))
    return count


@kernel
def weight(graph: Pairs, i: int, work: Desk) -> float:
    """Logarithm of the entries looked at when i is eliminated now."""
    total = np.log(graph.ptr[i + 1] - graph.ptr[i])
    for place in range(work.near_ptr[i], work.near_ptr[i] + work.near_count[i]):
        j = work.near[place]
        total += np.log(graph.ptr[j + 1] - graph.ptr[j])
    return float(total)


@kernel
def draw(graph: Pairs, i: int, work: Desk) -> int:
    """A random node of i and its neighbours, likelier the more neighbours it has."""
    begin, near = work.near_ptr[i], work.near_count[i]
    total = near + 1.0
    for place in range(begin, begin + near):
        total += work.near_count[work.near[place]] + 1.0
    point = np.random.random() * total - (near + 1.0)
    for place in range(begin, begin + near):
        if point < 0.0:
            break
        j = work.near[place]
        point -= work.near_count[j] + 1.0
        if point < 0.0:
            return int(j)
    return i


@kernel
def forget(j: int, i: int, work: Desk) -> None:
    """Take i from j's neighbours."""
    begin, last = work.near_ptr[j], work.near_ptr[j] + work.near_count[j] - 1
    for place in range(begin, last + 1):
        if work.near[place] == i:
            work.near[place] = work.near[last]
            work.near_count[j] -= 1
            return


@kernel
def meet(a: int, b: int, work: Desk) -> None:
    """Make a and b neighbours if they are not."""
    if work.near_count[a] > work.near_count[b]:
        a, b = b, a
    for place in range(work.near_ptr[a], work.near_ptr[a] + work.near_count[a]):
        if work.near[place] == b:
            return
    work.near[work.near_ptr[a] + work.near_count[a]] = b
    work.near[work.near_ptr[b] + work.near_count[b]] = a
    work.near_count[a] += 1
    work.near_count[b] += 1


@kernel
def fill_tables(graph: Pairs, theta: Floats, choices: Ints, count: int, work: Desk) -> None:
    """Least cost and best choice of each eliminated node for all choices of its scope, in order."""
    widest = 0
    for i in range(len(graph.split)):
        work.bucket[i] = -1
        widest = max(widest, graph.ptr[i + 1] - graph.ptr[i])
    used = 0
    sums = np.empty((66, widest))
    factor_at, factor_level = np.empty(4096, dtype=np.int64), np.empty(4096, dtype=np.int64)
    stride = np.zeros((4096, 64), dtype=np.int64)
    members, sizes, index = np.empty(64, dtype=np.int64), np.empty(64, dtype=np.int64), np.empty(64, dtype=np.int64)
    for turn in range(count):
        i = work.order[turn]
        size = graph.ptr[i + 1] - graph.ptr[i]
        rank = sort_scope(graph, turn, members, sizes, work)
        entries = 1
        for d in range(rank):
            entries *= sizes[d]
        work.table_at[i] = used
        free = used + entries
        for k in range(size):
            sums[0, k] = theta[graph.ptr[i] + k]
        factors = 0
        for place in range(graph.adj_ptr[i], graph.adj_ptr[i + 1]):
            e = graph.adj[place]
            lower = place < graph.split[i]
            j = graph.low[e] if lower else graph.high[e]
            source = graph.table if lower else graph.turned
            if work.state[j] == HELD:
                begin = graph.at[e] + choices[j] * size
                for k in range(size):
                    sums[0, k] += source[begin + k]
            elif work.position[j] > turn:
                wide = graph.ptr[j + 1] - graph.ptr[j]
                if free + wide * size > len(work.pool):
                    continue  # cannot happen: plan_order leaves this room
                for k in range(wide * size):
                    work.pool[free + k] = source[graph.at[e] + k]
                factor_at[factors] = free
                free += wide * size
                for d in range(rank):
                    stride[factors, d] = size if members[d] == j else 0
                    if members[d] == j:
                        factor_level[factors] = d
                factors += 1
        c = work.bucket[i]
        while c >= 0:
            factor_at[factors] = work.table_at[c]
            factor_level[factors] = -1
            for d in range(rank):
                stride[factors, d] = 0
            step = 1
            place = work.position[c]
            for member in range(work.scope_ptr[place + 1] - 1, work.scope_ptr[place] - 1, -1):
                s = work.scope[member]
                if work.state[s] == GONE:
                    for d in range(rank):
                        if members[d] == s:
                            stride[factors, d] = step
                            factor_level[factors] = max(factor_level[factors], d)
                    step *= graph.ptr[s + 1] - graph.ptr[s]
            if factor_level[factors] < 0:
                for k in range(size):
                    sums[0, k] += work.pool[factor_at[factors] + k]
            else:
                factors += 1
            c = work.bucket_next[c]
        minimise(size, rank, sizes, index, factors, factor_at, factor_level, stride, sums, used, work)
        used += entries
        if rank > 0:
            heir = members[rank - 1]
            work.bucket_next[i] = work.bucket[heir]
            work.bucket[heir] = i


@kernel
def sort_scope(graph: Pairs, turn: int, members: Ints, sizes: Ints, work: Desk) -> int:
    """The scope's nodes that are eliminated themselves, the one whose turn comes first at the end; also in place in the desk."""
    rank = 0
    begin, end = work.scope_ptr[turn], work.scope_ptr[turn + 1]
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
            members[rank], sizes[rank] = s, graph.ptr[s + 1] - graph.ptr[s]
            rank += 1
    return rank


@kernel
def minimise(
    size: int,
    rank: int,
    sizes: Ints,
    index: Ints,
    factors: int,
    factor_at: Ints,
    factor_level: Ints,
    stride: Ints,
    sums: Floats,
    out: int,
    work: Desk,
) -> None:
    """For all choices of the scope: the least sum over the node's own choices, which lie one after the other in every factor.

    ``sums[d + 1]`` holds what the choices of the first d + 1 members decide, so that only the last members' factors are added anew.
    """
    for d in range(rank):
        index[d] = 0
    level = 0
    while True:
        for d in range(level, rank):
            for k in range(size):
                sums[d + 1, k] = sums[d, k]
            for f in range(factors):
                if factor_level[f] == d:
                    at = factor_at[f]
                    for other in range(d + 1):
                        at += index[other] * stride[f, other]
                    for k in range(size):
                        sums[d + 1, k] += work.pool[at + k]
        least, choice = sums[rank, 0], 0
        for k in range(1, size):
            if sums[rank, k] < least:
                least, choice = sums[rank, k], k
        work.pool[out] = least
        work.best[out] = choice
        out += 1
        level = rank - 1
        while level >= 0:
            index[level] += 1
            if index[level] < sizes[level]:
                break
            index[level] = 0
            level -= 1
        if level < 0:
            return
