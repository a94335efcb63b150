# cython: infer_types=True, annotation_typing=False, boundscheck=False, wraparound=False, initializedcheck=False, cdivision=True
"""Message passing (TRW-S) on a graph whose memory limits are priced: fast, good choices, and a bound that holds whatever the messages are.

With a price on each time's memory the limits leave the constraints and enter the node costs; what is left is a pairwise problem. The
messages move costs between nodes and edges without changing any answer's total, so the sum of the least entries is a lower bound for
every answer, and messages need no proof of convergence. ``certify`` computes that sum from scratch.
"""

from __future__ import annotations

from ..arrays import Floats, Ints
from .constants import FAR
from .views import Graph


def smallest(values: Floats, count: int) -> float:
    """The least of the first so many."""
    least = values[0]
    for k in range(1, count):
        if values[k] < least:
            least = values[k]
    return least


def collect(graph: Graph, theta: Floats, messages: Floats, i: int) -> int:
    """Write the node's costs and all messages to it to the scratch; returns the number of its choices."""
    begin, size = graph.ptr[i], graph.ptr[i + 1] - graph.ptr[i]
    for k in range(size):
        graph.scratch[k] = theta[begin + k]
    for place in range(graph.adj_ptr[i], graph.adj_ptr[i + 1]):
        e = graph.adj[place]
        at = graph.to_high[e] if place < graph.split[i] else graph.to_low[e]
        for k in range(size):
            graph.scratch[k] += messages[at + k]
    return size


def send(belief: Floats, size: int, messages: Floats, back: int, share: float, table: Floats, at: int, out: int, columns: int) -> float:
    """A node's message: for each y the least of share * belief[x] - back[x] + table[x, y] over x, less its minimum, which is returned.

    Args:
        back, out: where the message from the other node begins among the messages, and this one.
        at: where the table begins.
    """
    for y in range(columns):
        messages[out + y] = FAR
    for x in range(size):
        if belief[x] < FAR / 2:  # not forbidden: the difference of two far costs would look cheap
            base, row = share * belief[x] - messages[back + x], at + x * columns
            for y in range(columns):
                total = base + table[row + y]
                messages[out + y] = total if total < messages[out + y] else messages[out + y]
    least = messages[out]
    for y in range(1, columns):
        least = messages[out + y] if messages[out + y] < least else least
    for y in range(columns):
        total = messages[out + y] - least
        messages[out + y] = total if total < FAR else FAR
    return least


def pass_both(graph: Graph, theta: Floats, messages: Floats, choices: Ints) -> float:
    """One pass from the last node to the first, and one back, which decodes a choice for each node on the way; returns the bound reached.

    A node's belief, less its minimum, pays in equal shares for the edges to nodes ahead; what the minima amount to is the bound.
    """
    nodes, bound = len(graph.split), 0.0
    for step in range(2 * nodes):
        forward = step >= nodes
        i = step - nodes if forward else nodes - 1 - step
        size = collect(graph, theta, messages, i)
        if forward:
            choices[i] = decode(graph, messages, choices, i, size)
        least = smallest(graph.scratch, size)
        for k in range(size):
            graph.scratch[k] -= least
        lower, middle, upper = graph.adj_ptr[i], graph.split[i], graph.adj_ptr[i + 1]
        share, sent = 1.0 / max(1, middle - lower, upper - middle), least
        if forward:
            for place in range(middle, upper):
                e = graph.adj[place]
                j = graph.high[e]
                columns = graph.ptr[j + 1] - graph.ptr[j]
                back, out = graph.to_low[e], graph.to_high[e]
                sent += send(graph.scratch, size, messages, back, share, graph.table, graph.at[e], out, columns)
            bound += sent
        else:
            for place in range(lower, middle):
                e = graph.adj[place]
                j = graph.low[e]
                columns = graph.ptr[j + 1] - graph.ptr[j]
                back, out = graph.to_high[e], graph.to_low[e]
                send(graph.scratch, size, messages, back, share, graph.turned, graph.at[e], out, columns)
    return bound


def decode(graph: Graph, messages: Floats, choices: Ints, i: int, size: int) -> int:
    """The best choice of node i by its belief in the scratch, given those of lower nodes."""
    guess, best = len(graph.scratch) // 4, 0
    for k in range(size):
        graph.scratch[guess + k] = graph.scratch[k]
    for place in range(graph.adj_ptr[i], graph.split[i]):
        e = graph.adj[place]
        row, message = graph.at[e] + choices[graph.low[e]] * size, graph.to_high[e]
        for k in range(size):
            graph.scratch[guess + k] += graph.table[row + k] - messages[message + k]
    for k in range(1, size):
        if graph.scratch[guess + k] < graph.scratch[guess + best]:
            best = k
    return best


def certify(graph: Graph, theta: Floats, messages: Floats) -> float:
    """The bound that any messages prove: least beliefs, and least entries of tables to which the lower node's belief pays its share."""
    total = 0.0
    for i in range(len(graph.split)):
        size = collect(graph, theta, messages, i)
        lowest = smallest(graph.scratch, size)
        total += lowest
        share = 1.0 / max(1, graph.adj_ptr[i + 1] - graph.split[i])
        for place in range(graph.split[i], graph.adj_ptr[i + 1]):
            e = graph.adj[place]
            columns = graph.ptr[graph.high[e] + 1] - graph.ptr[graph.high[e]]
            least = 2 * FAR
            for x in range(size):
                if graph.scratch[x] < FAR / 2:
                    row, begin = 2 * FAR, graph.at[e] + x * columns
                    for y in range(columns):
                        cost = graph.table[begin + y]
                        if cost < FAR / 2:
                            cost -= messages[graph.to_high[e] + y]
                            row = cost if cost < row else row
                    row += share * (graph.scratch[x] - lowest) - messages[graph.to_low[e] + x]
                    least = row if row < least else least
            total += least if least < FAR else FAR
    return total


def gather_beliefs(graph: Graph, theta: Floats, messages: Floats, over: Floats) -> None:
    """Each choice's belief above the least of its node."""
    for i in range(len(graph.split)):
        size = collect(graph, theta, messages, i)
        least = smallest(graph.scratch, size)
        for k in range(size):
            over[graph.ptr[i] + k] = graph.scratch[k] - least


def extrapolate(messages: Floats, previous: Floats, share: float) -> None:
    """Move the messages on by a share of their last step; ``previous`` becomes what they were."""
    for k in range(len(messages)):
        now = messages[k]
        if now < FAR / 2 and previous[k] < FAR / 2:
            messages[k] = now + share * (now - previous[k])
        previous[k] = now


def fill_reduced_costs(graph: Graph, theta: Floats, messages: Floats, choice: Floats, pair: Floats) -> None:
    """As ``certify`` counts: a node's belief above its least pays in equal shares for its edges to higher nodes."""
    room = len(graph.scratch) // 4
    rows, columns = room, 2 * room
    for i in range(len(graph.split)):
        begin, size = graph.ptr[i], collect(graph, theta, messages, i)
        lowest, forward = smallest(graph.scratch, size), graph.adj_ptr[i + 1] - graph.split[i]
        for k in range(size):
            if forward == 0 or graph.scratch[k] >= FAR / 2:
                choice[begin + k] += graph.scratch[k] - lowest
        for place in range(graph.split[i], graph.adj_ptr[i + 1]):
            e = graph.adj[place]
            other, wide = graph.ptr[graph.high[e]], graph.ptr[graph.high[e] + 1] - graph.ptr[graph.high[e]]
            least = 2 * FAR
            for y in range(wide):
                graph.scratch[columns + y] = FAR
            for x in range(size):
                graph.scratch[rows + x] = FAR
                paid, at = (graph.scratch[x] - lowest) / forward - messages[graph.to_low[e] + x], graph.at[e] + x * wide
                for y in range(wide):
                    slack = graph.table[at + y] - messages[graph.to_high[e] + y] + paid
                    if graph.table[at + y] >= FAR / 2 or graph.scratch[x] >= FAR / 2:
                        slack = FAR
                    pair[at + y] = slack
                    graph.scratch[rows + x] = min(graph.scratch[rows + x], slack)
                    graph.scratch[columns + y] = min(graph.scratch[columns + y], slack)
                least = min(least, graph.scratch[rows + x])
            for x in range(size):
                choice[begin + x] += graph.scratch[rows + x] - least
            for y in range(wide):
                choice[other + y] += graph.scratch[columns + y] - least
            for x in range(size):
                at = graph.at[e] + x * wide
                for y in range(wide):
                    if pair[at + y] < FAR / 2:
                        pair[at + y] += least - graph.scratch[rows + x] - graph.scratch[columns + y]
    for e in range(len(graph.low)):
        u, v = graph.ptr[graph.low[e]], graph.ptr[graph.high[e]]
        size, wide = graph.ptr[graph.low[e] + 1] - u, graph.ptr[graph.high[e] + 1] - v
        for x in range(size):
            for y in range(wide):
                pair[graph.at[e] + x * wide + y] += choice[u + x] + choice[v + y]
