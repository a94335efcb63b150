"""Mesh: the named grid of ranks. SubAxis: a part of one of its axes.

Ranks are numbered row by row: the last axis is the innermost, so neighbouring ranks differ in it first.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from .errors import MeshError

SHORT_NAMES = ("x", "y", "z", "w")
"""The names of the axes of a mesh written by sizes alone, ``2x4``."""
MOST_AXES = 6
"""Axes of a mesh, at most: with more there are too many ways to split a tensor."""
MOST_RANKS = 2**20

_NAME = re.compile(r"^[A-Za-z_]\w*$")


@dataclass(frozen=True)
class SubAxis:
    """A part of a mesh axis: the axis is cut in ``outer`` x ``size`` x the rest, and this is the middle.

    Args:
        axis: position of the axis in the mesh.
        outer: product of what lies outside the part.
        size: the part's own size.

    The rank at coordinate ``c`` of an axis of size ``s`` has the coordinate ``c // (s // (outer * size)) % size`` here.
    """

    axis: int
    outer: int
    size: int

    def coordinate(self, along_axis: int, axis_size: int) -> int:
        """The coordinate inside the part of a rank at coordinate ``along_axis`` of its axis.

        >>> [SubAxis(0, 2, 2).coordinate(c, 8) for c in range(8)]
        [0, 0, 1, 1, 0, 0, 1, 1]
        """
        return along_axis // (axis_size // (self.outer * self.size)) % self.size

    @cached_property
    def primes(self) -> tuple[SubAxis, ...]:
        """The part cut as finely as can be, major to minor; nothing where its size is 1.

        >>> SubAxis(0, 2, 6).primes
        (SubAxis(axis=0, outer=2, size=2), SubAxis(axis=0, outer=4, size=3))
        """
        parts, outer, prime = [], self.outer, 2
        while outer < self.outer * self.size:
            if self.outer * self.size // outer % prime == 0:
                parts.append(SubAxis(self.axis, outer, prime))
                outer *= prime
            else:
                prime += 1
        return tuple(parts)


@dataclass(frozen=True)
class Mesh:
    """A named grid of ranks.

    Args:
        axes: ``(name, size)`` pairs, outermost first.

    Raises:
        MeshError: no axis, a name used twice or not a word, a size below 1.

    >>> mesh = Mesh.parse("dp=2,tp=4")
    >>> mesh.ranks, mesh.coordinates(5), mesh.rank((1, 1))
    (8, (1, 1), 5)
    """

    axes: tuple[tuple[str, int], ...]

    def __post_init__(self) -> None:
        if not self.axes:
            raise MeshError("the mesh has no axis", "give at least one, e.g. dp=8")
        if len(self.axes) > MOST_AXES:
            raise MeshError(f"the mesh has {len(self.axes)} axes, at most {MOST_AXES} are planned", "merge some: dp=4 is two of size 2")
        for name, size in self.axes:
            if not isinstance(name, str) or not _NAME.match(name):
                raise MeshError(f"{name!r} is not a name for a mesh axis", "use letters, digits and underscores, e.g. dp=2,tp=4")
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise MeshError(f"mesh axis {name} has size {size!r}", "sizes are whole numbers from 1 on")
        if len(set(self.names)) != len(self.axes):
            raise MeshError(f"a mesh axis is named twice in {self}", "every axis needs its own name")
        if self.ranks > MOST_RANKS:
            raise MeshError(f"the mesh {self} has {self.ranks} ranks", f"plans are made for up to {MOST_RANKS}")

    @staticmethod
    def parse(mesh: str | Mapping[str, int] | Mesh) -> Mesh:
        """Reads ``dp=2,tp=4``, ``2x4`` (axes x, y, z, w), a mapping of name to size, or a Mesh.

        Raises:
            MeshError: naming the part that cannot be read.
        """
        if isinstance(mesh, Mesh):
            return mesh
        if isinstance(mesh, Mapping):
            return Mesh(tuple(mesh.items()))
        if not isinstance(mesh, str):
            raise MeshError(f"a mesh cannot be read from a {type(mesh).__name__}", "write dp=2,tp=4, 2x4, or a mapping of names to sizes")
        text = mesh.replace(" ", "")
        if re.fullmatch(r"[0-9]+(x[0-9]+)*", text):
            sizes = [int(word) for word in text.split("x")]
            if len(sizes) > len(SHORT_NAMES):
                hint = f"name the axes of a mesh that has more than {len(SHORT_NAMES)}"
                raise MeshError(f"the mesh {mesh!r} has {len(sizes)} axes without names", hint)
            return Mesh(tuple(zip(SHORT_NAMES, sizes, strict=False)))
        axes = []
        for word in text.split(","):
            name, equals, size = word.partition("=")
            if not equals or not re.fullmatch("[0-9]+", size):
                hint = "write name=size for each axis, e.g. dp=2,tp=4, or sizes alone, e.g. 2x4"
                raise MeshError(f"cannot read {word!r} in the mesh {mesh!r}", hint)
            axes.append((name, int(size)))
        return Mesh(tuple(axes))

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in self.axes)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The axes' names, outermost first."""
        return tuple(name for name, _ in self.axes)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The axes' sizes, outermost first."""
        return tuple(size for _, size in self.axes)

    @cached_property
    def ranks(self) -> int:
        """How many ranks there are."""
        return math.prod(self.sizes)

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """Where ``rank`` stands along each axis."""
        return _coordinates(self.sizes, rank)

    def rank(self, coordinates: Sequence[int]) -> int:
        """The rank at ``coordinates``; the inverse of ``coordinates``."""
        rank = 0
        for size, coordinate in zip(self.sizes, coordinates, strict=True):
            rank = rank * size + coordinate
        return rank

    def whole(self, axis: int) -> SubAxis:
        """The axis as its own part."""
        return SubAxis(axis, 1, self.sizes[axis])

    def sub_axis_name(self, part: SubAxis) -> str:
        """``tp`` for a whole axis, ``tp:(2)4`` for a part: what is outside it, its size."""
        name = self.names[part.axis]
        return name if part.size == self.sizes[part.axis] else f"{name}:({part.outer}){part.size}"

    def index(self, rank: int, parts: Sequence[SubAxis]) -> int:
        """The position of ``rank`` in its group over ``parts``, row-major, the first part major."""
        coordinates, index = self.coordinates(rank), 0
        for part in parts:
            index = index * part.size + part.coordinate(coordinates[part.axis], self.sizes[part.axis])
        return index


@lru_cache(maxsize=2**14)
def _coordinates(sizes: tuple[int, ...], rank: int) -> tuple[int, ...]:
    found = []
    for size in reversed(sizes):
        rank, coordinate = divmod(rank, size)
        found.append(coordinate)
    return tuple(reversed(found))
