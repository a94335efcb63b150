"""The parts of local search in NumPy, for machines without compiled code; see the kernels of the same names in ``neighbourhood``."""

from __future__ import annotations

import numpy as np

from solvers.arrays import Floats, Ints
from solvers.items import Items
from solvers.messages_numpy import spread
from solvers.pairs import FAR, Pairs


def total_cost(graph: Pairs, costs: Floats, choices: Ints) -> float:
    """See ``neighbourhood.total_cost``."""
    return float(costs[graph.ptr[:-1] + choices].sum() + edge_costs(graph, choices).sum())


def edge_costs(graph: Pairs, choices: Ints) -> Floats:
    """What each edge costs."""
    wide = np.diff(graph.ptr)[graph.high]
    result: Floats = graph.table[graph.at[:-1] + choices[graph.low] * wide + choices[graph.high]]
    return result


def count_use(graph: Pairs, items: Items, choices: Ints, used: Ints) -> None:
    """See ``neighbourhood.count_use``."""
    change = np.zeros(len(used) + 1, dtype=np.int64)
    _add_items(items, graph.ptr[:-1] + choices, 1, change)
    used[:] = np.cumsum(change)[:-1]


def accept(graph: Pairs, items: Items, theta: Floats, costs: Floats, choices: Ints, proposal: Ints, used: Ints, stops: Ints) -> float:
    """See ``neighbourhood.accept``."""
    changed = proposal != choices
    both = changed[graph.low] & changed[graph.high]
    label = _groups(np.flatnonzero(changed).tolist(), graph.low[both].tolist(), graph.high[both].tolist(), len(choices))
    groups = int(label.max(initial=-1)) + 1
    if groups == 0:
        return 0.0
    moved = np.flatnonzero(changed)
    old, new = graph.ptr[moved] + choices[moved], graph.ptr[moved] + proposal[moved]
    joined = np.where(changed[graph.low], label[graph.low], label[graph.high])
    touched = joined >= 0
    edges = (edge_costs(graph, np.where(changed, proposal, choices)) - edge_costs(graph, choices))[touched]
    # An edge between two groups would change with either: there is none, since neighbours that change are of one group.
    across = np.bincount(joined[touched], edges, groups)
    gain_priced = across + np.bincount(label[moved], theta[new] - theta[old], groups)
    gain_true = across + np.bincount(label[moved], costs[new] - costs[old], groups)
    by_group = np.argsort(label[moved], kind="stable")
    cuts = np.searchsorted(label[moved][by_group], np.arange(groups + 1))
    total = 0.0
    for g in np.argsort(gain_priced).tolist():
        if not (gain_true[g] < 0.0 or gain_priced[g] < 0.0) or gain_true[g] >= FAR / 2:
            continue
        mine = by_group[cuts[g] : cuts[g + 1]]
        change = np.zeros(len(used) + 1, dtype=np.int64)
        _add_items(items, old[mine], -1, change)
        _add_items(items, new[mine], 1, change)
        level = np.cumsum(change)[:-1]
        over = np.where(level > 0, used + level - items.capacity, 0)
        if over.max(initial=0) > 0:
            stops[np.argmax(over)] += 1
        else:
            used += level
            choices[moved[mine]] = proposal[moved[mine]]
            total += float(gain_true[g])
    return total


def drift(items: Items, prices: Floats, used: Ints, stops: Ints) -> None:
    """See ``neighbourhood.drift``."""
    mean = float(prices.sum()) / max(1, int(np.count_nonzero(prices > 0.0)))
    room = items.capacity - used
    stopped = (room >= 0) & (stops > 0)
    free = (room >= 0) & (stops == 0) & (items.capacity > 0)
    prices[room < 0] = prices[room < 0] * 1.3 + 0.3 * mean
    prices[stopped] = prices[stopped] * np.exp(0.02 * np.minimum(stops[stopped], 3)) + 0.001 * mean
    prices[free] *= np.exp(-0.01 * room[free] / items.capacity[free])


def _add_items(items: Items, choices: Ints, sign: int, change: Ints) -> None:
    places = spread(items.ptr[choices], items.ptr[choices + 1] - items.ptr[choices])
    np.add.at(change, items.begin[places], sign * items.usage[places])
    np.add.at(change, items.end[places], -sign * items.usage[places])


def _groups(moved: list[int], low: list[int], high: list[int], nodes: int) -> Ints:
    """Numbers of the connected groups of moved nodes, -1 for others."""
    near: dict[int, list[int]] = {i: [] for i in moved}
    for u, v in zip(low, high, strict=True):
        near[u].append(v)
        near[v].append(u)
    label = np.full(nodes, -1, dtype=np.int64)
    groups = 0
    for root in moved:
        if label[root] >= 0:
            continue
        label[root] = groups
        queue = [root]
        while queue:
            for j in near[queue.pop()]:
                if label[j] < 0:
                    label[j] = groups
                    queue.append(j)
        groups += 1
    return label
