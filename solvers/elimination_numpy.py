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
    """Replace the choices of the nodes in ``order`` by the best ones."""
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
    best = []
    for i, scope in zip(order, scopes, strict=True):
        members = [*scope, i]
        total = np.broadcast_to(unary[i], [sizes[s] for s in members]).copy()
        for names, table in factors.pop(i):
            spot = {s: axis for axis, s in enumerate(names)}
            kept = [s for s in members if s in spot]
            total += table.transpose([spot[s] for s in kept]).reshape([sizes[s] if s in spot else 1 for s in members])
        best.append(total.argmin(axis=-1).astype(np.int16))
        if len(scope) == 1:
            unary[scope[0]] += total.min(axis=-1)
        elif scope:
            factors[min(scope, key=turn.__getitem__)].append((scope, total.min(axis=-1)))
    for i, scope, table in zip(reversed(order), reversed(scopes), reversed(best), strict=True):
        chosen[i] = int(table[tuple(chosen[s] for s in scope)])
        choices[i] = chosen[i]


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
