"""Letters: the parts of mesh axes that the search moves, and what can be known of a layout from its letters alone.

A layout is, for each dim, the letters that split it, major to minor. What a layout still costs is bounded from below
by the collectives it needs at least, and by the part of its target block that the unluckiest rank does not hold yet.
Where links differ, the ranks joined by fast links count as one for the slow ones: what that one has to receive, each of its
ranks receives an equal share of at least.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from autopar.cost_models.collectives import KINDS
from autopar.cost_models.links import Link, group_over

Letters = tuple[int, ...]
LetterLayout = tuple[Letters, ...]
Places = tuple[tuple[int, tuple[int, int]] | None, ...]


@dataclass(frozen=True)
class Letter:
    """A part of a mesh axis: its size, its link, and the names of all links that a collective along it holds."""

    size: int
    link: Link
    held: tuple[str, ...]

    def least(self) -> tuple[float, float]:
        """The least latency (seconds) and inverse bandwidth (seconds/byte) of a collective that this letter takes part in: further
        letters add steps and slower links, so of each kind it is the collective over this letter alone."""
        alone = [group_over(kind, [(self.link, self.size)]) for kind in KINDS]
        return min(group.latency for group in alone), min(1 / group.bandwidth for group in alone)


@dataclass(frozen=True)
class Divide:
    """Slow letters against fast ones; ``slow`` is empty where all links are taken as equal.

    Args:
        slow: letters whose link is slower than some bandwidth.
        latency, inverse: (slow, fast) pairs, the least that a collective with such a letter pays; infinite for no slow letters.
        fast_ranks: how many ranks the fast letters join.
    """

    slow: frozenset[int]
    latency: tuple[float, float]
    inverse: tuple[float, float]
    fast_ranks: int


@dataclass(frozen=True)
class Match:
    """How the letters on one dim compare with those wanted there.

    Args:
        count: into how many parts they cut the dim.
        wrong: some of them have to go.
        shrinks: wrong, and the dim is cut in more parts than wanted.
        both: into how many parts these and the wanted letters cut it together; 0 when a rank's two blocks can be disjoint.
        slow: for each divide, into how many parts the slow letters cut the dim.
        slow_both: for each divide, ``both`` for the blocks of ranks joined by fast links.
    """

    count: int
    wrong: bool
    shrinks: bool
    both: int
    slow: tuple[int, ...]
    slow_both: tuple[int, ...]


class Alphabet:
    """What the search looks up about its letters; shared by all questions in the same letters."""

    def __init__(self, letters: tuple[Letter, ...]) -> None:
        self.letters = letters
        self.sizes = tuple(letter.size for letter in letters)
        self.latency = tuple(letter.least()[0] for letter in letters)
        self.inverse = tuple(letter.least()[1] for letter in letters)
        self._figures: dict[tuple[str, Letters], tuple[float, float]] = {}
        self._counts: dict[Letters, int] = {}
        self.ranks = math.prod(self.sizes)
        self.divides = tuple(self._divides())
        self.permute_prices = tuple(self._permute_prices())
        self._matches: dict[Letters, dict[Letters, Match]] = {}
        self._arrangements: dict[tuple[tuple[int, ...], Letters, Letters], dict[Places, list[LetterLayout]]] = {}

    def figures(self, kind: str, letters: Letters) -> tuple[float, float]:
        """Latency (seconds) and inverse bandwidth (seconds/byte) of a collective over ``letters``."""
        found = self._figures.get((kind, letters))
        if found is None:
            group = group_over(kind, [(self.letters[letter].link, self.sizes[letter]) for letter in letters])
            found = self._figures[kind, letters] = (group.latency, 1 / group.bandwidth)
        return found

    def count(self, letters: Letters) -> int:
        """Into how many parts ``letters`` cut a dim."""
        found = self._counts.get(letters)
        if found is None:
            found = self._counts[letters] = math.prod([self.sizes[letter] for letter in letters])
        return found

    def slow_count(self, letters: Letters, divide: Divide) -> int:
        """Into how many parts the slow ones among ``letters`` cut a dim."""
        return math.prod([self.sizes[letter] for letter in letters if letter in divide.slow])

    def spans(self, letters: Letters) -> Iterator[tuple[int, tuple[int, int]]]:
        """Each letter with the product of what lies outside it on its dim, and that times its size."""
        outer = 1
        for letter in letters:
            yield letter, (outer, outer * self.sizes[letter])
            outer *= self.sizes[letter]

    def matches(self, want: Letters) -> dict[Letters, Match]:
        """The known matches of letters with ``want``, filled by ``match``."""
        return self._matches.setdefault(want, {})

    def match(self, have: Letters, want: Letters) -> Match:
        """Compares the letters on a dim with those wanted there."""
        shared = next((i for i, (a, b) in enumerate(zip(have, want, strict=False)) if a != b), min(len(have), len(want)))
        count, want_count = self.count(have), self.count(want)
        wrong = shared < len(have)
        found = Match(
            count,
            wrong,
            wrong and count > want_count,
            max(count, want_count) if shared in (len(have), len(want)) else 0,
            tuple(self.slow_count(have, divide) for divide in self.divides),
            tuple(self._slow_both(have, want, divide) for divide in self.divides),
        )
        self._matches[want][have] = found
        return found

    def twins(self, wanted: Letters) -> dict[int, Letters]:
        """Letters that the target does not use, each with all that are like it."""
        free = [i for i in range(len(self.letters)) if i not in wanted]
        return {i: tuple(j for j in free if self.letters[j] == self.letters[i]) for i in free}

    def places(self, layout: LetterLayout, letters: Letters) -> Places:
        """Where each of ``letters`` stands: the dim and its span there, None when it is free."""
        found = {letter: (dim, span) for dim, word in enumerate(layout) for letter, span in self.spans(word)} if letters else {}
        return tuple([found.get(letter) for letter in letters])

    def arrangements(self, counts: tuple[int, ...], excluded: Letters, fixed: Letters, places: Places) -> Sequence[LetterLayout]:
        """Every layout that cuts the dims in ``counts`` parts by letters that are not excluded, with ``fixed`` at ``places``."""
        key = (counts, excluded, fixed)
        if key not in self._arrangements:
            left = tuple(letter for letter in range(len(self.sizes)) if letter not in excluded)
            by_place: dict[Places, list[LetterLayout]] = {}
            for layout in self._arranged(counts, left):
                by_place.setdefault(self.places(layout, fixed), []).append(layout)
            self._arrangements[key] = by_place
        return self._arrangements[key][places]

    def _arranged(self, counts: tuple[int, ...], left: Letters) -> Iterator[LetterLayout]:
        if not counts:
            yield ()
            return
        for first in self._words(counts[0], left):
            rest = tuple(letter for letter in left if letter not in first)
            for others in self._arranged(counts[1:], rest):
                yield (first, *others)

    def _words(self, count: int, left: Letters) -> Iterator[Letters]:
        if count == 1:
            yield ()
            return
        for letter in left:
            if count % self.sizes[letter] == 0:
                for word in self._words(count // self.sizes[letter], tuple(other for other in left if other != letter)):
                    yield (letter, *word)

    def _divides(self) -> Iterator[Divide]:
        letters = range(len(self.sizes))
        for inverse in sorted(set(self.inverse)):
            slow = frozenset(i for i in letters if self.inverse[i] > inverse)
            fast = [i for i in letters if i not in slow]
            yield Divide(
                slow,
                (min((self.latency[i] for i in slow), default=math.inf), min(self.latency[i] for i in fast)),
                (min((self.inverse[i] for i in slow), default=math.inf), min(self.inverse[i] for i in fast)),
                math.prod(self.sizes[i] for i in fast),
            )

    def _permute_prices(self) -> Iterator[tuple[float, float, Letters]]:
        """The prices that a permute can have: latency, inverse bandwidth, and the letters too slow to take part."""
        found: dict[Letters, tuple[float, float]] = {}
        each = [self.figures("permute", (i,)) for i in range(len(self.sizes))]
        for latency in {latency for latency, _ in each}:
            for inverse in {inverse for _, inverse in each}:
                slow = tuple(i for i, one in enumerate(each) if one[0] > latency or one[1] > inverse)
                if len(slow) < len(self.sizes):
                    found[slow] = min(found.get(slow, (math.inf, math.inf)), (latency, inverse))
        for slow, (latency, inverse) in sorted(found.items()):
            yield latency, inverse, slow

    def _slow_both(self, have: Letters, want: Letters, divide: Divide) -> int:
        held, wanted = ({span: letter for letter, span in self.spans(letters) if letter in divide.slow} for letters in (have, want))
        both = 1
        for span, letter in held.items():
            if wanted.get(span, letter) != letter:
                return 0
            both *= self.sizes[letter]
        for span, letter in wanted.items():
            if span not in held and all(span[1] <= other[0] or other[1] <= span[0] for other in held):
                both *= self.sizes[letter]
        return both


@lru_cache(maxsize=1024)
def alphabet(letters: tuple[Letter, ...]) -> Alphabet:
    """The lookups for ``letters``."""
    return Alphabet(letters)
