"""Message passing (TRW-S) on a core whose memory limits are priced: fast, good choices, and a bound that holds whatever the messages are.

With a price on each time's memory the limits leave the constraints and enter the node costs; what is left is a pairwise problem. The
messages move costs between nodes and edges without changing any answer's total, so the sum of the least entries is a lower bound for
every answer, and messages need no proof of convergence. ``certify`` computes that sum from scratch.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from solvers.compiled import kernel
from solvers.network import NEVER
from solvers.problem import Ints, offsets
from solvers.reduction import Core

Floats = NDArray[np.float64]

FAR = 1e25
"""A forbidden cost among floats: far above every sum of costs, and small enough that adding costs to it stays exact in effect."""


class Pairs(NamedTuple):
    """The pairwise part of a core in floats. Edges have ``low < high``; ``table`` is laid out (low, high), ``turned`` (high, low)."""

    ptr: Ints  # [n + 1] choices of each node
    low: Ints  # [E]
    high: Ints  # [E]
    at: Ints  # [E + 1] tables
    table: Floats
    turned: Floats
    adj_ptr: Ints  # [n + 1] edges of each node, those to lower nodes first
    adj: Ints  # [2 E]
    split: Ints  # [n] where in adj the edges to higher nodes begin
    to_low: Ints  # [E] where the message to the lower node begins
    to_high: Ints  # [E]


def pairs(core: Core) -> Pairs:
    """The core's nodes and edges for message passing."""
    sizes = np.diff(core.node_ptr)
    u, v = core.edges[:, 0], core.edges[:, 1]
    low, high = np.minimum(u, v), np.maximum(u, v)
    costs = np.where(core.edge_costs >= NEVER, FAR, core.edge_costs.astype(np.float64))
    straight, turned = np.empty_like(costs), np.empty_like(costs)
    lay_out(costs, core.edge_ptr, sizes[u], sizes[v], u < v, straight, turned)
    ends = np.concatenate([low, high])
    other = np.concatenate([high, low])
    edge = np.tile(np.arange(len(low)), 2)
    order = np.lexsort((edge, other, ends))
    adj_ptr = offsets(np.bincount(ends, minlength=len(sizes)).astype(np.int64))
    split = adj_ptr[:-1] + np.bincount(high, minlength=len(sizes))
    lengths = np.stack([sizes[low], sizes[high]], axis=1).reshape(-1)
    places = offsets(lengths)
    return Pairs(
        core.node_ptr, low, high, core.edge_ptr, straight, turned, adj_ptr, edge[order], split, places[:-1:2].copy(), places[1:-1:2].copy()
    )


def no_messages(graph: Pairs) -> Floats:
    """Messages that move nothing."""
    sizes = np.diff(graph.ptr)
    return np.zeros(int(sizes[graph.low].sum() + sizes[graph.high].sum()))


@kernel
def lay_out(costs: Floats, at: Ints, rows: Ints, columns: Ints, keep: NDArray[np.bool_], straight: Floats, turned: Floats) -> None:
    """Each table as (low, high) and as (high, low)."""
    for e in range(len(rows)):
        for k in range(rows[e]):
            for m in range(columns[e]):
                cost = costs[at[e] + k * columns[e] + m]
                other = at[e] + m * rows[e] + k
                if keep[e]:
                    straight[at[e] + k * columns[e] + m] = cost
                    turned[other] = cost
                else:
                    straight[other] = cost
                    turned[at[e] + k * columns[e] + m] = cost


@kernel
def send(belief: Floats, back: Floats, share: float, table: Floats, out: Floats) -> float:
    """out[y] = min over x of share * belief[x] - back[x] + table[x, y], less its minimum, which is returned."""
    out[:] = FAR
    rows = table.reshape(len(belief), len(out))
    for x in range(len(belief)):
        if belief[x] >= FAR / 2:
            continue  # forbidden: the difference of two far costs would look cheap
        base = share * belief[x] - back[x]
        for y in range(len(out)):
            total = base + rows[x, y]
            out[y] = total if total < out[y] else out[y]
    least = out.min()
    for y in range(len(out)):
        out[y] = min(out[y] - least, FAR)
    return float(least)


@kernel
def collect(graph: Pairs, theta: Floats, messages: Floats, i: int, belief: Floats) -> None:
    """The node's costs and all messages to it."""
    belief[:] = theta[graph.ptr[i] : graph.ptr[i + 1]]
    size = len(belief)
    for place in range(graph.adj_ptr[i], graph.adj_ptr[i + 1]):
        e = graph.adj[place]
        at = graph.to_high[e] if place < graph.split[i] else graph.to_low[e]
        message = messages[at : at + size]
        for k in range(size):
            belief[k] += message[k]


@kernel
def pass_forward(graph: Pairs, theta: Floats, messages: Floats, choices: Ints) -> float:
    """One pass from the first node to the last; decodes a choice for each node on the way and returns the bound reached.

    A node's belief, less its minimum, pays in equal shares for the edges to higher nodes; what the minima amount to is the bound.
    """
    bound = 0.0
    widest = 0
    for i in range(len(graph.split)):
        widest = max(widest, graph.ptr[i + 1] - graph.ptr[i])
    room, guess_room = np.empty(widest), np.empty(widest)
    for i in range(len(graph.split)):
        size = graph.ptr[i + 1] - graph.ptr[i]
        belief, guess = room[:size], guess_room[:size]
        collect(graph, theta, messages, i, belief)
        guess[:] = belief
        for place in range(graph.adj_ptr[i], graph.split[i]):
            e = graph.adj[place]
            message = messages[graph.to_high[e] : graph.to_high[e] + size]
            begin = graph.at[e] + choices[graph.low[e]] * size
            row = graph.table[begin : begin + size]
            for k in range(size):
                guess[k] += row[k] - message[k]
        choices[i] = np.argmin(guess)
        least = belief.min()
        bound += least
        for k in range(size):
            belief[k] -= least
        share = 1.0 / max(1, graph.split[i] - graph.adj_ptr[i], graph.adj_ptr[i + 1] - graph.split[i])
        for place in range(graph.split[i], graph.adj_ptr[i + 1]):
            e = graph.adj[place]
            j = graph.high[e]
            wide = graph.ptr[j + 1] - graph.ptr[j]
            bound += send(
                belief,
                messages[graph.to_low[e] : graph.to_low[e] + size],
                share,
                graph.table[graph.at[e] : graph.at[e + 1]],
                messages[graph.to_high[e] : graph.to_high[e] + wide],
            )
    return bound


@kernel
def pass_backward(graph: Pairs, theta: Floats, messages: Floats) -> None:
    """One pass from the last node to the first."""
    widest = 0
    for i in range(len(graph.split)):
        widest = max(widest, graph.ptr[i + 1] - graph.ptr[i])
    room = np.empty(widest)
    for i in range(len(graph.split) - 1, -1, -1):
        size = graph.ptr[i + 1] - graph.ptr[i]
        belief = room[:size]
        collect(graph, theta, messages, i, belief)
        least = belief.min()
        for k in range(size):
            belief[k] -= least
        share = 1.0 / max(1, graph.split[i] - graph.adj_ptr[i], graph.adj_ptr[i + 1] - graph.split[i])
        for place in range(graph.adj_ptr[i], graph.split[i]):
            e = graph.adj[place]
            j = graph.low[e]
            wide = graph.ptr[j + 1] - graph.ptr[j]
            send(
                belief,
                messages[graph.to_high[e] : graph.to_high[e] + size],
                share,
                graph.turned[graph.at[e] : graph.at[e + 1]],
                messages[graph.to_low[e] : graph.to_low[e] + wide],
            )


@kernel
def certify(graph: Pairs, theta: Floats, messages: Floats) -> float:
    """The bound that any messages prove: least beliefs, and least entries of tables to which the lower node's belief pays its share."""
    total = 0.0
    widest = 0
    for i in range(len(graph.split)):
        widest = max(widest, graph.ptr[i + 1] - graph.ptr[i])
    room = np.empty(widest)
    for i in range(len(graph.split)):
        size = graph.ptr[i + 1] - graph.ptr[i]
        belief = room[:size]
        collect(graph, theta, messages, i, belief)
        lowest = belief.min()
        total += lowest
        share = 1.0 / max(1, graph.adj_ptr[i + 1] - graph.split[i])
        for place in range(graph.split[i], graph.adj_ptr[i + 1]):
            e = graph.adj[place]
            columns = graph.ptr[graph.high[e] + 1] - graph.ptr[graph.high[e]]
            least = np.inf
            for x in range(size):
                row = np.inf
                if belief[x] >= FAR / 2:
                    continue
                for y in range(columns):
                    cost = graph.table[graph.at[e] + x * columns + y]
                    if cost < FAR / 2:
                        row = min(row, cost - messages[graph.to_high[e] + y])
                least = min(least, row + share * (belief[x] - lowest) - messages[graph.to_low[e] + x])
            total += min(least, FAR)
    return total


@kernel
def priced(costs: Floats, item_ptr: Ints, begin: Ints, end: Ints, usage: Floats, prices: Floats, theta: Floats) -> None:
    """theta = costs + what each choice's items pay."""
    paid = np.zeros(len(prices) + 1)
    for t in range(len(prices)):
        paid[t + 1] = paid[t] + prices[t]
    for c in range(len(costs)):
        total = costs[c]
        for item in range(item_ptr[c], item_ptr[c + 1]):
            total += usage[item] * (paid[end[item]] - paid[begin[item]])
        theta[c] = total


@kernel
def use(ptr: Ints, item_ptr: Ints, begin: Ints, end: Ints, usage: Floats, choices: Ints, used: Floats) -> None:
    """Usage at each time."""
    used[:] = 0.0
    for i in range(len(choices)):
        c = ptr[i] + choices[i]
        for item in range(item_ptr[c], item_ptr[c + 1]):
            used[begin[item]] += usage[item]
            if end[item] < len(used):
                used[end[item]] -= usage[item]
    for t in range(1, len(used)):
        used[t] += used[t - 1]
