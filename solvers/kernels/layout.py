# cython: infer_types=True, annotation_typing=False, boundscheck=False, wraparound=False, initializedcheck=False, cdivision=True
"""Tables of edges copied from one layout to another: out of a Network, into floats, and without what is ruled out."""

from __future__ import annotations

from ..arrays import Bytes, Floats, Ints
from .constants import FAR, NEVER
from .tables import size_of
from .views import Graph, Network


def compact_tables(net: Network, edges: Ints, costs: Ints) -> None:
    """Copy the live entries of some edges' tables, one table after the other.

    Args:
        costs: written to.
    """
    at = 0
    for place in range(len(edges)):
        e = edges[place]
        u, v = net.eu[e], net.ev[e]
        for i in range(net.live_count[u]):
            row = net.at[e] + net.live[net.ptr[u] + i] * size_of(net, v)
            for j in range(net.live_count[v]):
                costs[at] = net.pool[row + net.live[net.ptr[v] + j]]
                at += 1


def orient_tables(node_ptr: Ints, first: Ints, second: Ints, edge_ptr: Ints, costs: Ints, table: Floats, turned: Floats) -> None:
    """Write the tables of edges (first, second) as floats, by rows of the lower node and by rows of the higher.

    Args:
        table, turned: written to, shape [entries]: laid out (low, high) and (high, low).
    """
    for e in range(len(first)):
        rows, columns = node_ptr[first[e] + 1] - node_ptr[first[e]], node_ptr[second[e] + 1] - node_ptr[second[e]]
        for i in range(rows):
            for j in range(columns):
                at, flipped = edge_ptr[e] + i * columns + j, edge_ptr[e] + j * rows + i
                cost = FAR if costs[at] >= NEVER else float(costs[at])
                if first[e] < second[e]:
                    table[at], turned[flipped] = cost, cost
                else:
                    table[flipped], turned[at] = cost, cost


def copy_open_entries(graph: Graph, is_open: Bytes, rise: Floats, room: float, forbidden: int, costs: Ints) -> None:
    """Copy the entries of pairs of open choices, as integers.

    Args:
        is_open: of each choice, shape [C].
        rise: reduced cost of each pair, laid out as ``graph.table``.
        room: reduced cost from which a pair is forbidden.
        forbidden: cost of a forbidden pair; an entry of this or more is one.
        costs: written to.
    """
    out = 0
    for e in range(len(graph.low)):
        low, high, at = graph.low[e], graph.high[e], graph.at[e]
        for i in range(graph.ptr[low], graph.ptr[low + 1]):
            for j in range(graph.ptr[high], graph.ptr[high + 1]):
                if is_open[i] and is_open[j]:
                    costs[out] = forbidden if rise[at] >= room or graph.table[at] >= forbidden else int(graph.table[at])
                    out += 1
                at += 1
