"""What ranks hold of a dim that is cut, told apart from how plans are made: parts are laid out one after another until nothing is left."""

from __future__ import annotations

import math
from collections.abc import Sequence

from autopar.sharding import ShardingSpec


def lengths(extent: int, cuts: Sequence[int]) -> list[int]:
    """What each rank holds of what is cut in so many parts, and each of these again: of a part the first ones as much as the first.

    >>> lengths(7, [4]), lengths(6, [4]), lengths(6, [2, 2]), lengths(6, [])
    ([2, 2, 2, 1], [2, 2, 2, 0], [2, 1, 2, 1], [6])
    """
    found = [extent]
    for count in cuts:
        pieces = []
        for whole in found:
            each, left = math.ceil(whole / count), whole
            for _ in range(count):
                pieces.append(min(each, left))
                left -= pieces[-1]
        found = pieces
    return found


def cuts_of(spec: ShardingSpec, sizes: Sequence[int]) -> list[list[int]]:
    """Among how many ranks each dim is cut, an axis at a time."""
    return [[sizes[axis] for axis in axes if sizes[axis] > 1] for axes in spec.dims]


def largest(shape: Sequence[int], spec: ShardingSpec, sizes: Sequence[int]) -> tuple[int, ...]:
    """The shape on the rank that holds most."""
    return tuple(max(lengths(extent, cuts)) for extent, cuts in zip(shape, cuts_of(spec, sizes), strict=True))


def held(shape: Sequence[int], spec: ShardingSpec, sizes: Sequence[int]) -> tuple[object, ...]:
    """Which rank holds how much of each dim: one number where all hold as much, else what each part is and the axes that tell whose."""
    found = []
    for extent, axes, cuts in zip(shape, spec.dims, cuts_of(spec, sizes), strict=True):
        parts = lengths(extent, cuts)
        found.append(parts[0] if parts[0] == parts[-1] else (tuple(parts), axes))
    return tuple(found)


def illegal(shape: Sequence[int], spec: ShardingSpec, sizes: Sequence[int]) -> str | None:
    """Why a dim cannot be cut so; None when all can."""
    for dim, (extent, cuts) in enumerate(zip(shape, cuts_of(spec, sizes), strict=True)):
        axes = [axis for axis in spec.dims[dim] if sizes[axis] > 1]
        if len(set(lengths(extent, cuts))) > 1 and axes != sorted(axes):
            return f"{spec} cuts dim {dim} of size {extent} in {math.prod(cuts)} unequal parts; such are cut in the mesh's order of axes"
    return None


def halfway(shape: Sequence[int], source: ShardingSpec, target: ShardingSpec, sizes: Sequence[int]) -> ShardingSpec | None:
    """What a reshard goes by way of, where both specs cut a dim in parts whose largest, as often as there are ranks, make different
    lengths, or do so at other places: the target with that dim whole. None where there is no such dim."""
    words, changed = str(target).split(), False
    for dim, (extent, before, after) in enumerate(zip(shape, cuts_of(source, sizes), cuts_of(target, sizes), strict=True)):
        if before and after and before != after:
            full = [max(lengths(extent, cuts)) * math.prod(cuts) for cuts in (before, after)]
            if set(full) != {extent}:
                words[dim], changed = "R", True
    return ShardingSpec.parse(" ".join(words)) if changed else None


def travelling(shape: Sequence[int], source: ShardingSpec, target: ShardingSpec, sizes: Sequence[int]) -> tuple[int, ...]:
    """The shape of a tensor whose parts are as large as the largest, in both specs: what is sent is filled up to it."""
    found = []
    for extent, *both in zip(shape, cuts_of(source, sizes), cuts_of(target, sizes), strict=True):
        found.append(max(max(lengths(extent, cuts)) * math.prod(cuts) for cuts in both))
    return tuple(found)
