"""The cheapest ways from one layout to all others at once: shortest paths over arrays of moves.

Whoever prices tables asks of one layout the ways to hundreds. Where layouts are few enough to list them all, each move between two of
them is an entry of some arrays, made once for all tensors of as many dims; the ways from one layout are then found as Bellman and Ford do,
all moves at once, again until nothing gets cheaper: as often as the longest way has moves. Permutes, from any of a class of
arrangements to any other at one price, pass through a node for the class. Of ways of equal seconds the one with fewest bytes received is
taken, then with fewest collectives: the same once more, among moves that are on a cheapest way.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache

import numpy as np

from autopar.cost_models.collectives import KINDS as COLLECTIVES
from autopar.cost_models.collectives import SLICE
from autopar.reshard.letters import Alphabet, LetterLayout, Letters
from autopar.reshard.moves import Move, Question, State, Way, moves_from, with_word

MOST_STATES = 12_000
"""States up to which all are listed: four letters on six dims, or five on three. Above it each pair is searched by itself."""
SAME = 1e-12
"""Relative difference in seconds below which two ways are equally cheap."""
COLLECTIVE = 1e-9
"""Weight of a collective against the fraction of the tensor received, where seconds are equal."""
NONE = np.iinfo(np.int64).max
KINDS = (SLICE.name, *COLLECTIVES, "")
"""Kinds of moves. A permute is the move from the node of its class; the move to the node has an empty name."""


def listed(alphabet: Alphabet, capacities: Sequence[int]) -> bool:
    """Whether all layouts of a tensor are few enough."""
    return number_of_states(len(alphabet.letters), sum(capacity > 1 for capacity in capacities)) <= MOST_STATES


@cache
def number_of_states(letters: int, dims: int) -> int:
    """Of a tensor of so many dims in so many letters."""
    return sum(
        math.perm(letters, used) * math.comb(max(used + dims - 1, 0), used) * 2 ** (letters - used) for used in range(letters + 1)
    )  # fmt: skip


def solve(question: Question) -> Way | None:
    """The cheapest moves from source to target: by seconds, then bytes, then collectives; None when none is under the limit."""
    seen = as_seen(question.alphabet, question.capacities, question.source, question.partial)
    tree = tree_of(question.alphabet, seen.capacities, seen.source, seen.partial, question.bytes)
    way = tree.way(seen.there(question.target))
    return seen.back(way) if way.seconds < question.limit else None


@dataclass(frozen=True)
class Seen:
    """A source as all are seen that differ in the order of dims, and in the names of letters alike, alone.

    Args:
        dims: those that can be cut, in the order in which they are seen.
        names: for each letter the one that stands for it.
        capacities, source, partial: as seen.
    """

    dims: tuple[int, ...]
    names: Letters
    capacities: tuple[int, ...]
    source: LetterLayout
    partial: Letters
    rank: int

    def there(self, layout: LetterLayout) -> LetterLayout:
        """A layout as it is seen."""
        return tuple([tuple([self.names[letter] for letter in layout[dim]]) for dim in self.dims])

    def back(self, way: Way) -> Way:
        """What was seen in the names that were asked with."""
        letters = {name: letter for letter, name in enumerate(self.names)}
        place = {dim: number for number, dim in enumerate(self.dims)}

        def layout(found: LetterLayout) -> LetterLayout:
            return tuple([tuple([letters[x] for x in found[place[dim]]]) if dim in place else () for dim in range(self.rank)])

        moves = []
        for move in way.moves:
            moved = tuple([letters[x] for x in move.letters])
            moved = tuple(sorted(moved)) if move.kind in COLLECTIVES and not COLLECTIVES[move.kind].ordered else moved
            dims = tuple([self.dims[dim] for dim in move.dims])
            moves.append(Move(move.kind, moved, dims, layout(move.before), layout(move.after)))
        return Way(tuple(moves), way.seconds)


@lru_cache(maxsize=1 << 14)
def as_seen(alphabet: Alphabet, capacities: tuple[int, ...], source: LetterLayout, partial: Letters) -> Seen:
    """A source as it is seen."""
    alike: dict[object, list[int]] = {}
    for letter, what in enumerate(alphabet.letters):
        alike.setdefault(what, []).append(letter)
    first = {letter: letters[0] for letters in alike.values() for letter in letters}
    dims = [dim for dim, capacity in enumerate(capacities) if capacity > 1]
    dims.sort(key=lambda dim: ([first[letter] for letter in source[dim]], capacities[dim]))
    free = {what: iter(letters) for what, letters in alike.items()}
    used = dict.fromkeys((*itertools.chain.from_iterable(source[dim] for dim in dims), *partial, *range(len(alphabet.letters))))
    new = {letter: next(free[alphabet.letters[letter]]) for letter in used}
    names = tuple([new[letter] for letter in range(len(alphabet.letters))])
    seen = tuple([tuple([names[letter] for letter in source[dim]]) for dim in dims])
    return Seen(tuple(dims), names, tuple([capacities[dim] for dim in dims]), seen, tuple(sorted(names[x] for x in partial)), len(source))


class Graph:
    """Every state of a tensor of some dims in the letters of an alphabet, then the classes of permutes, and every move between these.

    Moves are in the order of where they lead.
    """

    def __init__(self, alphabet: Alphabet, rank: int) -> None:
        self.alphabet, self.rank = alphabet, rank
        self.states = list(_states(alphabet, rank))
        self.number = {state: number for number, state in enumerate(self.states)}
        self.counts = np.array([[alphabet.count(word) for word in layout] for layout, _ in self.states], dtype=np.int64)
        self.partial = np.array([sum(1 << letter for letter in partial) for _, partial in self.states], dtype=np.int64)
        classes: dict[object, int] = {}
        found: list[tuple[int, int, float, float, float, tuple[str, Letters, tuple[int, ...]]]] = []
        for number, state in enumerate(self.states):
            layout, partial = state
            for received, kind, letters, dims, after in moves_from(alphabet, (0,) * rank, state):
                latency, inverse = alphabet.figures(kind, letters) if kind != "slice" else (0.0, 0.0)
                found.append((self.number[after], number, latency, received * inverse, received, (kind, letters, dims)))
            counts = tuple(self.counts[number].tolist())
            block = 1 / math.prod(counts)
            for latency, inverse, fixed in alphabet.permute_prices:
                key = (counts, partial, fixed, alphabet.places(layout, fixed))
                node = classes.setdefault(key, len(self.states) + len(classes))
                found.append((node, number, 0.0, 0.0, 0.0, ("", (), ())))
                found.append((number, node, latency, block * inverse, block, ("permute", (), ())))
        found.sort(key=lambda one: one[0])
        self.nodes = len(self.states) + len(classes)
        self.to, self.of = (np.array([one[at] for one in found], dtype=np.int64) for at in (0, 1))
        self.latency, self.rate, self.received = (np.array([one[at] for one in found]) for at in (2, 3, 4))
        self.moves = [one[5] for one in found]
        self.kind = np.array([KINDS.index(kind) for kind, _, _ in self.moves], dtype=np.int64)
        self.letters = np.array([sum(1 << letter for letter in letters) for _, letters, _ in self.moves], dtype=np.int64)
        self.dims = np.array([(*dims[:1], *dims[-1:]) or (-1, -1) for _, _, dims in self.moves], dtype=np.int64).reshape(-1, 2)

    @cached_property
    def spans(self) -> np.ndarray:
        """For each state and letter where it stands, the dim and what is outside it there, as one number; -1 where it is free."""
        found = np.full((len(self.states), len(self.alphabet.letters)), -1)
        for number, (layout, _) in enumerate(self.states):
            for dim, word in enumerate(layout):
                for letter, (outer, _) in self.alphabet.spans(word):
                    found[number, letter] = dim * self.alphabet.ranks + outer
        return found

    @cached_property
    def whole(self) -> tuple[np.ndarray, np.ndarray]:
        """The codes (see ``code``), in order, of the states that are not partial, and these states."""
        states = np.flatnonzero(self.partial == 0)
        place = np.full((len(states), len(self.alphabet.letters)), -1)
        for row, number in enumerate(states.tolist()):
            for dim, word in enumerate(self.states[number][0]):
                for position, letter in enumerate(word):
                    place[row, letter] = dim * len(self.alphabet.letters) + position
        codes = self.code(place)
        order = np.argsort(codes)
        return codes[order], states[order]

    def code(self, places: np.ndarray) -> np.ndarray:
        """Layouts as whole numbers.

        Args:
            places: of each letter: dim times the number of letters plus the position there, or -1; shape [layouts, letters].
        """
        count = len(self.alphabet.letters)
        found: np.ndarray = ((places + 1) * (1 + self.rank * count) ** np.arange(count)).sum(axis=1)
        return found

    def some(self, capacities: tuple[int, ...], partial: Letters) -> np.ndarray:
        """The moves between layouts that cut dims as their capacities let them, partial over no other letters."""
        legal = np.ones(self.nodes, dtype=bool)
        fits = (np.array(capacities, dtype=np.int64)[None] % self.counts == 0).all(axis=1) if self.rank else True
        legal[: len(self.states)] = fits & ((self.partial & ~sum(1 << letter for letter in partial)) == 0)
        return np.flatnonzero(legal[self.of] & legal[self.to])


def _states(alphabet: Alphabet, rank: int) -> dict[State, None]:
    letters = range(len(alphabet.letters))
    layouts: list[LetterLayout] = [((),) * rank]
    seen = set(layouts)
    for layout in layouts:  # which grows
        used = set(itertools.chain.from_iterable(layout))
        for letter, dim in itertools.product((letter for letter in letters if letter not in used), range(rank)):
            after = with_word(layout, dim, layout[dim] + (letter,))
            if after not in seen:
                seen.add(after)
                layouts.append(after)
    found: dict[State, None] = {}
    for layout in layouts:
        free = [letter for letter in letters if letter not in set(itertools.chain.from_iterable(layout))]
        for size in range(len(free) + 1):
            found.update(((layout, partial), None) for partial in itertools.combinations(free, size))
    return found


@lru_cache(maxsize=64)
def graph_of(alphabet: Alphabet, rank: int) -> Graph:
    """The states and moves of a tensor of so many dims."""
    return Graph(alphabet, rank)


@dataclass(frozen=True, eq=False)
class _Moves:
    """Some moves of a graph, in the order of where they lead."""

    graph: Graph
    numbers: np.ndarray

    @cached_property
    def of(self) -> np.ndarray:
        found: np.ndarray = self.graph.of[self.numbers]
        return found

    @cached_property
    def _starts(self) -> tuple[np.ndarray, np.ndarray]:
        """Where those that lead to one node begin, and the nodes."""
        to = self.graph.to[self.numbers]
        starts = np.flatnonzero(np.diff(to, prepend=-1))
        return starts, to[starts]

    def least(self, prices: np.ndarray, source: int) -> np.ndarray:
        """For each node the least sum of prices on a way from ``source``; infinite where there is none."""
        starts, nodes = self._starts
        found = np.full(self.graph.nodes, np.inf)
        found[source] = 0.0
        while True:
            before = found[nodes]
            after = np.minimum(before, np.minimum.reduceat(found[self.of] + prices, starts)) if len(nodes) else before
            if (after == before).all():
                return found
            found[nodes] = after

    def last(self, prices: np.ndarray, least: np.ndarray) -> np.ndarray:
        """For each node the last move of such a way; ``NONE`` where there is none."""
        starts, nodes = self._starts
        found = np.full(self.graph.nodes, NONE)
        if len(nodes):
            on = least[self.of] + prices == least[self.graph.to[self.numbers]]
            found[nodes] = np.minimum.reduceat(np.where(on, self.numbers, NONE), starts)
        return found


@lru_cache(maxsize=256)
def _moves(alphabet: Alphabet, capacities: tuple[int, ...], partial: Letters) -> _Moves:
    graph = graph_of(alphabet, len(capacities))
    return _Moves(graph, graph.some(capacities, partial))


class Tree:
    """The cheapest ways from one state.

    Args:
        size: bytes of the tensor.

    ``last``: for each node the number of the last move of the way there.
    """

    def __init__(self, moves: _Moves, source: State, size: float) -> None:
        self.graph, self.source, self.size = moves.graph, moves.graph.number[source], size
        graph = self.graph
        prices = graph.latency[moves.numbers] + size * graph.rate[moves.numbers]
        least = moves.least(prices, self.source)
        reached, to = least[moves.of], least[graph.to[moves.numbers]]
        with np.errstate(invalid="ignore"):
            cheapest = _Moves(graph, moves.numbers[np.isfinite(reached) & (reached + prices <= to * (1 + SAME))])
        received = graph.received[cheapest.numbers]
        counted = received + np.where(received > 0.0, COLLECTIVE, 0.0)
        self.last = cheapest.last(counted, cheapest.least(counted, self.source))

    def way(self, target: LetterLayout) -> Way:
        """The cheapest way to a layout, all reduced."""
        graph, node = self.graph, self.graph.number[target, ()]
        moves, seconds, permuted = list[Move](), 0.0, 0
        while node != self.source:
            number = self.last[node]
            kind, letters, dims = graph.moves[number]
            before = int(graph.of[number])
            if kind == "permute":
                permuted = node
            else:
                after = permuted if not kind else node
                moves.append(Move(kind or "permute", letters, dims, graph.states[before][0], graph.states[after][0]))
            seconds += float(graph.latency[number] + self.size * graph.rate[number])
            node = before
        return Way(tuple(reversed(moves)), seconds)


@lru_cache(maxsize=1 << 12)
def tree_of(alphabet: Alphabet, capacities: tuple[int, ...], source: LetterLayout, partial: Letters, size: float) -> Tree:
    """The cheapest ways from a source as it is seen, of a tensor of so many bytes."""
    return Tree(_moves(alphabet, capacities, partial), (source, partial), size)
