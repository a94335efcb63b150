"""Message passing (TRW-S) on a core whose memory limits are priced: fast, good choices, and a bound that holds whatever the messages are.

With a price on each time's memory the limits leave the constraints and enter the node costs; what is left is a pairwise problem. The
messages move costs between nodes and edges without changing any answer's total, so the sum of the least entries is a lower bound for
every answer, and messages need no proof of convergence. ``certify`` computes that sum from scratch.
"""

from __future__ import annotations

import numpy as np

from solvers import messages_numpy as plain
from solvers.arrays import Floats, Ints
from solvers.compiled import kernel, kernel_or, loop_or
from solvers.pairs import FAR, Pairs


def no_messages(graph: Pairs) -> Floats:
    """Messages that move nothing."""
    sizes = np.diff(graph.ptr)
    return np.zeros(int(sizes[graph.low].sum() + sizes[graph.high].sum()))


@kernel
def smallest(values: Floats) -> float:
    """The least of some; a loop is compiled in a fraction of the time that NumPy's own takes."""
    least = values[0]
    for value in values:
        if value < least:
            least = value
    return float(least)


@kernel
def send(belief: Floats, back: Floats, share: float, table: Floats, out: Floats) -> float:
    """out[y] = min over x of share * belief[x] - back[x] + table[x, y], less its minimum, which is returned."""
    columns = len(out)
    for y in range(columns):
        out[y] = FAR
    for x in range(len(belief)):
        if belief[x] >= FAR / 2:
            continue  # forbidden: the difference of two far costs would look cheap
        base = share * belief[x] - back[x]
        for y in range(columns):
            total = base + table[x * columns + y]
            out[y] = total if total < out[y] else out[y]
    least = smallest(out)
    for y in range(columns):
        out[y] = min(out[y] - least, FAR)
    return least


@kernel
def collect(graph: Pairs, theta: Floats, messages: Floats, i: int, belief: Floats) -> None:
    """The node's costs and all messages to it."""
    size = len(belief)
    for k in range(size):
        belief[k] = theta[graph.ptr[i] + k]
    for place in range(graph.adj_ptr[i], graph.adj_ptr[i + 1]):
        e = graph.adj[place]
        at = graph.to_high[e] if place < graph.split[i] else graph.to_low[e]
        message = messages[at : at + size]
        for k in range(size):
            belief[k] += message[k]


@loop_or(plain.pass_both)
def pass_both(graph: Pairs, theta: Floats, messages: Floats, choices: Ints) -> float:
    """One pass from the last node to the first, and one back, which decodes a choice for each node on the way; returns the bound reached.

    A node's belief, less its minimum, pays in equal shares for the edges to nodes ahead; what the minima amount to is the bound.
    """
    nodes, bound, widest = len(graph.split), 0.0, 0
    for i in range(nodes):
        widest = max(widest, graph.ptr[i + 1] - graph.ptr[i])
    room, guess = np.empty(widest), np.empty(widest)
    for step in range(2 * nodes):
        forward, i = step >= nodes, step - nodes if step >= nodes else nodes - 1 - step
        size = graph.ptr[i + 1] - graph.ptr[i]
        belief = room[:size]
        collect(graph, theta, messages, i, belief)
        if forward:
            choices[i] = decode(graph, messages, choices, i, belief, guess)
        least = smallest(belief)
        for k in range(size):
            belief[k] -= least
        lower, middle, upper = graph.adj_ptr[i], graph.split[i], graph.adj_ptr[i + 1]
        share = 1.0 / max(1, middle - lower, upper - middle)
        sent = least
        for place in range(middle if forward else lower, upper if forward else middle):
            e = graph.adj[place]
            j = graph.high[e] if forward else graph.low[e]
            back, out = (graph.to_low[e], graph.to_high[e]) if forward else (graph.to_high[e], graph.to_low[e])
            table = graph.table if forward else graph.turned
            sent += send(
                belief,
                messages[back : back + size],
                share,
                table[graph.at[e] : graph.at[e + 1]],
                messages[out : out + graph.ptr[j + 1] - graph.ptr[j]],
            )
        bound += sent if forward else 0.0
    return bound


@kernel
def decode(graph: Pairs, messages: Floats, choices: Ints, i: int, belief: Floats, guess: Floats) -> int:
    """The best choice of node i by its belief, given those of lower nodes."""
    size, best = len(belief), 0
    for k in range(size):
        guess[k] = belief[k]
    for place in range(graph.adj_ptr[i], graph.split[i]):
        e = graph.adj[place]
        row, message = graph.at[e] + choices[graph.low[e]] * size, graph.to_high[e]
        for k in range(size):
            guess[k] += graph.table[row + k] - messages[message + k]
    for k in range(size):
        if guess[k] < guess[best]:
            best = k
    return best


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
        lowest = smallest(belief)
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
