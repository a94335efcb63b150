"""The cheapest way from one layout to another: A* over layouts written in prime sub-axes.

Every mesh axis is cut into its prime factors ("letters"), so that a part of an axis can move alone. A layout is, for
each dim, the letters that split it, major to minor, and the letters over which the value is still partial. The moves:

    slice           a free letter becomes the minor end of a dim                          0 received
    all_gather      a minor suffix of a dim, n parts, is dropped                          (n - 1) L
    all_to_all      a minor suffix of a dim becomes the minor end of another              (n - 1) / n L
    permute         any other arrangement, free letters included, with equal counts       L
    reduce_scatter  partial letters become the minor end of a dim                         (n - 1) / n L
    all_reduce      partial letters become free                                           2 (n - 1) / n L

L is the block a rank holds before the move. A move costs the latency of the slowest link among its letters plus what
a rank receives over the slowest bandwidth among them.

What a layout still costs is bounded from below by the collectives it needs at least and by the part of its target
block that the unluckiest rank does not hold yet, so that the search proves its answer after few layouts.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

Letters = tuple[int, ...]
Layout = tuple[Letters, ...]


@dataclass(frozen=True)
class Letter:
    """A prime sub-axis: its size, and the latency (seconds) and inverse bandwidth (seconds/byte) of its link."""

    size: int
    latency: float
    inverse_bandwidth: float


@dataclass(frozen=True)
class Question:
    """What is searched for; all that the answer depends on.

    Args:
        letters: every letter that may be used.
        capacities: for each dim, a number that all and only the legal products of letter sizes divide.
        source, target: the layouts.
        partial: the letters to be reduced.
        bytes: of the full tensor.
    """

    letters: tuple[Letter, ...]
    capacities: tuple[int, ...]
    source: Layout
    target: Layout
    partial: Letters
    bytes: float


@dataclass(frozen=True)
class Move:
    """One move: its letters (of a permute: those that change place), the dims, and the layout before and after."""

    kind: str
    letters: Letters
    dims: tuple[int, ...]
    before: Layout
    after: Layout


@dataclass(frozen=True)
class _Node:
    """A layout reached: seconds, received fraction of the full tensor, collectives run so far."""

    layout: Layout
    partial: Letters
    seconds: float
    received: float
    collectives: int
    move: Move | None = None
    parent: _Node | None = None


class _Search:
    """The tables of one question."""

    def __init__(self, question: Question) -> None:
        self.question = question
        self.sizes = tuple(letter.size for letter in question.letters)
        self.latency = tuple(letter.latency for letter in question.letters)
        self.inverse = tuple(letter.inverse_bandwidth * question.bytes for letter in question.letters)
        self.least_latency = min(self.latency, default=0.0)
        self.least_inverse = min(self.inverse, default=0.0)
        self.target_counts = tuple(self.count(letters) for letters in question.target)
        self.target_volume = 1 / math.prod(self.target_counts)
        self.levels = _levels(question.letters)

    def count(self, letters: Letters) -> int:
        return math.prod([self.sizes[letter] for letter in letters])

    def bound(self, layout: Layout, partial: Letters) -> float:
        """Seconds that any way from here to the target takes at least; 0 exactly when slices are enough."""
        wrong = shrinking = 0
        used, both = 1, 1.0
        disjoint = False
        for have, want, want_count in zip(layout, self.question.target, self.target_counts, strict=True):
            have_count = self.count(have)
            used *= have_count
            if have == want[: len(have)]:
                both *= want_count
                continue
            wrong += 1
            shrinking += have_count > want_count
            if want == have[: len(want)]:
                both *= have_count
            else:
                disjoint = True
        if partial:
            parts = self.count(partial)
            free = math.prod(self.sizes) // (used * parts)
            least_block = 1 / (used * free)
            missing = (1 - 1 / parts) * least_block + max(0.0, self.target_volume - least_block / parts)
            steps = 1 + min(wrong, shrinking + 1)
        elif not wrong:
            return 0.0
        else:
            missing = self.target_volume - (0.0 if disjoint else 1 / both)
            steps = min(wrong, shrinking + 1)
        return steps * self.least_latency + missing * self.least_inverse

    def collective(self, kind: str, letters: Letters, received: float) -> tuple[float, float]:
        """Seconds, and the fraction received, of a collective over ``letters``."""
        seconds = max([self.latency[letter] for letter in letters]) + received * max([self.inverse[letter] for letter in letters])
        return seconds, received

    def moves(self, node: _Node) -> Iterator[tuple[float, float, Move, Letters]]:
        """Every move but permutes: seconds, received fraction, move, letters still partial after it."""
        layout, partial = node.layout, node.partial
        question = self.question
        counts = [self.count(letters) for letters in layout]
        block = 1 / math.prod(counts)
        used = {letter for letters in layout for letter in letters}.union(partial)
        for dim, capacity in enumerate(question.capacities):
            for letter in range(len(self.sizes)):
                if letter not in used and capacity % (counts[dim] * self.sizes[letter]) == 0:
                    after = layout[:dim] + (layout[dim] + (letter,),) + layout[dim + 1 :]
                    yield 0.0, 0.0, Move("slice", (letter,), (dim,), layout, after), partial
        for dim, letters in enumerate(layout):
            for cut in range(len(letters)):
                moved = letters[cut:]
                parts = self.count(moved)
                without = layout[:dim] + (letters[:cut],) + layout[dim + 1 :]
                seconds, received = self.collective("all_gather", moved, (parts - 1) * block)
                yield seconds, received, Move("all_gather", moved, (dim,), layout, without), partial
                seconds, received = self.collective("all_to_all", moved, (parts - 1) / parts * block)
                for to, capacity in enumerate(question.capacities):
                    if to != dim and capacity % (counts[to] * parts) == 0:
                        after = without[:to] + (without[to] + moved,) + without[to + 1 :]
                        yield seconds, received, Move("all_to_all", moved, (dim, to), layout, after), partial
        for size in range(1, len(partial) + 1):
            for moved in itertools.permutations(partial, size):
                parts = self.count(moved)
                left = tuple(letter for letter in partial if letter not in moved)
                if moved == tuple(sorted(moved)):
                    seconds, received = self.collective("all_reduce", moved, 2 * (parts - 1) / parts * block)
                    yield seconds, received, Move("all_reduce", moved, (), layout, layout), left
                seconds, received = self.collective("reduce_scatter", moved, (parts - 1) / parts * block)
                for dim, capacity in enumerate(question.capacities):
                    if capacity % (counts[dim] * parts) == 0:
                        after = layout[:dim] + (layout[dim] + moved,) + layout[dim + 1 :]
                        yield seconds, received, Move("reduce_scatter", moved, (dim,), layout, after), left

    def permutes(self, node: _Node, seen: dict[object, float]) -> Iterator[tuple[float, float, Move, Letters]]:
        """The arrangements with the same counts. Their cost depends on the counts and links alone, so that of all layouts
        that can be permuted into each other over the same links only the cheapest one needs to try."""
        counts = tuple(self.count(letters) for letters in node.layout)
        block = 1 / math.prod(counts)
        places = self.places(node.layout)
        for latency, inverse, fixed in self.levels:
            stay = tuple(places.get(letter) for letter in fixed)
            key = (counts, node.partial, fixed, stay)
            if seen.get(key, math.inf) <= node.seconds:
                continue
            seen[key] = node.seconds
            seconds = latency + block * inverse * self.question.bytes
            for after in _arrangements(self.sizes, counts, node.partial):
                if after == node.layout or (fixed and tuple(self.places(after).get(letter) for letter in fixed) != stay):
                    continue
                yield seconds, block, Move("permute", (), (), node.layout, after), node.partial

    def places(self, layout: Layout) -> dict[int, tuple[int, int]]:
        """For each letter that splits a dim, the dim and the product of what lies outside it."""
        found = {}
        for dim, letters in enumerate(layout):
            outer = 1
            for letter in letters:
                found[letter] = (dim, outer)
                outer *= self.sizes[letter]
        return found

    def run(self) -> _Node:
        question = self.question
        start = _Node(question.source, question.partial, 0.0, 0.0, 0)
        first = self.bound(start.layout, start.partial)
        best_known = math.inf
        reached: dict[tuple[Layout, Letters], tuple[float, float, int]] = {(start.layout, start.partial): (0.0, 0.0, 0)}
        tried: dict[object, float] = {}
        counter = itertools.count()
        queue = [(first, 0.0, 0, next(counter), start)]
        digits = 12 - math.ceil(math.log10(max(first, 1e-30)))
        expanded = 0
        while queue:
            _, _, _, _, node = heapq.heappop(queue)
            if reached[(node.layout, node.partial)] < (round(node.seconds, digits), node.received, node.collectives):
                continue
            expanded += 1
            if not node.partial and self.bound(node.layout, node.partial) == 0.0:
                return node
            for seconds, received, move, partial in itertools.chain(self.moves(node), self.permutes(node, tried)):
                total = node.seconds + seconds
                if total > best_known:
                    continue
                left = self.bound(move.after, partial)
                estimate = total + left
                if estimate > best_known * (1 + 1e-12):
                    continue
                if left == 0.0 and not partial:
                    best_known = min(best_known, total)
                collectives = node.collectives + (move.kind != "slice")
                label = (round(total, digits), node.received + received, collectives)
                key = (move.after, partial)
                if key in reached and reached[key] <= label:
                    continue
                reached[key] = label
                child = _Node(move.after, partial, total, node.received + received, collectives, move, node)
                heapq.heappush(queue, (round(estimate, digits), child.received, collectives, next(counter), child))
        raise AssertionError("gathering everything and slicing is always possible")


def solve(question: Question) -> tuple[Move, ...]:
    """The cheapest moves from source to target: by seconds, then bytes, then collectives."""
    return _solve(question)


@lru_cache(maxsize=1 << 18)
def _solve(question: Question) -> tuple[Move, ...]:
    node: _Node | None = _Search(question).run()
    moves: list[Move] = []
    assert node is not None
    layout = node.layout
    while node is not None and node.move is not None:
        moves.append(node.move)
        node = node.parent
    moves.reverse()
    for dim, want in enumerate(question.target):
        if extra := want[len(layout[dim]) :]:
            after = layout[:dim] + (want,) + layout[dim + 1 :]
            moves.append(Move("slice", extra, (dim,), layout, after))
            layout = after
    return tuple(moves)


def _levels(letters: tuple[Letter, ...]) -> tuple[tuple[float, float, Letters], ...]:
    """The prices a permute can have: latency, inverse bandwidth, and the letters too slow to take part."""
    found: dict[Letters, tuple[float, float]] = {}
    for latency in {letter.latency for letter in letters}:
        for inverse in {letter.inverse_bandwidth for letter in letters}:
            slow = tuple(i for i, letter in enumerate(letters) if letter.latency > latency or letter.inverse_bandwidth > inverse)
            if len(slow) < len(letters):
                found[slow] = min(found.get(slow, (math.inf, math.inf)), (latency, inverse))
    return tuple((latency, inverse, slow) for slow, (latency, inverse) in sorted(found.items()))


@lru_cache(maxsize=4096)
def _arrangements(sizes: tuple[int, ...], counts: tuple[int, ...], excluded: Letters) -> tuple[Layout, ...]:
    """Every layout that splits the dims in ``counts`` parts by letters that are not excluded."""
    found: list[Layout] = []

    def fill(dim: int, left: Letters, done: Layout) -> None:
        if dim == len(counts):
            found.append(done)
            return

        def extend(letters: Letters, product: int, left: Letters) -> None:
            if product == counts[dim]:
                fill(dim + 1, left, done + (letters,))
                return
            for letter in left:
                if counts[dim] % (product * sizes[letter]) == 0:
                    extend(letters + (letter,), product * sizes[letter], tuple(x for x in left if x != letter))

        extend((), 1, left)

    fill(0, tuple(letter for letter in range(len(sizes)) if letter not in excluded), ())
    return tuple(found)
