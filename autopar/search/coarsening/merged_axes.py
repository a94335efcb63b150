"""Merged axes: a mesh with neighbouring axes taken as one. Its plans are plans of the mesh itself, and the search for them is much smaller.

A merged axis stands for its members, major to minor, so that every rank keeps its place: ``S1`` on ``x=4,yz=8`` is ``S12`` on
``x=4,y=2,z=4``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, pairwise

from autopar.cost_models import Machine, Mesh
from autopar.cost_models.collectives import KINDS
from autopar.schedule import Assignment
from autopar.search.choices.pins import Pins
from autopar.sharding import InnerCollective, ShardingSpec, Strategy


@dataclass(frozen=True)
class AxisMerge:
    """A machine with axes merged.

    Args:
        machine: the machine with fewer axes.
        members: for each of its axes, the axes of the mesh itself that are its members.
    """

    machine: Machine
    members: tuple[tuple[int, ...], ...]

    @cached_property
    def _merged_axis(self) -> dict[tuple[int, ...], int]:
        return {word: axis for axis, word in enumerate(self.members)}

    def pins(self, pins: Pins) -> Pins | None:
        """The pins on the merged mesh; None where a pin uses a part of a merged axis."""
        found = []
        for place in (pins.inputs, pins.outputs, pins.tensors):
            specs = {name: self._merge_spec(spec) for name, spec in place.items()}
            if any(spec is None for spec in specs.values()):
                return None
            found.append({name: spec for name, spec in specs.items() if spec is not None})
        inputs, outputs, tensors = found
        asked = {axis for dims in pins.on_axes.values() for axis, _ in dims}
        if not asked <= {axis for word in self.members if len(word) == 1 for axis in word}:
            return None
        alone = {name: tuple((self._merged_axis[axis,], dim) for axis, dim in dims) for name, dims in pins.on_axes.items()}
        return Pins(inputs, outputs, tensors, frozenset(axis for axis, word in enumerate(self.members) if len(word) > 1), alone)

    def _merge_spec(self, spec: ShardingSpec) -> ShardingSpec | None:
        dims = []
        for axes in spec.dims:
            word: list[int] = []
            while axes:
                part = next((part for part in self.members if part and axes[: len(part)] == part), None)
                if part is None:
                    return None
                word.append(self._merged_axis[part])
                axes = axes[len(part) :]
            dims.append(tuple(word))
        return ShardingSpec(tuple(dims)) if not spec.partial else None

    def spec(self, spec: ShardingSpec) -> ShardingSpec:
        """A spec of the merged mesh on the mesh itself."""
        partial = tuple((axis, reduction) for merged, reduction in spec.partial for axis in self.members[merged])
        return ShardingSpec(tuple(map(self._split_axes, spec.dims)), partial)

    def assignment(self, assignment: Assignment) -> Assignment:
        """An assignment of the merged mesh on the mesh itself."""
        return replace(
            assignment,
            inputs={name: self.spec(spec) for name, spec in assignment.inputs.items()},
            strategies={name: self.strategy(strategy) for name, strategy in assignment.strategies.items()},
            layouts=tuple(replace(layout, spec=self.spec(layout.spec)) for layout in assignment.layouts),
        )

    def strategy(self, strategy: Strategy) -> Strategy:
        """A strategy of the merged mesh on the mesh itself."""
        return Strategy(
            tuple(map(self.spec, strategy.inputs)), tuple(map(self.spec, strategy.outputs)), strategy.parts,
            tuple(replace(inner, axes=self._inner_axes(inner)) for inner in strategy.inner),
            tuple((name, self._split_axes(axes)) for name, axes in strategy.factors), strategy.workspace, strategy.turns, strategy.merged,
        )  # fmt: skip

    def _inner_axes(self, inner: InnerCollective) -> tuple[int, ...]:
        """The axes of an inner collective. Places in the group of a permute are ordered, ranks of a reduction are not."""
        axes = self._split_axes(inner.axes)
        return axes if KINDS[inner.kind].ordered else tuple(sorted(axes))

    def _split_axes(self, axes: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(part for axis in axes for part in self.members[axis])


def axis_merges(machine: Machine, axes: int) -> Iterator[AxisMerge]:
    """Every way to merge neighbouring axes of more than one rank so that ``axes`` are left.

    Axes that the hardware gives different links are not merged: one axis cannot have the price of a collective over a part of them.
    """
    mesh, hardware = machine.mesh, machine.hardware
    used = [axis for axis, size in enumerate(mesh.sizes) if size > 1]
    for cuts in combinations(range(1, len(used)), axes - 1):
        words = tuple(tuple(used[begin:end]) for begin, end in pairwise((0, *cuts, len(used))))
        links = [{hardware.axis_link(mesh.names[axis]) for axis in word} for word in words]
        if all(len(found) == 1 for found in links):
            names = ["_".join(mesh.names[axis] for axis in word) for word in words]
            sizes = [math.prod(mesh.sizes[axis] for axis in word) for word in words]
            own = tuple((name, link) for name, found in zip(names, links, strict=True) for link in found if link is not None)
            merged = Mesh(tuple(zip(names, sizes, strict=True)))
            yield AxisMerge(Machine(merged, replace(hardware, axes=own), machine.cost_model, machine.execution), words)
