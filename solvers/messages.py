"""Message passing (TRW-S) on a core whose memory limits are priced: fast, good choices, and a bound that holds whatever the messages are.

With a price on each time's memory the limits leave the constraints and enter the node costs; what is left is a pairwise problem. The
messages move costs between nodes and edges without changing any answer's total, so the sum of the least entries is a lower bound for
every answer, and messages need no proof of convergence. ``certify`` computes that sum from scratch.
"""

from __future__ import annotations

import numpy as np

from solvers import messages_numpy as plain
from solvers.arrays import Ints
from solvers.compiled import kernel, kernel_or
from solvers.pairs import FAR, Floats, Pairs


def no_messages(graph: Pairs) -> Floats:
    """Messages that move nothing."""
    sizes = np.diff(graph.ptr)
    return np.zeros(int(sizes[graph.low].sum() + sizes[graph.high].sum()))


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


@kernel_or(plain.pass_forward)
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


@kernel_or(plain.pass_backward)
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


@kernel_or(plain.certify)
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


@kernel_or(plain.priced)
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
