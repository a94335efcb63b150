"""Which rank sends its block to which in a permute."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from autopar.cost_models import Mesh, SubAxis

Placed = tuple[tuple[SubAxis, ...], ...]
"""For each dim, the parts of mesh axes that split it, major to minor."""


def moving_parts(before: Placed, after: Placed) -> tuple[SubAxis, ...]:
    """The parts of mesh axes that do not keep their place, in the mesh's order."""
    moving = {part for part, _, _ in _places(before) ^ _places(after)}
    return tuple(sorted(moving, key=lambda part: (part.axis, part.outer)))


@lru_cache(maxsize=4096)
def permute_sources(mesh: Mesh, before: Placed, after: Placed) -> tuple[int, ...]:
    """For each rank, the rank whose block under ``before`` is its own under ``after``.

    A bijection. A rank that already holds its block keeps it; the others are matched within the ranks that differ in
    the moving parts alone, so that no block leaves the group that the permute is priced for.

    >>> mesh = Mesh.parse("2x2")
    >>> x, y = mesh.whole(0), mesh.whole(1)
    >>> permute_sources(mesh, ((x,), (y,)), ((y,), (x,)))
    (0, 2, 1, 3)
    """
    moving = moving_parts(before, after)
    holders: dict[tuple[int, ...], list[int]] = {}
    needs: list[tuple[int, ...]] = []
    for rank in range(mesh.ranks):
        group = _without(mesh, rank, moving)
        holders.setdefault((group, *(mesh.index(rank, parts) for parts in before)), []).append(rank)
        needs.append((group, *(mesh.index(rank, parts) for parts in after)))
    keep = [rank in holders[need] for rank, need in enumerate(needs)]
    for rank in range(mesh.ranks):
        if keep[rank]:
            holders[needs[rank]].remove(rank)
    return tuple(rank if keep[rank] else holders[needs[rank]].pop(0) for rank in range(mesh.ranks))


def _without(mesh: Mesh, rank: int, parts: Sequence[SubAxis]) -> int:
    """The first rank of the group over ``parts`` that ``rank`` is in."""
    coordinates = list(mesh.coordinates(rank))
    whole = tuple(coordinates)
    for part in parts:
        size = mesh.sizes[part.axis]
        coordinates[part.axis] -= part.coordinate(whole[part.axis], size) * (size // (part.outer * part.size))
    return mesh.rank(coordinates)


def _places(layout: Placed) -> set[tuple[SubAxis, int, int]]:
    """Each part with its place: the dim it splits and the product of what is outside it there."""
    found = set()
    for dim, parts in enumerate(layout):
        outer = 1
        for part in parts:
            found.add((part, dim, outer))
            outer *= part.size
    return found
