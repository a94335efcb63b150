"""What a bound and an answer together rule out: choices and pairs that would cost as much as the answer or more.

The messages' certificate is a sum of least entries, so forcing one choice adds what its own entries lie above the least. The smaller
problem keeps every better answer; its exact solution closes the gap that prices leave.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from solvers.arrays import Floats, Ints, offsets
from solvers.compiled import kernel_or
from solvers.messages import collect
from solvers.messages_numpy import beliefs
from solvers.network import NEVER
from solvers.pairs import FAR, Pairs
from solvers.problem import INFINITE, Problem
from solvers.reduction import Core


@dataclass(frozen=True, eq=False)
class Shrunk:
    """A core's remaining choices as a problem of its own; its last node is a ballast that stands for memory already spoken for."""

    problem: Problem
    kept: Ints
    node_ptr: Ints
    core: Core

    def expand(self, choices: Ints) -> Ints:
        """Choices of the core's problem from those of this one."""
        picked = self.kept[self.node_ptr[:-1] + choices[:-1]]
        return self.core.expand(picked - self.core.node_ptr[:-1])

    def restrict(self, choices: Ints) -> Ints:
        """The way back, with -1 where a choice is gone."""
        inside = self.core.restrict(choices)
        flat = self.core.node_ptr[:-1] + inside
        place = np.searchsorted(self.kept, flat)
        here = (inside >= 0) & (place < len(self.kept)) & (self.kept[np.minimum(place, len(self.kept) - 1)] == flat)
        return np.append(np.where(here, place - self.node_ptr[:-1], -1), 0)


def slacks(graph: Pairs, theta: Floats, messages: Floats) -> tuple[Floats, Floats]:
    """By how much the certified bound rises when a choice is forced, shape [C], and when a pair is, laid out as ``graph.table``."""
    choice, pair = np.zeros(len(theta)), np.empty(len(graph.table))
    fill_slacks(graph, theta, messages, choice, pair)
    return choice, pair


def shrink(core: Core, graph: Pairs, choice: Floats, pair: Floats, room: float) -> Shrunk | None:
    """The problem of choices and pairs whose forcing raises the bound by less than ``room``; None when nothing can be said."""
    finite = core.edge_costs[core.edge_costs < NEVER]
    if max(int(finite.max(initial=0)), int(core.costs.max(initial=0))) >= INFINITE:
        return None
    kept = np.flatnonzero(choice < room)
    owner = np.repeat(np.arange(core.num_nodes), np.diff(core.node_ptr))
    counts = np.bincount(owner[kept], minlength=core.num_nodes).astype(np.int64)
    if (counts == 0).any():
        return None
    mask = np.zeros(len(core.costs), dtype=np.bool_)
    mask[kept] = True
    node_ptr = offsets(counts)
    edge_ptr = offsets(counts[graph.low] * counts[graph.high])
    tables = np.empty(edge_ptr[-1], dtype=np.int64)
    cut_tables(graph, mask, pair, room, edge_ptr, tables)
    item_counts = np.diff(core.item_ptr)[kept]
    item_ptr = offsets(item_counts)
    items = np.repeat(core.item_ptr[:-1][kept] - item_ptr[:-1], item_counts) + np.arange(item_ptr[-1])
    limit = int(core.capacity.max(initial=0)) if len(core.capacity) else None
    ballast = np.flatnonzero(core.capacity < (limit or 0))
    problem = Problem(
        name="",
        node_ptr=np.append(node_ptr, node_ptr[-1] + 1),
        costs=np.append(core.costs[kept], 0),
        edges=np.stack([graph.low, graph.high], axis=1),
        edge_ptr=edge_ptr,
        edge_costs=tables,
        item_ptr=np.append(item_ptr, item_ptr[-1] + len(ballast)),
        item_begin=np.concatenate([core.item_begin[items], ballast]),
        item_end=np.concatenate([core.item_end[items], ballast + 1]),
        item_usage=np.concatenate([core.item_usage[items], (limit or 0) - core.capacity[ballast]]),
        limit=limit,
    )
    return Shrunk(problem, kept, node_ptr, core)


def plain_fill_slacks(graph: Pairs, theta: Floats, messages: Floats, choice: Floats, pair: Floats) -> None:
    belief, sizes = beliefs(graph, theta, messages), np.diff(graph.ptr)
    over = belief - np.repeat(np.minimum.reduceat(belief, graph.ptr[:-1]), sizes)
    forward = graph.adj_ptr[1:] - graph.split
    pays = np.repeat(forward, sizes)
    far = belief >= FAR / 2
    choice += np.where((pays == 0) | far, over, 0.0)
    share = over / np.maximum(pays, 1)
    for e, (i, j) in enumerate(zip(graph.low.tolist(), graph.high.tolist(), strict=True)):
        mine, other = slice(graph.ptr[i], graph.ptr[i + 1]), slice(graph.ptr[j], graph.ptr[j + 1])
        table, found = block(graph, graph.table, e), block(graph, pair, e)
        paid = share[mine] - messages[graph.to_low[e] : graph.to_low[e] + sizes[i]]
        found[:] = table - messages[graph.to_high[e] : graph.to_high[e] + sizes[j]] + paid[:, None]
        found[(table >= FAR / 2) | far[mine, None]] = FAR
        rows, columns = np.minimum(found.min(axis=1), FAR), np.minimum(found.min(axis=0), FAR)
        least = rows.min()
        choice[mine] += rows - least
        choice[other] += columns - least
        found += np.where(found < FAR / 2, (least - rows)[:, None] - columns, 0.0)
    for e, (i, j) in enumerate(zip(graph.low.tolist(), graph.high.tolist(), strict=True)):
        found = block(graph, pair, e)
        found += choice[graph.ptr[i] : graph.ptr[i + 1], None] + choice[graph.ptr[j] : graph.ptr[j + 1]]


def block(graph: Pairs, values: Floats, e: int) -> Floats:
    """What lies in ``graph.table``'s layout for edge e, a row for each choice of its lower node; a view."""
    size, wide = (graph.ptr[end + 1] - graph.ptr[end] for end in (graph.low[e], graph.high[e]))
    shaped: Floats = values[graph.at[e] : graph.at[e] + size * wide].reshape(size, wide)
    return shaped


@kernel_or(plain_fill_slacks)
def fill_slacks(graph: Pairs, theta: Floats, messages: Floats, choice: Floats, pair: Floats) -> None:
    """As ``certify`` counts: a node's belief above its least pays in equal shares for its edges to higher nodes."""
    widest = 0
    for i in range(len(graph.split)):
        widest = max(widest, graph.ptr[i + 1] - graph.ptr[i])
    room, rows, columns = np.empty(widest), np.empty(widest), np.empty(widest)
    for i in range(len(graph.split)):
        begin, size = graph.ptr[i], graph.ptr[i + 1] - graph.ptr[i]
        belief = room[:size]
        collect(graph, theta, messages, i, belief)
        lowest = belief.min()
        forward = graph.adj_ptr[i + 1] - graph.split[i]
        for k in range(size):
            if forward == 0 or belief[k] >= FAR / 2:
                choice[begin + k] += belief[k] - lowest
        for place in range(graph.split[i], graph.adj_ptr[i + 1]):
            e = graph.adj[place]
            j = graph.high[e]
            other, wide = graph.ptr[j], graph.ptr[j + 1] - graph.ptr[j]
            least = np.inf
            columns[:wide] = FAR
            for x in range(size):
                rows[x] = FAR
                paid = (belief[x] - lowest) / forward - messages[graph.to_low[e] + x]
                for y in range(wide):
                    at = graph.at[e] + x * wide + y
                    pair[at] = graph.table[at] - messages[graph.to_high[e] + y] + paid
                    if graph.table[at] >= FAR / 2 or belief[x] >= FAR / 2:
                        pair[at] = FAR
                    rows[x] = min(rows[x], pair[at])
                    columns[y] = min(columns[y], pair[at])
                least = min(least, rows[x])
            for x in range(size):
                choice[begin + x] += rows[x] - least
            for y in range(wide):
                choice[other + y] += columns[y] - least
            for x in range(size):
                for y in range(wide):
                    if pair[graph.at[e] + x * wide + y] < FAR / 2:
                        pair[graph.at[e] + x * wide + y] += least - rows[x] - columns[y]
    for e in range(len(graph.low)):
        u, v = graph.ptr[graph.low[e]], graph.ptr[graph.high[e]]
        size, wide = graph.ptr[graph.low[e] + 1] - u, graph.ptr[graph.high[e] + 1] - v
        for x in range(size):
            for y in range(wide):
                pair[graph.at[e] + x * wide + y] += choice[u + x] + choice[v + y]


def plain_cut_tables(graph: Pairs, mask: NDArray[np.bool_], pair: Floats, room: float, edge_ptr: Ints, tables: Ints) -> None:
    for e, (i, j) in enumerate(zip(graph.low.tolist(), graph.high.tolist(), strict=True)):
        kept = np.ix_(mask[graph.ptr[i] : graph.ptr[i + 1]], mask[graph.ptr[j] : graph.ptr[j + 1]])
        cost, slack = block(graph, graph.table, e)[kept], block(graph, pair, e)[kept]
        found = np.where(slack >= room, INFINITE, np.minimum(cost, INFINITE).astype(np.int64))
        tables[edge_ptr[e] : edge_ptr[e + 1]] = found.reshape(-1)


@kernel_or(plain_cut_tables)
def cut_tables(graph: Pairs, mask: NDArray[np.bool_], pair: Floats, room: float, edge_ptr: Ints, tables: Ints) -> None:
    """The tables of kept choices, pairs without room forbidden."""
    for e in range(len(graph.low)):
        u, v = graph.ptr[graph.low[e]], graph.ptr[graph.high[e]]
        size, wide = graph.ptr[graph.low[e] + 1] - u, graph.ptr[graph.high[e] + 1] - v
        to = edge_ptr[e]
        for x in range(size):
            if mask[u + x]:
                for y in range(wide):
                    if mask[v + y]:
                        at = graph.at[e] + x * wide + y
                        tables[to] = INFINITE if pair[at] >= room or graph.table[at] >= INFINITE else np.int64(graph.table[at])
                        to += 1
