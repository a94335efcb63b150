"""Inputs of which each rank passes rows of its own: the splits of the batch to choose from."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import TYPE_CHECKING

from autopar.cost_models import Mesh
from autopar.errors import UsageError
from autopar.graph import Graph
from autopar.sharding import ShardingSpec

if TYPE_CHECKING:
    from autopar.schedule import Schedule


def row_pins(graph: Graph, mesh: Mesh) -> Iterator[dict[str, str]]:
    """Pins for every set of axes that cuts the batch in equal parts: all inputs that have it are split alike along dim 0, others are whole.

    An input has the batch where its dim 0 is that of the first input, as for microbatches.
    """
    shapes = {item.name: graph.tensors[item.tensor].shape for item in graph.of_kind("input")}
    batch = next((shape[0] for shape in shapes.values() if shape), 0)
    wide = [axis for axis, size in enumerate(mesh.sizes) if size > 1]
    for count in range(1, len(wide) + 1):
        for axes in combinations(wide, count):
            if batch and batch % math.prod(mesh.sizes[axis] for axis in axes) == 0:
                yield {f"input:{name}": str(_rows(shape, batch, axes)) for name, shape in shapes.items() if shape}


def _rows(shape: Sequence[int], batch: int, axes: tuple[int, ...]) -> ShardingSpec:
    """Of an input: its rows split by the axes where it has the batch."""
    whole = ShardingSpec.replicated(len(shape))
    return ShardingSpec((axes, *whole.dims[1:])) if shape[0] == batch else whole


def joined(rows: Mapping[str, str], pins: Mapping[str, str], mesh: Mesh) -> dict[str, str]:
    """The user's pins and those of the rows.

    Raises:
        UsageError: a pin splits an input otherwise.
    """
    for name, text in rows.items():
        given = pins.get(name, text)
        if ShardingSpec.parse(given, mesh.names).normalized(mesh.sizes) != ShardingSpec.parse(text):
            message = f"the pin {name}={given!r} is not {text!r}: inputs='local' splits the rows of all inputs alike"
            raise UsageError(message, "leave out the pin, or pin all inputs that have the batch alike")
    return {**rows, **pins}


def lying_inputs(schedule: Schedule) -> dict[str, str]:
    """How the inputs of a plan lie, as pins."""
    return {f"input:{item.name}": str(schedule.specs[item.tensor]) for item in schedule.graph.of_kind("input")}


def check_rows(graph: Graph, meshes: Sequence[Mesh]) -> None:
    """Raises UsageError: no mesh has axes that cut the batch in equal parts."""
    if not any(True for mesh in meshes for _ in row_pins(graph, mesh)):
        rows = ", ".join(f"{item.name} {list(graph.tensors[item.tensor].shape)}" for item in graph.of_kind("input")) or "no input"
        tried = " or ".join(map(str, meshes[:3]))
        message = f"inputs='local' needs a batch that an axis of more than one rank divides; on {tried} there is none for {rows}"
        raise UsageError(message, "choose a batch that the ranks divide, or feed whole batches with inputs='global'")
