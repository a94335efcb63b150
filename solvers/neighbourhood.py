"""Local search under the hard limits: an elimination sweep proposes, the changes that hang together are taken or left as one.

Connected groups of changed nodes add up, in cost and in memory, so each is judged alone: it is taken when it lowers the cost, with or
without the price of memory, and exceeds no limit that is not exceeded already less. Times that stop groups become dearer, times with
room to spare cheaper.
"""

from __future__ import annotations

import numpy as np

from solvers import neighbourhood_numpy as plain
from solvers.arrays import Floats, Ints
from solvers.compiled import kernel, kernel_or
from solvers.desk import Desk
from solvers.elimination import sweep
from solvers.items import Items
from solvers.messages import priced
from solvers.pairs import FAR, Pairs


@kernel
def seed_thread(seed: int) -> None:
    """Set numpy's random state of the calling thread, for kernels."""
    np.random.seed(seed)


@kernel_or(plain.total_cost)
def total_cost(graph: Pairs, costs: Floats, choices: Ints) -> float:
    total = 0.0
    for i in range(len(choices)):
        total += costs[graph.ptr[i] + choices[i]]
    for e in range(len(graph.low)):
        wide = graph.ptr[graph.high[e] + 1] - graph.ptr[graph.high[e]]
        total += graph.table[graph.at[e] + choices[graph.low[e]] * wide + choices[graph.high[e]]]
    return total


@kernel_or(plain.count_use)
def count_use(graph: Pairs, items: Items, choices: Ints, used: Ints) -> None:
    """Usage at each time."""
    change = np.zeros(len(used) + 1, dtype=np.int64)
    for i in range(len(choices)):
        add_items(items, graph.ptr[i] + choices[i], 1, change)
    level = 0
    for t in range(len(used)):
        level += change[t]
        used[t] = level


@kernel
def add_items(items: Items, choice: int, sign: int, change: Ints) -> None:
    for item in range(items.ptr[choice], items.ptr[choice + 1]):
        change[items.begin[item]] += sign * items.usage[item]
        change[items.end[item]] -= sign * items.usage[item]


@kernel_or(plain.accept)
def accept(graph: Pairs, items: Items, theta: Floats, costs: Floats, choices: Ints, proposal: Ints, used: Ints, stops: Ints) -> float:
    """Take the groups of changes that help; returns the change of the true cost. ``stops`` counts groups stopped by each time."""
    nodes = len(choices)
    label = np.full(nodes, -1, dtype=np.int64)
    queue, groups = np.empty(nodes, dtype=np.int64), 0
    starts = np.empty(nodes + 1, dtype=np.int64)
    tail = 0
    for root in range(nodes):
        if proposal[root] == choices[root] or label[root] >= 0:
            continue
        starts[groups] = tail
        label[root] = groups
        queue[tail] = root
        head = tail
        tail += 1
        while head < tail:
            i = queue[head]
            head += 1
            for place in range(graph.adj_ptr[i], graph.adj_ptr[i + 1]):
                e = graph.adj[place]
                j = graph.low[e] if place < graph.split[i] else graph.high[e]
                if proposal[j] != choices[j] and label[j] < 0:
                    label[j] = groups
                    queue[tail] = j
                    tail += 1
        groups += 1
    starts[groups] = tail
    gain_priced, gain_true = np.zeros(groups), np.zeros(groups)
    for g in range(groups):
        for place in range(starts[g], starts[g + 1]):
            i = queue[place]
            old, new = graph.ptr[i] + choices[i], graph.ptr[i] + proposal[i]
            edges = edge_change(graph, choices, proposal, label, i)
            gain_priced[g] += theta[new] - theta[old] + edges
            gain_true[g] += costs[new] - costs[old] + edges
    change = np.zeros(len(used) + 1, dtype=np.int64)
    total = 0.0
    for g in np.argsort(gain_priced):
        if not ((gain_true[g] < -1e-9 * abs(gain_true[g]) and gain_true[g] < 0.0) or gain_priced[g] < 0.0) or gain_true[g] >= FAR / 2:
            continue
        first, last = len(used), 0
        for place in range(starts[g], starts[g + 1]):
            i = queue[place]
            for sign in (-1, 1):
                c = graph.ptr[i] + (choices[i] if sign < 0 else proposal[i])
                add_items(items, c, sign, change)
                for item in range(items.ptr[c], items.ptr[c + 1]):
                    first, last = min(first, items.begin[item]), max(last, items.end[item])
        level, worst, stop = 0, 0, -1
        for t in range(first, last):
            level += change[t]
            if level > 0 and used[t] + level - items.capacity[t] > worst:
                worst, stop = used[t] + level - items.capacity[t], t
        if stop >= 0:
            stops[stop] += 1
        else:
            level = 0
            for t in range(first, last):
                level += change[t]
                used[t] += level
            for place in range(starts[g], starts[g + 1]):
                choices[queue[place]] = proposal[queue[place]]
            total += gain_true[g]
        for t in range(first, last + 1):
            change[t] = 0
    return total


@kernel
def edge_change(graph: Pairs, choices: Ints, proposal: Ints, label: Ints, i: int) -> float:
    """Change of the edges at i, those between two changed nodes counted at the lower one."""
    total = 0.0
    for place in range(graph.adj_ptr[i], graph.adj_ptr[i + 1]):
        e = graph.adj[place]
        low, high = graph.low[e], graph.high[e]
        other = low if place < graph.split[i] else high
        if label[other] == label[i] and other < i:
            continue
        wide = graph.ptr[high + 1] - graph.ptr[high]
        at = graph.at[e]
        total += graph.table[at + proposal[low] * wide + proposal[high]] - graph.table[at + choices[low] * wide + choices[high]]
    return total


@kernel
def improve(
    graph: Pairs,
    items: Items,
    costs: Floats,
    prices: Floats,
    choices: Ints,
    used: Ints,
    largest: float,
    shake: float,
    work: Desk,
) -> float:
    """One sweep from ``choices``, which change in place with ``used`` and ``prices``; returns the change of the true cost."""
    nodes = len(choices)
    theta, usage = np.empty(len(costs)), items.usage.astype(np.float64)
    priced(costs, items.ptr, items.begin, items.end, usage, prices, theta)
    held, jitter = np.zeros(nodes, dtype=np.uint8), np.empty(nodes)
    proposal = choices.copy()
    for i in range(nodes):
        jitter[i] = 1.0 + 0.3 * np.random.random()
        if np.random.random() < shake:
            held[i] = 1
            proposal[i] = np.random.randint(0, graph.ptr[i + 1] - graph.ptr[i])
    sweep(graph, theta, proposal, held, jitter, largest, work)
    stops = np.zeros(len(used), dtype=np.int64)
    change = accept(graph, items, theta, costs, choices, proposal, used, stops)
    drift(items, prices, used, stops)
    return change


@kernel_or(plain.drift)
def drift(items: Items, prices: Floats, used: Ints, stops: Ints) -> None:
    """Move the prices: up where the limit is exceeded or stopped a change, down where there is room."""
    mean, priced_times = 0.0, 0
    for t in range(len(used)):
        mean += prices[t]
        priced_times += prices[t] > 0.0
    mean /= max(1, priced_times)
    for t in range(len(used)):
        room = items.capacity[t] - used[t]
        if room < 0:
            prices[t] = prices[t] * 1.3 + 0.3 * mean
        elif stops[t] > 0:
            prices[t] = prices[t] * np.exp(0.02 * min(stops[t], 3)) + 0.001 * mean
        elif items.capacity[t] > 0:
            prices[t] *= np.exp(-0.01 * room / items.capacity[t])
