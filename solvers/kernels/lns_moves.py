# cython: infer_types=True, annotation_typing=False, boundscheck=False, wraparound=False, initializedcheck=False, cdivision=True
"""The judgement of the changes that a sweep proposes: connected groups of changed nodes add up, in cost and in memory, so each is judged
alone."""

from __future__ import annotations

from ..arrays import Floats, Ints
from .views import Graph, Items, Workspace


def group_changes(
    graph: Graph, theta: Floats, costs: Floats, choices: Ints, proposal: Ints, priced: Floats, true: Floats, work: Workspace
) -> int:
    """Number the connected groups of changed nodes and say what each changes; returns how many there are.

    Args:
        priced, true: written to: the change of cost of each group, with the price of memory and without.
    """
    tail, groups = 0, 0
    for root in range(len(choices)):
        work.label[root] = -1
    for root in range(len(choices)):
        if proposal[root] == choices[root] or work.label[root] >= 0:
            continue
        work.starts[groups] = tail
        work.label[root] = groups
        work.queue[tail] = root
        head = tail
        tail += 1
        while head < tail:
            i = work.queue[head]
            head += 1
            for place in range(graph.adj_ptr[i], graph.adj_ptr[i + 1]):
                e = graph.adj[place]
                j = graph.low[e] if place < graph.split[i] else graph.high[e]
                if proposal[j] != choices[j] and work.label[j] < 0:
                    work.label[j] = groups
                    work.queue[tail] = j
                    tail += 1
        groups += 1
    work.starts[groups] = tail
    for g in range(groups):
        priced[g], true[g] = 0.0, 0.0
        for place in range(work.starts[g], work.starts[g + 1]):
            i = work.queue[place]
            old, new, edges = graph.ptr[i] + choices[i], graph.ptr[i] + proposal[i], edge_change(graph, choices, proposal, i, work)
            priced[g] += theta[new] - theta[old] + edges
            true[g] += costs[new] - costs[old] + edges
    return groups


def edge_change(graph: Graph, choices: Ints, proposal: Ints, i: int, work: Workspace) -> float:
    """Change of the edges at i, those between two changed nodes counted at the lower one."""
    total = 0.0
    for place in range(graph.adj_ptr[i], graph.adj_ptr[i + 1]):
        e = graph.adj[place]
        low, high = graph.low[e], graph.high[e]
        other = low if place < graph.split[i] else high
        if work.label[other] != work.label[i] or other >= i:
            wide, at = graph.ptr[high + 1] - graph.ptr[high], graph.at[e]
            total += graph.table[at + proposal[low] * wide + proposal[high]] - graph.table[at + choices[low] * wide + choices[high]]
    return total


def accept_groups(
    graph: Graph, items: Items, order: Ints, choices: Ints, proposal: Ints, used: Ints, change: Ints, stops: Ints, work: Workspace
) -> None:
    """Take the groups in ``order`` that exceed no limit that is not exceeded already less.

    Args:
        used: usage at each time, written to with ``choices``.
        change: scratch of zeros, one number a time and one more.
        stops: counts the groups stopped by each time.
    """
    for rank in range(len(order)):
        g = order[rank]
        first, last, level, worst, stop = len(used), 0, 0, 0, -1
        for place in range(work.starts[g], work.starts[g + 1]):
            i = work.queue[place]
            for turn in range(2):
                c = graph.ptr[i] + (proposal[i] if turn else choices[i])
                for item in range(items.ptr[c], items.ptr[c + 1]):
                    usage = items.usage[item] if turn else -items.usage[item]
                    change[items.begin[item]] += usage
                    change[items.end[item]] -= usage
                    first, last = min(first, items.begin[item]), max(last, items.end[item])
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
            for place in range(work.starts[g], work.starts[g + 1]):
                choices[work.queue[place]] = proposal[work.queue[place]]
        for t in range(first, last + 1):
            change[t] = 0
