"""The cheapest ways from one spec to many at once, as arrays: what ``find_moves`` says of each.

Whoever prices tables wants of a way its seconds, how long it holds each link and what it copies. Where layouts are listed all of that is
read off the tree of their source, one move of every way at a time; elsewhere each way is searched for itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from autopar.cost_models import Machine
from autopar.cost_models.collectives import KINDS as COLLECTIVES
from autopar.cost_models.collectives import STEP_KINDS
from autopar.reshard.cuts import Cut, cuts
from autopar.reshard.letters import Letters
from autopar.reshard.planning import collective, find_moves
from autopar.reshard.trees import KINDS, NONE, Seen, Tree, as_seen, listed, tree_of
from autopar.sharding import ShardingSpec

Array = np.ndarray
SLICE, PERMUTE, DEPARTURE = (KINDS.index(kind) for kind in ("slice", "permute", ""))
CUTTING = np.array([kind in COLLECTIVES and COLLECTIVES[kind].cuts for kind in KINDS])
JOINING = np.array([kind in COLLECTIVES and COLLECTIVES[kind].joins for kind in KINDS])
SAME = 1e-9
"""Relative gain that another cut of the axes must have."""


@dataclass(frozen=True)
class Calls:
    """The collectives of some ways, a row each.

    Args:
        way: the number of the way.
        before, after: into how many parts each dim is cut before and after it; shape [calls, dims].
        cut, joined: the dim at which it cuts or joins; -1: at none.
        kind: of which it is, by its place in ``KINDS``.
        latency: its seconds however little it sends.
        on_link: whether it holds each link; shape [calls, links].
    """

    way: Array
    before: Array
    after: Array
    cut: Array
    joined: Array
    kind: Array
    latency: Array
    on_link: Array

    def some(self, rows: Array) -> Calls:
        """Those of some rows."""
        return Calls(*(getattr(self, name)[rows] for name in self.__dataclass_fields__))

    @staticmethod
    def joined_up(several: Sequence[Calls]) -> Calls:
        """Those of all."""
        return Calls(*(np.concatenate([getattr(calls, name) for calls in several]) for name in Calls.__dataclass_fields__))

    @staticmethod
    def none(rank: int, links: int) -> Calls:
        """No calls."""
        nothing, counts = np.zeros(0, dtype=np.int64), np.zeros((0, rank), dtype=np.int64)
        return Calls(nothing, counts, counts, nothing, nothing, nothing, np.zeros(0), np.zeros((0, links), dtype=bool))


@dataclass(frozen=True)
class Ways:
    """Some ways.

    Args:
        seconds: of each, without copies; infinite where there is none.
        loads: for how long it holds each link, without latencies; shape [ways, links].
        moved: for each dim, whether any move cuts, joins or trades it; shape [ways, dims].
        calls: its collectives.
    """

    seconds: Array
    loads: Array
    moved: Array
    calls: Calls

    def better(self, other: Ways) -> Ways:
        """Of each the other where that is cheaper."""
        taken = other.seconds < self.seconds * (1 - SAME)
        if not taken.any():
            return self
        calls = [self.calls.some(~taken[self.calls.way]), other.calls.some(taken[other.calls.way])]
        rows = taken[:, None]
        return Ways(
            np.where(taken, other.seconds, self.seconds), np.where(rows, other.loads, self.loads),
            np.where(rows, other.moved, self.moved), Calls.joined_up(calls),
        )  # fmt: skip


@dataclass(frozen=True)
class Asked:
    """Ways from one source to specs with the same partial sums.

    Args:
        ways: their numbers.
        source: the spec that they begin from.
        target: where they lead, by their place in ``ways``.
        dims, positions: of each target and axis the dim that it splits, -1 where it splits none, and its position there.
        order: of each target the dims in the order in which ``find_moves`` sees them.
    """

    ways: Array
    source: ShardingSpec
    target: Callable[[int], ShardingSpec]
    dims: Array
    positions: Array
    order: Array


@dataclass(frozen=True)
class _Route:
    """The ways from one source in one cut of the axes.

    Args:
        ways: their numbers.
        ends: the states to which they lead.
        dims: of each the tensor's dims in the order in which the tree sees them.
        on_link: for each set of letters, as a number, the links that it holds.
    """

    tree: Tree
    ways: Array
    ends: Array
    dims: Array
    on_link: Array


def find_ways(
    shape: tuple[int, ...], itemsize: int, asked: Sequence[Asked], machine: Machine, fine: bool, links: Sequence[str]
) -> Ways:  # fmt: skip
    """The ways that ``find_moves`` finds.

    Args:
        shape: which every dim fills.
        asked: together, all of some ways.
        links: whose loads are wanted, all that there are.
    """
    size, rank, count = float(math.prod(shape) * itemsize), len(shape), sum(len(some.ways) for some in asked)
    found = Ways(np.full(count, math.inf), np.zeros((count, len(links))), np.zeros((count, rank), dtype=bool), Calls.none(rank, len(links)))
    routes: dict[tuple[int, int], list[_Route]] = {}
    for some in asked:
        pending, kept = dict(some.source.partial), dict(some.target(0).partial)
        reduced = tuple(axis for axis in pending if axis not in kept)
        unlike = any(pending.get(axis) != reduction for axis, reduction in kept.items())
        if unlike or (reduced and len(set(pending.values())) > 1):
            continue
        whole = math.prod(size for axis, size in enumerate(machine.mesh.sizes) if axis not in kept)
        capacities = [math.gcd(extent, whole) for extent in shape]
        known = cuts(machine, tuple(kept), fine)
        if not all(listed(cut.alphabet, capacities) for cut in known):
            found = found.better(_searched(shape, itemsize, some, machine, fine, links, count))
            continue
        for turn, cut in enumerate(known):
            route = _route(cut, capacities, size, some, reduced, links)
            routes.setdefault((turn, id(route.tree.graph)), []).append(route)
    for _, together in sorted(routes.items()):
        found = found.better(_walked(together, count, rank))
    return found


def _route(
    cut: Cut, capacities: Sequence[int], size: float, asked: Asked, reduced: tuple[int, ...], links: Sequence[str]
) -> _Route:  # fmt: skip
    """The ways as one tree tells them."""
    source = asked.source
    order = sorted(range(len(capacities)), key=lambda dim: (source.dims[dim], capacities[dim]))
    spelled = tuple([cut.spell(source.dims[dim]) for dim in order])
    seen = as_seen(cut.alphabet, tuple([capacities[dim] for dim in order]), spelled, cut.spell(reduced))
    tree = tree_of(cut.alphabet, seen.capacities, seen.source, seen.partial, size)
    dims = _dims_seen(seen, order, asked.order)
    codes, states = tree.graph.whole
    ends = states[np.searchsorted(codes, tree.graph.code(_places_seen(cut, seen, dims, asked)))]
    return _Route(tree, asked.ways, ends, dims, _on_link(cut, seen.names, tuple(links)))


@lru_cache(maxsize=1024)
def _on_link(cut: Cut, names: Letters, links: tuple[str, ...]) -> Array:
    """See ``_Route``.

    Args:
        names: for each letter the one that stands for it.
    """
    on = np.zeros((len(names), len(links)), dtype=bool)
    for letter, name in enumerate(names):
        on[name] = np.isin(links, cut.alphabet.letters[letter].held)
    held = (np.arange(2 ** len(names))[:, None] >> np.arange(len(names))) & 1
    return np.asarray(held @ on > 0)


def _dims_seen(seen: Seen, order: Sequence[int], orders: Array) -> Array:
    """For each target the dims in the order in which they are seen: those that the source splits alike, as to the target."""
    dims = [order[dim] for dim in seen.dims]
    alike: dict[tuple[object, int], int] = {}
    key = np.full(orders.shape[1], len(dims))
    for dim, word, capacity in zip(dims, seen.source, seen.capacities, strict=True):
        key[dim] = alike.setdefault((word, capacity), len(alike))
    sorted_by = np.argsort(key[orders], axis=1, kind="stable")
    found: Array = np.take_along_axis(orders, sorted_by, axis=1)[:, : len(dims)]
    return found


def _places_seen(cut: Cut, seen: Seen, dims: Array, asked: Asked) -> Array:
    """Where the letters of each target stand as it is seen; see ``Graph.code``."""
    counts = np.array([len(parts) for parts in cut.axes], dtype=np.int64)
    number = np.full(asked.order.shape, -1)
    np.put_along_axis(number, dims, np.arange(dims.shape[1])[None], axis=1)
    before = (asked.dims[:, :, None] == asked.dims[:, None, :]) & (asked.positions[:, None, :] < asked.positions[:, :, None])
    first = (before * counts).sum(axis=2)
    found, letter = np.full((len(dims), len(seen.names)), -1), 0
    for axis, count in enumerate(counts.tolist()):
        split = np.flatnonzero(asked.dims[:, axis] >= 0)
        for part in range(count if len(split) else 0):
            on = number[split, asked.dims[split, axis]]
            found[split, seen.names[letter + part]] = on * len(seen.names) + first[split, axis] + part
        letter += count
    return found


def _walked(routes: Sequence[_Route], count: int, rank: int) -> Ways:
    """The ways of routes over one graph, walked from their ends on, all at once; of ``count`` others there are none here."""
    graph, size = routes[0].tree.graph, routes[0].tree.size
    route = np.repeat(np.arange(len(routes)), [len(some.ways) for some in routes])
    node, dims, ways = (np.concatenate([getattr(some, name) for some in routes]) for name in ("ends", "dims", "ways"))
    source = np.array([some.tree.source for some in routes])[route]
    last, on_link = np.stack([some.tree.last for some in routes]), np.stack([some.on_link for some in routes])
    seconds, loads, moved = np.zeros(len(node)), np.zeros((len(node), on_link.shape[2])), np.zeros((len(node), rank), dtype=bool)
    made, rows, landed, paid = [Calls.none(rank, on_link.shape[2])], np.flatnonzero(node != source), node.copy(), node.copy()
    while len(rows):
        number = last[route[rows], node[rows]]
        assert (number != NONE).all(), "gathering everything and slicing is always possible"
        kind, before = graph.kind[number], graph.of[number]
        permutes = kind == DEPARTURE  # to the node of its class, from which a move at its price leads to where it lands
        landed[rows], paid[rows] = np.where(permutes, landed[rows], node[rows]), np.where(permutes, paid[rows], number)
        for side in graph.dims[number].T:
            some = np.flatnonzero(side >= 0)
            moved[rows[some], dims[rows[some], side[some]]] = True
        moved[rows[permutes]] = True
        call = np.flatnonzero((kind != SLICE) & (kind != PERMUTE))
        if len(call):
            way, kind, start = rows[call], kind[call], before[call]
            number, end = paid[way], landed[way]
            load = size * graph.rate[number]
            traded = ((graph.spans[start] != graph.spans[end]) << np.arange(graph.spans.shape[1])).sum(axis=1)
            seconds[way] += graph.latency[number] + load
            on = on_link[route[way], np.where(kind == DEPARTURE, traded, graph.letters[number])]
            loads[way] += load[:, None] * on
            parts = np.ones((2, len(way), rank), dtype=np.int64)
            for side, states in zip(parts, (start, end), strict=True):
                np.put_along_axis(side, dims[way], graph.counts[states].reshape(len(way), -1), axis=1)
            one, other = (np.take_along_axis(dims[way], np.maximum(graph.dims[number], 0), axis=1).T if dims.shape[1] else
                          np.full((2, len(way)), -1))  # fmt: skip
            cut, joined = np.where(CUTTING[kind], other, -1), np.where(JOINING[kind], one, -1)
            kind = np.where(kind == DEPARTURE, PERMUTE, kind)
            made.append(Calls(ways[way], parts[0], parts[1], cut, joined, kind, graph.latency[number], on))
        node[rows] = before
        rows = rows[before != source[rows]]
    found = Ways(np.full(count, math.inf), np.zeros((count, loads.shape[1])), np.zeros((count, rank), dtype=bool), Calls.joined_up(made))
    found.seconds[ways], found.loads[ways], found.moved[ways] = seconds, loads, moved
    return found


def _searched(shape: tuple[int, ...], itemsize: int, asked: Asked, machine: Machine, fine: bool, links: Sequence[str], count: int) -> Ways:
    """The ways one after another; of ``count`` others there are none here."""
    rank, full, made = len(shape), float(math.prod(shape) * itemsize), [Calls.none(len(shape), len(links))]
    seconds, loads, moved = np.full(count, math.inf), np.zeros((count, len(links))), np.zeros((count, rank), dtype=bool)
    for place, way in enumerate(asked.ways.tolist()):
        answer = find_moves(shape, itemsize, asked.source, asked.target(place), machine, fine)
        assert answer is not None, "partial sums were looked at before"
        moves, parts, order = answer
        seconds[way] = 0.0
        for move in moves:
            dims = [order[dim] for dim in move.dims] if not STEP_KINDS[move.kind].pairs else list(range(rank))
            moved[way, dims] = True
            if move.kind == "slice":
                continue
            axes, _, price = collective(move, parts, full, machine)
            seconds[way] += price
            latency, on = machine.latency_seconds(move.kind, axes), np.isin(links, machine.links(axes))
            loads[way] += max(price - latency, 0.0) * on
            counts = np.ones((2, 1, rank), dtype=np.int64)
            for side, layout in zip(counts, (move.before, move.after), strict=True):
                side[0, list(order)] = [math.prod([parts[letter].size for letter in word]) for word in layout]
            kind = KINDS.index(move.kind)
            cut, joined = (dims[-1] if CUTTING[kind] else -1), (dims[0] if JOINING[kind] else -1)
            row = [np.array([one]) for one in (way, cut, joined, kind, latency, on)]
            made.append(Calls(row[0], counts[0], counts[1], *row[1:]))
    return Ways(seconds, loads, moved, Calls.joined_up(made))
