"""How mesh axes are cut into letters for the search.

The finest cut, every axis in its prime factors, makes the search exact and, where these are many, slow: three axes of 8 have 9 letters,
and 9! arrangements. There an axis is first cut only where its link changes (a part inside a node, a part across nodes). The search is then
repeated with finer cuts, each time only for what beats the answer so far: two parts at a time cut so that pieces of equal size can change
places. On every mesh of up to 64 ranks tried, these cuts find what the finest one finds (``tests/test_reshard.py`` compares them).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from autopar.cost_models import Machine, SubAxis
from autopar.reshard.letters import Alphabet, Letter, Letters, alphabet

MOST_PRIMES = 4
"""Prime factors of a mesh up to which the finest cut is searched."""


@dataclass(frozen=True)
class Cut:
    """A way to cut the mesh's axes: for each axis its parts, major to minor."""

    axes: tuple[tuple[SubAxis, ...], ...]
    machine: Machine

    @property
    def parts(self) -> tuple[SubAxis, ...]:
        """Every part; a letter is a position in this list."""
        return tuple(itertools.chain.from_iterable(self.axes))

    @cached_property
    def alphabet(self) -> Alphabet:
        """What the search knows of the parts."""
        return alphabet(tuple(Letter(part.size, self.machine.link(part), self.machine.links((part,))) for part in self.parts))

    def spell(self, axes: Iterable[int]) -> Letters:
        """Mesh axes, major to minor, in letters."""
        return tuple([letter for axis in axes for letter in self._letters[axis]])

    @cached_property
    def _letters(self) -> tuple[range, ...]:
        """Those of each axis."""
        ends = tuple(itertools.accumulate(len(parts) for parts in self.axes))
        return tuple(map(range, (0, *ends), ends))


@lru_cache(maxsize=1024)
def cuts(machine: Machine, unused: tuple[int, ...] = (), fine: bool = True) -> tuple[Cut, ...]:
    """The cuts to search with, coarse to fine, leaving out the ``unused`` axes: the coarsest alone where not ``fine``, the finest where its
    parts are few, since that finds what all others do."""
    primes = tuple(() if axis in unused else machine.mesh.whole(axis).primes for axis in range(len(machine.mesh.axes)))
    by_link = tuple(tuple(_joined_by_link(parts, machine)) for parts in primes)
    found = [Cut(by_link, machine)]
    if fine and sum(map(len, primes)) <= MOST_PRIMES:
        return (Cut(primes, machine),)
    if fine:
        for one, other in itertools.combinations(found[0].parts, 2):
            divisor = math.gcd(one.size, other.size)
            for major in (True, False):
                pieces = {part: _pieces(part, divisor if major else part.size // divisor) for part in (one, other)}
                found.append(Cut(tuple(tuple(p for part in parts for p in pieces.get(part, (part,))) for parts in by_link), machine))
    return tuple(dict.fromkeys(found))


def prime_cut(machine: Machine) -> Cut:
    """Every axis in its prime factors."""
    return Cut(tuple(machine.mesh.whole(axis).primes for axis in range(len(machine.mesh.axes))), machine)


def joined(parts: Sequence[SubAxis]) -> tuple[SubAxis, ...]:
    """Neighbouring parts of one axis as one part."""
    found: list[SubAxis] = []
    for part in parts:
        last = found[-1] if found else None
        if last is not None and last.axis == part.axis and last.outer * last.size == part.outer:
            found[-1] = SubAxis(last.axis, last.outer, last.size * part.size)
        else:
            found.append(part)
    return tuple(found)


def _joined_by_link(parts: Sequence[SubAxis], machine: Machine) -> Iterable[SubAxis]:
    for _, run in itertools.groupby(parts, key=machine.link):
        yield from joined(tuple(run))


def _pieces(part: SubAxis, first: int) -> tuple[SubAxis, ...]:
    """``part`` in two: ``first`` and the rest; in one where that is nothing to cut."""
    if first in (1, part.size):
        return (part,)
    return SubAxis(part.axis, part.outer, first), SubAxis(part.axis, part.outer * first, part.size // first)
