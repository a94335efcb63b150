"""The cheapest way from one layout to another: A* over layouts written in letters (parts of mesh axes).

The bound of ``letters`` never exceeds the cost that is left, so the first way found to the target is the cheapest.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from autopar.reshard.letters import Alphabet, LetterLayout, Letters, Match
from autopar.reshard.moves import Move, Question, State, Way, moves_from, with_word

MOST_LAYOUTS = 300
"""Layouts that a search under a limit expands, at most."""

TENSORS = 8
"""Sizes of tensors whose states are remembered: a table of prices goes from tensor to tensor."""
TARGETS = 32
"""Targets of each whose states are remembered."""


Priced = tuple[float, float, str, Letters, tuple[int, ...], State]
"""Seconds, fraction received, kind, letters and dims of a move, and where it leads."""


@dataclass(frozen=True)
class _Node:
    """A state reached: seconds, fraction received, collectives so far, and how."""

    state: State
    seconds: float = 0.0
    received: float = 0.0
    collectives: int = 0
    move: Move | None = None
    parent: _Node | None = None


@lru_cache(maxsize=1 << 18)
def solve(question: Question) -> Way | None:
    """The cheapest moves from source to target: by seconds, then bytes, then collectives; None when none is under the limit."""
    node = _Search(question).run()
    if node is None:
        return None
    seconds, layout = node.seconds, node.state[0]
    moves: list[Move] = []
    while node.move is not None and node.parent is not None:
        moves.append(node.move)
        node = node.parent
    moves.reverse()
    for dim, want in enumerate(question.target):
        if extra := want[len(layout[dim]) :]:
            after = with_word(layout, dim, want)
            moves.append(Move("slice", extra, (dim,), layout, after))
            layout = after
    assert layout == question.target
    return Way(tuple(moves), seconds)


@lru_cache(maxsize=TARGETS)
def known(alphabet: Alphabet, target: LetterLayout, size: float) -> dict[State, tuple[State, float]]:
    """The names of states, and the seconds that they are away from ``target`` at least, as searches from anywhere have found them."""
    return {}


@lru_cache(maxsize=TENSORS)
def moves_of(alphabet: Alphabet, capacities: tuple[int, ...], size: float) -> dict[State, tuple[Priced, ...]]:
    """The moves from states of a tensor, as searches have found them."""
    return {}


class _Search:
    """The tables of one question."""

    def __init__(self, question: Question) -> None:
        self.question = question
        self.alphabet = question.alphabet
        self.sizes = self.alphabet.sizes
        self.count = self.alphabet.count
        wanted = tuple(itertools.chain.from_iterable(question.target))
        self.target_volume = 1 / self.count(wanted)
        self.target_slow = [1 / self.alphabet.slow_count(wanted, divide) for divide in self.alphabet.divides]
        self.matches = [self.alphabet.matches(want) for want in question.target]
        self.twins = self.alphabet.twins(wanted)
        self.known = known(question.alphabet, question.target, question.bytes)
        self.made = moves_of(question.alphabet, question.capacities, question.bytes)
        self.tried: dict[object, float] = {}
        self.limit = question.limit

    def run(self) -> _Node | None:
        start = _Node((self.question.source, self.question.partial))
        name, first = self.look(start.state)
        best = None
        limit = self.limit
        digits = 12 - math.ceil(math.log10(max(first, 1e-30)))
        reached = {name: (0.0, 0.0, 0)}
        order = itertools.count()
        queue = [(round(first, digits), 0.0, 0, next(order), start)]
        looked_at = 0
        while queue and queue[0][0] < limit and (looked_at < MOST_LAYOUTS or math.isinf(self.question.limit)):
            node = heapq.heappop(queue)[-1]
            looked_at += 1
            name, left = self.look(node.state)
            if reached[name] < (round(node.seconds, digits), node.received, node.collectives):
                continue
            if not left and not node.state[1]:
                return node
            for seconds, received, kind, letters, dims, state in itertools.chain(self.moves(node.state), self.permutes(node)):
                total = node.seconds + seconds
                if total > limit:
                    continue
                name, left = self.look(state)
                if total + left > limit:
                    continue
                label = (round(total, digits), node.received + received, node.collectives + (kind != "slice"))
                if name in reached and reached[name] <= label:
                    continue
                reached[name] = label
                child = _Node(state, total, label[1], label[2], Move(kind, letters, dims, node.state[0], state[0]), node)
                if not left and not state[1] and total < limit:
                    best = child
                    limit = self.limit = total * (1 + 1e-12)
                heapq.heappush(queue, (round(total + left, digits), label[1], label[2], next(order), child))
        return best

    def look(self, state: State) -> tuple[State, float]:
        """The state's name and the seconds it is away from the target at least."""
        known = self.known.get(state)
        if known is None:
            known = self.known[state] = (self.name(state), self.bound(state))
        return known

    def name(self, state: State) -> State:
        """The state with the letters that the target does not use, and that are alike, renamed in order of appearance: from
        states of one name the way on costs the same."""
        if not self.twins:
            return state
        new: dict[int, int] = {}
        taken: dict[Letters, int] = {}
        for letter in itertools.chain(*state[0], state[1]):
            twins = self.twins.get(letter)
            if twins is not None:
                place = taken.get(twins, 0)
                taken[twins] = place + 1
                new[letter] = twins[place]
        if all(letter == other for letter, other in new.items()):
            return state
        return tuple(tuple([new.get(x, x) for x in letters]) for letters in state[0]), tuple(sorted([new.get(x, x) for x in state[1]]))

    def bound(self, state: State) -> float:
        """Seconds that any way from here to the target takes at least; 0 when slices are enough, and never else."""
        layout, partial = state
        matches = [self.matches[dim].get(have) or self.match(dim, have) for dim, have in enumerate(layout)]
        wrong = shrinks = 0
        both = 1
        for match in matches:
            both *= match.both
            wrong += match.wrong
            shrinks += match.shrinks
        if not wrong and not partial:
            return 0.0
        steps = min(wrong, shrinks + 1) + bool(partial)
        missing = _missing(self.alphabet.ranks, self.target_volume, both, self.count(partial))
        best = math.ulp(0.0)
        for index, divide in enumerate(self.alphabet.divides):
            (slow, fast), (slow_inverse, fast_inverse) = divide.latency, divide.inverse
            crossing = 0.0
            if divide.slow:
                both = math.prod([match.slow_both[index] for match in matches])
                parts = self.alphabet.slow_count(partial, divide)
                slow_ranks = self.alphabet.ranks // divide.fast_ranks
                crossing = _missing(slow_ranks, self.target_slow[index], both, parts) / divide.fast_ranks
            if crossing > 0.0:
                all_slow = steps * slow + missing * self.question.bytes * slow_inverse
                here = max(missing - crossing, 0.0)
                mixed = slow + fast + max(steps - 2, 0) * min(slow, fast)
                best = max(best, min(all_slow, mixed + (crossing * slow_inverse + here * fast_inverse) * self.question.bytes))
            else:
                best = max(best, steps * min(slow, fast) + missing * self.question.bytes * fast_inverse)
        return best

    def match(self, dim: int, have: Letters) -> Match:
        return self.alphabet.match(have, self.question.target[dim])

    def price(self, kind: str, letters: Letters, received: float) -> float:
        """Seconds of a collective over ``letters`` in which a rank receives this fraction of the tensor."""
        latency, inverse = self.alphabet.figures(kind, letters)
        return latency + received * self.question.bytes * inverse

    def moves(self, state: State) -> tuple[Priced, ...]:
        """Every move but permutes."""
        made = self.made.get(state)
        if made is None:
            made = self.made[state] = tuple(
                (self.price(kind, letters, received) if received else 0.0, received, kind, letters, dims, state)
                for received, kind, letters, dims, state in moves_from(self.alphabet, self.question.capacities, state)
            )
        return made

    def permutes(self, node: _Node) -> Iterator[Priced]:
        """The arrangements with the same counts. Their cost depends on the counts and links alone, so that of all layouts
        that can be permuted into each other over the same links only the cheapest one needs to try."""
        layout, partial = node.state
        counts = tuple(self.count(letters) for letters in layout)
        block = 1 / math.prod(counts)
        for latency, inverse, fixed in self.alphabet.permute_prices:
            places = self.alphabet.places(layout, fixed)
            key = (counts, partial, fixed, places)
            if self.tried.get(key, math.inf) <= node.seconds:
                continue
            self.tried[key] = node.seconds
            seconds = latency + block * inverse * self.question.bytes
            if node.seconds + seconds > self.limit:
                continue
            for after in self.alphabet.arrangements(counts, partial, fixed, places):
                if after != layout:
                    yield seconds, block, "permute", (), (), (after, partial)


def _missing(ranks: int, target: float, both: int, parts: int) -> float:
    """The fraction of the tensor that a rank (or a group of ranks, as one) has to receive at least.

    Args:
        ranks: how many there are.
        target: the fraction that one needs.
        both: into how many blocks the layout and the target cut the tensor together; 0 when the two blocks can be disjoint.
        parts: over how many of the ranks the value is still to be reduced. If more than one, what is received is least when the
            smallest possible block is reduced and scattered, and the rest of the target gathered.
    """
    if parts == 1:
        return target - (1 / both if both else 0.0)
    block = parts / ranks
    return (1 - 1 / parts) * block + max(0.0, target - block / parts)
