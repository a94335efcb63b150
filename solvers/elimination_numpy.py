"""Elimination sweeps in NumPy, for machines without compiled code: sets for the graph, broadcasting for the tables.

The sweep does what the kernel of its name in ``elimination`` does, but draws the nodes that it holds in another order.
"""

from __future__ import annotations

import heapq
import math
import random

import numpy as np
from numpy.typing import NDArray

from solvers.arrays import Floats, Ints
from solvers.desk import Desk
from solvers.pairs import Pairs

Factor = tuple[list[int], Floats]
"""Nodes and a table over their choices, in that order."""


def sweep(graph: Pairs, theta: Floats, choices: Ints, held: NDArray[np.uint8], jitter: Floats, largest: float, work: Desk) -> None:
    """See ``elimination.sweep``."""
    eliminate(graph, theta, choices, *plan(graph, held, jitter, largest))


def eliminate(graph: Pairs, theta: Floats, choices: Ints, order: list[int], scopes: list[list[int]]) -> None:
    """Replace the choices of the nodes in ``order`` by the best ones. What each node was summed of is kept, for the way back."""
    turn = {i: place for place, i in enumerate(order)}
    factors: dict[int, list[Factor]] = {i: [] for i in order}
    unary = {i: theta[graph.ptr[i] : graph.ptr[i + 1]].copy() for i in order}
    at, sizes, chosen = graph.at.tolist(), np.diff(graph.ptr).tolist(), choices.tolist()
    for e, (u, v) in enumerate(zip(graph.low.tolist(), graph.high.tolist(), strict=True)):
        if u in turn or v in turn:
            table = graph.table[at[e] : at[e + 1]].reshape(sizes[u], sizes[v])
            if u not in turn:
                unary[v] += table[chosen[u]]
            elif v not in turn:
                unary[u] += table[:, chosen[v]]
            else:
                factors[u if turn[u] < turn[v] else v].append(([u, v], table))
    left: list[list[Factor]] = []
    for i, scope in zip(order, scopes, strict=True):
        mine = [([i], unary[i]), *factors.pop(i)]
        left.append(mine)
        if not scope:
            continue
        least = _total(mine, [i, *scope], sizes).min(axis=0)
        if len(scope) == 1:
            unary[scope[0]] += least
        else:
            factors[min(scope, key=turn.__getitem__)].append((scope, least))
    for i, mine in zip(reversed(order), reversed(left), strict=True):
        rows = [table[tuple(slice(None) if s == i else chosen[s] for s in names)] for names, table in mine]
        chosen[i] = int(sum(rows[1:], rows[0]).argmin())
        choices[i] = chosen[i]


def _total(factors: list[Factor], members: list[int], sizes: list[int]) -> Floats:
    """The sum of factors over all choices of ``members``. The node that goes comes first: the least over it is then taken of whole tables
    at a time."""
    shape, total = tuple(sizes[s] for s in members), np.zeros(1)
    for number, (names, table) in enumerate(factors):
        spot = {s: axis for axis, s in enumerate(names)}
        spread = table.transpose([spot[s] for s in members if s in spot]).reshape([sizes[s] if s in spot else 1 for s in members])
        if number > 1 and total.shape == shape:
            total += spread
        else:
            total = total + spread if number else spread
    return np.broadcast_to(total, shape)


def plan(graph: Pairs, held: NDArray[np.uint8], jitter: Floats, largest: float) -> tuple[list[int], list[list[int]]]:
    """An order of elimination, and for each node in it the neighbours it then has; the others are held."""
    draws = random.Random(int(np.random.randint(2**31)))
    active = (held == 0).tolist()
    near: list[set[int]] = [set() for _ in active]
    for u, v in zip(graph.low.tolist(), graph.high.tolist(), strict=True):
        if active[u] and active[v]:
            near[u].add(v)
            near[v].add(u)
    size = np.log(np.diff(graph.ptr)).tolist()
    factor, limit = jitter.tolist(), math.log(largest)
    key = [size[i] + sum(map(size.__getitem__, near[i])) for i in range(len(near))]
    heap = [(key[i] * factor[i], i) for i in range(len(near)) if active[i]]
    heapq.heapify(heap)
    order, scopes = [], []
    while heap:
        priority, i = heapq.heappop(heap)
        if not active[i] or priority != key[i] * factor[i]:
            continue
        gone, fits = i, key[i] <= limit
        if not fits:
            close = [i, *sorted(near[i])]
            gone = draws.choices(close, [len(near[j]) + 1 for j in close])[0]
        scope = sorted(near[gone])
        active[gone] = False
        for j in scope:
            near[j].discard(gone)
        if fits:
            order.append(i)
            scopes.append(scope)
            for j in scope:
                near[j].update(scope)
                near[j].discard(j)
        for j in scope:
            key[j] = size[j] + sum(map(size.__getitem__, near[j]))
            heapq.heappush(heap, (key[j] * factor[j], j))
    kept = set(order)  # some of a scope were held after it was noted
    return order, [[s for s in scope if s in kept] for scope in scopes]
