"""Parameters in blocks as operators read them."""

from __future__ import annotations

import math

from autopar.rows import EnteringSpec, ParameterSpec, TensorSpec
from autopar.sharding import ShardingSpec


def in_graph(row: EnteringSpec, sizes: tuple[int, ...]) -> TensorSpec:
    """The row of what enters, a dim in blocks as the two that operators read: the block, and the place in it.

    ``S0/3`` is ``R S0``. Axes without blocks split whole blocks as far as they go: ``S01`` on 3 times 4 ranks is ``S0 S1``. A row that does
    not fit its blocks stays as it is, of another shape than operators read.
    """
    if not isinstance(row, ParameterSpec) or row.blocks is None:
        return row
    (dim, count), words = row.blocks, row.spec.split()
    if dim >= len(row.shape) or row.shape[dim] % count or len(words) != len(row.shape):
        return row
    axes, _, blocks = words[dim].lstrip("RS").partition("/")
    if blocks and (blocks != str(count) or len(axes) > 1):
        return row
    taken = 0 if blocks else _axes_of(count, axes, sizes)
    if count % math.prod(sizes[int(axis)] for axis in axes[:taken] if int(axis) < len(sizes)):
        return row
    split = [f"S{some}" if some else "R" for some in (axes[:taken], axes[taken:])]
    shape = (*row.shape[:dim], count, row.shape[dim] // count, *row.shape[dim + 1 :])
    return row.model_copy(update={"shape": shape, "spec": " ".join((*words[:dim], *split, *words[dim + 1 :]))})


def misfit(row: EnteringSpec, sizes: tuple[int, ...]) -> str | None:
    """Why a parameter in blocks cannot lie as its row says; None when it can, and of what has no blocks."""
    if not isinstance(row, ParameterSpec) or row.blocks is None:
        return None
    (dim, count), problem = row.blocks, ShardingSpec.parse(row.spec).problem(row.shape, sizes)
    if problem is None and in_graph(row, sizes) is row:
        problem = f"dim {dim} of {list(row.shape)} is {count} equal blocks, each of which would have to be cut alike; {row.spec} does not"
    return problem


def _axes_of(count: int, axes: str, sizes: tuple[int, ...]) -> int:
    """How many axes, the first ones, make one part of each of so many blocks; all of them where none do."""
    parts = [math.prod(sizes[int(axis)] for axis in axes[:number] if int(axis) < len(sizes)) for number in range(len(axes) + 1)]
    return parts.index(count) if count in parts else len(axes)
