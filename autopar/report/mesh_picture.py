"""The ranks of a mesh as a grid with node borders, and which part of a weight each holds: what the page's drawing draws."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.plan import Plan
from autopar.report import units
from autopar.report.colours import PARTS, text_on
from autopar.report.parallelism_words import Way
from autopar.sharding import ShardingSpec

ACROSS = 64
"""Ranks in a row, at most. A longer last axis goes on in the next row."""
DOWN = 64
"""Rows of one block, at most. Further rows stand in blocks to the right."""
RANKS = 16384
"""Ranks that are drawn, at most: cells of more would be smaller than two pixels."""


@dataclass(frozen=True)
class Grid:
    """Where ranks stand: rank ``r`` in row ``r // across``, column ``r % across`` of the rows, which are cut into ``blocks`` side by side.

    Args:
        ranks: how many are drawn.
        down: rows of a block.
    """

    ranks: int
    across: int
    down: int
    blocks: int


def lay_out(sizes: Sequence[int], per_node: int) -> Grid:
    """The grid of a mesh: the last axis across where it is short enough, else the largest part of it that is, in whole nodes if it can.

    >>> lay_out((8, 8), 8), lay_out((512, 8), 8), lay_out((64,), 8)
    (Grid(ranks=64, across=8, down=8, blocks=1), Grid(ranks=4096, across=8, down=64, blocks=8), Grid(ranks=64, across=8, down=8, blocks=1))
    """
    ranks = min(math.prod(sizes), RANKS)
    row = sizes[-1]
    if len(sizes) == 1 and row > per_node and row % per_node == 0:
        row = per_node
    if row > ACROSS:
        row = max(size for size in range(1, ACROSS + 1) if row % size == 0)
    across = min(row, ranks)
    rows = -(-ranks // across)
    blocks = -(-rows // DOWN)
    return Grid(ranks, across, -(-rows // blocks), blocks)


def place_of(shape: Sequence[int], spec: ShardingSpec, sizes: Sequence[int]) -> list[dict[str, object]]:
    """For each split dim: its number, its extent, into how many parts, and by how much each axis's coordinate moves the part's number."""
    found: list[dict[str, object]] = []
    for dim, axes in enumerate(spec.dims):
        if not axes:
            continue
        strides = [0] * len(sizes)
        step = 1
        for axis in reversed(axes):
            strides[axis], step = step, step * sizes[axis]
        found.append({"dim": dim, "extent": shape[dim], "parts": step, "strides": strides, "blocks": bool(dict(spec.blocks).get(dim))})
    return found


def mesh_data(plan: Plan, rows: Sequence[Way]) -> Mapping[str, object]:
    """What the drawing draws: the grid, the axes, and each way's parts."""
    per_node = int(plan.hardware.get("devices_per_node") or 1)
    grid = lay_out(plan.sizes, per_node)
    return {
        "axes": [[name, size] for name, size in plan.mesh.items()], "perNode": per_node, "ranks": grid.ranks, "across": grid.across,
        "down": grid.down, "blocks": grid.blocks, "colours": [[colour, text_on(colour)] for colour in PARTS],
        "ways": [
            {
                "title": way.title, "spec": way.spec or "R", "words": way.words, "shape": units.shape(way.shape),
                "place": place_of(way.shape, ShardingSpec.parse(way.spec), plan.sizes),
            }
            for way in rows
        ],
    }  # fmt: skip


def mesh_words(plan: Plan) -> str:
    """The grid in words."""
    per_node = int(plan.hardware.get("devices_per_node") or 1)
    grid, ranks = lay_out(plan.sizes, per_node), math.prod(plan.sizes)
    names = list(plan.mesh)
    nodes = -(-ranks // per_node)
    words = f"{ranks} ranks in {nodes} node{'s' * (nodes > 1)} of up to {per_node}"
    if grid.across == plan.sizes[-1] and len(names) > 1:
        words += f": {names[-1]} across, {' x '.join(names[:-1])} down"
    elif len(names) == 1:
        words += f": {names[0]} row by row"
    else:
        words += f": {names[-1]} across, {plan.sizes[-1] // grid.across} rows each, {' x '.join(names[:-1])} down"
    if grid.blocks > 1:
        words += f", in {grid.blocks} blocks from left to right"
    return words + (f"; the first {grid.ranks} are drawn" if grid.ranks < ranks else "") + ". Frames are nodes."
