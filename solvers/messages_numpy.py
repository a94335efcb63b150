"""Message passing in NumPy, for machines without compiled code: the nodes that no edge orders against each other go as one wave.

Each pass does what the kernel of its name in ``messages`` does. Everything ragged lies flat: an edge's rows one after the other, in
the order of the waves, so that least entries are ``np.minimum.reduceat``; but for large tables, of which each is read as it lies.
"""

from __future__ import annotations

import weakref
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from solvers.arrays import Floats, Ints, offsets
from solvers.pairs import FAR, Pairs

LARGE = 512
"""Entries of a wave's tables, on average, from which each is looked at on its own: a call costs less than reading one by indices."""


class Wave(NamedTuple):
    """Nodes whose messages can be computed at once, and the edges they send along. Indices are into the wave's own arrays unless said."""

    nodes: Ints
    choices: Ints  # of the graph
    owner: Ints  # [choices] node
    first: Ints  # [nodes] where its choices begin
    heard: Ints  # messages to the choices, of the graph
    heard_by: Ints  # choice each of them goes to
    sender: Ints  # [rows] choice; a row is an edge with a choice of the node that sends
    share: Floats  # [rows]
    back: Ints  # [rows] messages of the graph
    row: NDArray[np.int32]  # [entries] row
    cost: Floats  # [entries] the tables, laid out (receiver, sender)
    column_first: Ints  # [columns] where the entries of one choice of the receiver begin
    tables: list[tuple[int, ...]]  # where they are large: place in the graph's, rows, columns, first row, first column
    edge: Ints  # [columns] edge
    edge_first: Ints  # [edges] where its columns begin
    out: Ints  # [columns] messages of the graph
    source: Ints  # [given] nodes of the graph already decided; ``given`` are edges from there with a choice of this wave
    source_at: Ints  # [given] where the entry for the source's first choice lies in graph.table
    source_step: Ints  # [given] and how far the next choice's is from there
    source_back: Ints  # [given] messages of the graph
    source_to: Ints  # [given] choice


_known: dict[tuple[int, bool], list[Wave]] = {}


def waves(graph: Pairs, forward: bool) -> list[Wave]:
    """The waves of a pass, computed once a graph and forgotten with it."""
    key = (id(graph.table), forward)
    if key not in _known:
        _known[key] = _waves(graph, forward)
        weakref.finalize(graph.table, _known.pop, key, None)
    return _known[key]


def spread(starts: Ints, counts: Ints) -> Ints:
    """starts[k], starts[k] + 1, ... counts[k] numbers each, one after the other."""
    result: Ints = np.repeat(starts - offsets(counts)[:-1], counts) + np.arange(counts.sum())
    return result


def beliefs(graph: Pairs, theta: Floats, messages: Floats) -> Floats:
    """Each choice's cost and all messages to it."""
    ends = np.stack([graph.low, graph.high], axis=1).reshape(-1)
    target = spread(graph.ptr[ends], np.diff(graph.ptr)[ends])
    result: Floats = theta + np.bincount(target, messages, minlength=len(theta))
    return result


def pass_both(graph: Pairs, theta: Floats, messages: Floats, choices: Ints) -> float:
    """See ``messages.pass_both``."""
    _run(graph, graph.table, waves(graph, False), theta, messages, None)
    return _run(graph, graph.turned, waves(graph, True), theta, messages, choices)


def certify(graph: Pairs, theta: Floats, messages: Floats) -> float:
    """See ``messages.certify``."""
    belief, sizes = beliefs(graph, theta, messages), np.diff(graph.ptr)
    lowest = np.minimum.reduceat(belief, graph.ptr[:-1])
    total = float(lowest.sum())
    if len(graph.low) == 0:
        return total
    rows, columns = sizes[graph.low], sizes[graph.high]
    if len(graph.table) > LARGE * len(rows):
        least = np.empty(rows.sum())
        for at, high, low, told, row in _places(graph.at[:-1], columns, rows, graph.to_high, offsets(rows)[:-1]):
            table = graph.table[at : at + low * high].reshape(low, high)
            np.minimum.reduce(np.where(table < FAR / 2, table - messages[told : told + high], np.inf), axis=1, out=least[row : row + low])
    else:
        widths = np.repeat(columns, rows)
        place = spread(np.repeat(graph.to_high, rows), widths)
        cost = np.where(graph.table < FAR / 2, graph.table - messages[place], np.inf)
        least = np.minimum.reduceat(cost, offsets(widths)[:-1])
    sender = spread(graph.ptr[graph.low], rows)
    over = belief[sender] - np.repeat(lowest[graph.low], rows)
    share = np.repeat(1.0 / np.bincount(graph.low, minlength=len(sizes))[graph.low], rows)
    least += share * over - messages[spread(graph.to_low, rows)]
    least[belief[sender] >= FAR / 2] = np.inf
    return total + float(np.minimum(np.minimum.reduceat(least, offsets(rows)[:-1]), FAR).sum())


def priced(costs: Floats, item_ptr: Ints, begin: Ints, end: Ints, usage: Floats, prices: Floats, theta: Floats) -> None:
    """See ``messages.priced``."""
    paid = np.concatenate([[0.0], np.cumsum(prices)])
    owner = np.repeat(np.arange(len(costs)), np.diff(item_ptr))
    theta[:] = costs + np.bincount(owner, usage * (paid[end] - paid[begin]), minlength=len(costs))


def _run(graph: Pairs, tables: Floats, order: list[Wave], theta: Floats, messages: Floats, choices: Ints | None) -> float:
    """One pass; ``tables`` are the graph's, laid out (receiver, sender)."""
    bound = 0.0
    for wave in order:
        belief = theta[wave.choices]
        belief += np.bincount(wave.heard_by, messages[wave.heard], minlength=len(belief))
        if choices is not None:
            guess = belief.copy()
            told = graph.table[wave.source_at + choices[wave.source] * wave.source_step] - messages[wave.source_back]
            guess += np.bincount(wave.source_to, told, minlength=len(guess))
            cheapest = np.flatnonzero(guess == np.minimum.reduceat(guess, wave.first)[wave.owner])[::-1]
            choices[wave.nodes[wave.owner[cheapest]]] = cheapest - wave.first[wave.owner[cheapest]]
        least = np.minimum.reduceat(belief, wave.first)
        bound += float(least.sum())
        if len(wave.out) == 0:
            continue
        belief -= least[wave.owner]
        sent = belief[wave.sender]
        base = wave.share * sent - messages[wave.back]
        base[sent >= FAR / 2] = FAR
        if wave.tables:
            found = np.empty(len(wave.out))
            for at, rows, columns, row, column in wave.tables:
                table = tables[at : at + rows * columns].reshape(columns, rows)
                np.minimum.reduce(table + base[row : row + rows], axis=1, out=found[column : column + columns])
        else:
            found = np.minimum.reduceat(base[wave.row] + wave.cost, wave.column_first)
        found = np.minimum(found, FAR)
        least = np.minimum.reduceat(found, wave.edge_first)
        messages[wave.out] = np.minimum(found - least[wave.edge], FAR)
        bound += float(least.sum())
    return bound


def _places(*columns: Ints) -> list[tuple[int, ...]]:
    """For each edge its numbers."""
    return list(zip(*(column.tolist() for column in columns), strict=True))


def _waves(graph: Pairs, forward: bool) -> list[Wave]:
    sizes, nodes = np.diff(graph.ptr), len(graph.split)
    sender, receiver = (graph.low, graph.high) if forward else (graph.high, graph.low)
    level = [0] * nodes
    for e in np.argsort(graph.low if forward else -graph.high, kind="stable").tolist():
        level[receiver[e]] = max(level[receiver[e]], level[sender[e]] + 1)
    depth = np.array(level, dtype=np.int64)
    edges_at, nodes_at = np.argsort(depth[sender], kind="stable"), np.argsort(depth, kind="stable")
    steps = np.arange(depth.max(initial=0) + 2)
    edge_cuts, node_cuts = np.searchsorted(depth[sender][edges_at], steps), np.searchsorted(depth[nodes_at], steps)
    arrive_at = np.argsort(depth[receiver], kind="stable")
    arrive_cuts = np.searchsorted(depth[receiver][arrive_at], steps)
    heard_by = np.concatenate([graph.low, graph.high])
    heard_from = np.concatenate([graph.to_low, graph.to_high])
    heard_at = np.argsort(depth[heard_by], kind="stable")
    heard_cuts = np.searchsorted(depth[heard_by][heard_at], steps)
    lower, higher = graph.split - graph.adj_ptr[:-1], graph.adj_ptr[1:] - graph.split
    share = 1.0 / np.maximum(1, np.maximum(lower, higher))
    back, out = (graph.to_low, graph.to_high) if forward else (graph.to_high, graph.to_low)
    tables = graph.turned if forward else graph.table
    at = np.zeros(nodes, dtype=np.int64)
    result = []
    for step in steps[:-1]:
        mine = nodes_at[node_cuts[step] : node_cuts[step + 1]]
        edges = edges_at[edge_cuts[step] : edge_cuts[step + 1]]
        first = offsets(sizes[mine])[:-1]
        at[mine] = first
        ends = heard_at[heard_cuts[step] : heard_cuts[step + 1]]
        rows, columns = sizes[sender[edges]], sizes[receiver[edges]]
        large = bool((rows * columns).sum() > LARGE * len(edges))
        widths = np.repeat(rows, columns) if not large else rows[:0]
        given = arrive_at[arrive_cuts[step] : arrive_cuts[step + 1]] if forward else edges[:0]
        wide = sizes[receiver[given]]
        result.append(
            Wave(
                nodes=mine,
                choices=spread(graph.ptr[mine], sizes[mine]),
                owner=np.repeat(np.arange(len(mine)), sizes[mine]),
                first=first,
                heard=spread(heard_from[ends], sizes[heard_by[ends]]),
                heard_by=spread(at[heard_by[ends]], sizes[heard_by[ends]]),
                sender=spread(at[sender[edges]], rows),
                share=np.repeat(share[sender[edges]], rows),
                back=spread(back[edges], rows),
                row=spread(np.repeat(offsets(rows)[:-1], columns)[: len(widths)], widths).astype(np.int32),
                cost=tables[spread(graph.at[edges], rows * columns)] if not large else tables[:0].copy(),
                column_first=offsets(widths)[:-1],
                tables=_places(graph.at[edges], rows, columns, offsets(rows)[:-1], offsets(columns)[:-1]) if large else [],
                edge=np.repeat(np.arange(len(edges)), columns),
                edge_first=offsets(columns)[:-1],
                out=spread(out[edges], columns),
                source=np.repeat(sender[given], wide),
                source_at=spread(graph.at[given], wide),
                source_step=np.repeat(wide, wide),
                source_back=spread(out[given], wide),
                source_to=spread(at[receiver[given]], wide),
            )
        )
    return result
