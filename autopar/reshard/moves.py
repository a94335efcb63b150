"""What is asked of a search for the cheapest way from one layout to another, its moves, and its answer.

The moves, with L the fraction of the tensor that a rank holds before the move and n the parts that move:

    slice           a free letter becomes the minor end of a dim                          0 received
    all_gather      a minor suffix of a dim is dropped                                    (n - 1) L
    all_to_all      a minor suffix of a dim becomes the minor end of another              (n - 1) / n L
    permute         any other arrangement, free letters included, with equal counts       L
    reduce_scatter  partial letters become the minor end of a dim                         (n - 1) / n L
    all_reduce      partial letters become free                                           2 (n - 1) / n L

A move costs what the links of its letters ask for its kind: a latency, and what a rank receives over a bandwidth.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from autopar.reshard.letters import Alphabet, LetterLayout, Letters

State = tuple[LetterLayout, Letters]
"""A layout and the letters over which its value is still partial."""
Child = tuple[float, str, Letters, tuple[int, ...], State]
"""Fraction received, kind, letters and dims of a move, and where it leads."""


@dataclass(frozen=True)
class Question:
    """What is searched for; all that the answer depends on.

    Args:
        alphabet: every letter that may be used; compared by identity, since ``letters.alphabet`` gives equal letters one alphabet.
        capacities: for each dim, a number that all and only the legal products of letter sizes divide.
        source, target: the layouts.
        partial: the letters to be reduced.
        bytes: of the full tensor.
        limit: seconds; only a cheaper way is of interest.
    """

    alphabet: Alphabet
    capacities: tuple[int, ...]
    source: LetterLayout
    target: LetterLayout
    partial: Letters
    bytes: float
    limit: float = math.inf


@dataclass(frozen=True)
class Move:
    """One move: its letters (none for a permute), the dims, and the layout before and after."""

    kind: str
    letters: Letters
    dims: tuple[int, ...]
    before: LetterLayout
    after: LetterLayout


@dataclass(frozen=True)
class Way:
    """An answer: the moves, and their seconds."""

    moves: tuple[Move, ...]
    seconds: float


def with_word(layout: LetterLayout, dim: int, letters: Letters) -> LetterLayout:
    """The layout with other letters on a dim."""
    return layout[:dim] + (letters,) + layout[dim + 1 :]


def moves_from(alphabet: Alphabet, capacities: tuple[int, ...], state: State) -> Iterator[Child]:
    """Every move but permutes, which ``Alphabet.arrangements`` tells."""
    layout, partial = state
    counts = [alphabet.count(letters) for letters in layout]
    block = 1 / math.prod(counts)

    def room(parts: int) -> list[int]:
        return [dim for dim, capacity in enumerate(capacities) if capacity % (counts[dim] * parts) == 0]

    used = {letter for letters in layout for letter in letters}.union(partial)
    for letter, size in enumerate(alphabet.sizes):
        if letter not in used:
            for dim in room(size):
                yield 0.0, "slice", (letter,), (dim,), (with_word(layout, dim, layout[dim] + (letter,)), partial)
    for dim, letters in enumerate(layout):
        for cut in range(len(letters)):
            moved = letters[cut:]
            parts = alphabet.count(moved)
            without = with_word(layout, dim, letters[:cut])
            received = (parts - 1) * block
            yield received, "all_gather", moved, (dim,), (without, partial)
            for to in room(parts):
                if to != dim:
                    yield received / parts, "all_to_all", moved, (dim, to), (with_word(without, to, without[to] + moved), partial)
    for size in range(1, len(partial) + 1):
        for moved in itertools.permutations(partial, size):
            parts = alphabet.count(moved)
            left = tuple(letter for letter in partial if letter not in moved)
            received = (parts - 1) / parts * block
            if moved == tuple(sorted(moved)):
                yield 2 * received, "all_reduce", moved, (), (layout, left)
            for dim in room(parts):
                yield received, "reduce_scatter", moved, (dim,), (with_word(layout, dim, layout[dim] + moved), left)
