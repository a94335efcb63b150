"""What ranks hold of a dim that is cut, told apart from how plans are made: parts are laid out one after another until nothing is left."""

from __future__ import annotations

import math
from collections.abc import Sequence

from autopar.sharding import ShardingSpec


def lengths(extent: int, ranks: int) -> list[int]:
    """What each of so many ranks holds, the first ones as much as the first.

    >>> lengths(7, 4), lengths(6, 4)
    ([2, 2, 2, 1], [2, 2, 2, 0])
    """
    each, left, found = math.ceil(extent / ranks), extent, []
    for _ in range(ranks):
        found.append(min(each, left))
        left -= found[-1]
    return found


def ranks_of(spec: ShardingSpec, sizes: Sequence[int]) -> list[int]:
    """Among how many ranks each dim is cut."""
    return [math.prod(sizes[axis] for axis in axes) for axes in spec.dims]


def largest(shape: Sequence[int], spec: ShardingSpec, sizes: Sequence[int]) -> tuple[int, ...]:
    """The shape on the rank that holds most."""
    return tuple(max(lengths(extent, ranks)) for extent, ranks in zip(shape, ranks_of(spec, sizes), strict=True))


def held(shape: Sequence[int], spec: ShardingSpec, sizes: Sequence[int]) -> tuple[object, ...]:
    """Which rank holds how much of each dim: one number where all hold as much, else what each part is and the axes that tell whose."""
    found = []
    for extent, axes, ranks in zip(shape, spec.dims, ranks_of(spec, sizes), strict=True):
        cut = lengths(extent, ranks)
        found.append(cut[0] if cut[0] == cut[-1] else (tuple(cut), axes))
    return tuple(found)


def illegal(shape: Sequence[int], spec: ShardingSpec, sizes: Sequence[int]) -> str | None:
    """Why a dim cannot be cut so; None when all can."""
    for dim, (extent, ranks) in enumerate(zip(shape, ranks_of(spec, sizes), strict=True)):
        if len(set(lengths(extent, ranks))) > 1 and sum(sizes[axis] > 1 for axis in spec.dims[dim]) != 1:
            return f"{spec} cuts dim {dim} of size {extent} in {ranks} unequal parts; that is done over one axis alone"
    return None


def halfway(shape: Sequence[int], source: ShardingSpec, target: ShardingSpec, sizes: Sequence[int]) -> ShardingSpec | None:
    """What a reshard goes by way of, where both specs cut a dim in parts whose largest, as often as there are ranks, make different
    lengths: the target with that dim whole. None where there is no such dim."""
    words, changed = str(target).split(), False
    for dim, (extent, before, after) in enumerate(zip(shape, ranks_of(source, sizes), ranks_of(target, sizes), strict=True)):
        if min(before, after) > 1 and lengths(extent, before)[0] * before != lengths(extent, after)[0] * after:
            words[dim], changed = "R", True
    return ShardingSpec.parse(" ".join(words)) if changed else None


def travelling(shape: Sequence[int], source: ShardingSpec, target: ShardingSpec, sizes: Sequence[int]) -> tuple[int, ...]:
    """The shape of a tensor whose parts are as large as the largest, in both specs: what is sent is filled up to it."""
    found = []
    for extent, before, after in zip(shape, ranks_of(source, sizes), ranks_of(target, sizes), strict=True):
        found.append(max(max(lengths(extent, ranks)) * ranks for ranks in (before, after)))
    return tuple(found)
