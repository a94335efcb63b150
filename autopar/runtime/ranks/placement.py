"""Global tensors cut into the parts ranks hold and put together again; ShardingSpec to DTensor placements and back.

A dim split by several axes is cut major to minor, so every rank holds one contiguous block of each dim. DTensor cuts mesh axes
in their own order: where a more major axis comes later in the mesh (``S10``), it needs a strided shard, whose ``split_factor``
is the number of blocks that later, more major axes have already made. A dim that is in blocks of itself (``S0/3``) is cut before all.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from autopar.cost_models import Mesh
from autopar.errors import MismatchError
from autopar.schedule import Schedule
from autopar.sharding import REDUCTIONS, ShardingSpec
from autopar.torch_compat import split_factor_of, strided_shard


def local_part(tensor: torch.Tensor, spec: ShardingSpec, mesh: Mesh, rank: int) -> torch.Tensor:
    """What ``rank`` holds of a global ``tensor``: a view of its block, a copy of its parts of a dim of several.

    A partial sum is the whole value on the first rank of its axes and zero on the others; a partial maximum or minimum is the value on all.
    """
    return part_at(tensor, spec, mesh.sizes, mesh.coordinates(rank))


def part_at(tensor: torch.Tensor, spec: ShardingSpec, sizes: Sequence[int], coordinates: Sequence[int]) -> torch.Tensor:
    """``local_part`` of the rank at these coordinates of a mesh of these sizes."""
    if spec.blocks:
        return part_at(*_apart(tensor, spec), sizes, coordinates).reshape(spec.local_shape(tensor.shape, sizes))
    part = tensor
    for dim, axes in enumerate(spec.dims):
        if axes:
            extent = tensor.shape[dim]
            part = part.narrow(dim, *spec.span(dim, extent, sizes, coordinates))
    if any(coordinates[axis] for axis, reduction in spec.partial if reduction == "sum"):
        part = torch.zeros_like(part)
    return part


def _apart(tensor: torch.Tensor, spec: ShardingSpec) -> tuple[torch.Tensor, ShardingSpec]:
    """A tensor, or a part of it, with each dim in blocks as two, the block and the place in it, and its spec then."""
    dims = list(spec.dims)
    for dim, count in reversed(spec.blocks):
        tensor = tensor.unflatten(dim, (count, -1))
        dims.insert(dim, ())
    return tensor, ShardingSpec(tuple(dims), spec.partial)


def scatter(tensor: torch.Tensor, spec: ShardingSpec, mesh: Mesh) -> list[torch.Tensor]:
    """The parts of all ranks, each in its own storage."""
    return [local_part(tensor, spec, mesh, rank).clone(memory_format=torch.contiguous_format) for rank in range(mesh.ranks)]


def gather(parts: Sequence[torch.Tensor], spec: ShardingSpec, mesh: Mesh) -> torch.Tensor:
    """The global tensor of which ``parts`` are the ranks' parts; of replicas the first rank's counts."""
    sizes = mesh.sizes
    shape = tuple(sum(parts[rank].shape[dim] for rank in _along(mesh, axes)) for dim, axes in enumerate(spec.dims))
    if spec.blocks:
        return gather([_apart(part, spec)[0] for part in parts], _apart(parts[0], spec)[1], mesh).reshape(shape)
    whole = parts[0].new_empty(shape)
    held = set(spec.split_axes)
    for rank in range(mesh.ranks):
        coordinates = mesh.coordinates(rank)
        if any(coordinates[axis] for axis in range(len(sizes)) if axis not in held):
            continue
        block = [parts[peer] for peer in _peers(mesh, rank, spec.partial_axes)]
        local_part(whole, ShardingSpec(spec.dims), mesh, rank).copy_(_reduce(block, spec))
    return whole


def _along(mesh: Mesh, axes: Sequence[int]) -> list[int]:
    """The ranks at the origin of all axes but these."""
    others = [axis for axis in range(len(mesh.sizes)) if axis not in axes]
    return [rank for rank in range(mesh.ranks) if not any(mesh.coordinates(rank)[axis] for axis in others)]


def replica_difference(parts: Sequence[torch.Tensor], spec: ShardingSpec, mesh: Mesh) -> float:
    """The largest difference between two ranks that should hold the same block (0 for partial values, which differ by nature)."""
    if spec.partial:
        return 0.0
    first: dict[tuple[int, ...], torch.Tensor] = {}
    worst = 0.0
    for rank, part in enumerate(parts):
        coordinates = mesh.coordinates(rank)
        other = first.setdefault(tuple(coordinates[axis] for axis in spec.split_axes), part)
        if part.numel() and other is not part:
            worst = max(worst, difference(part, other))
    return worst


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """max|a-b| of tensors of one shape; equal infinities agree; what is not a number on one side alone is the largest float."""
    a, b = in_double(one.detach()), in_double(other.detach())
    agree, largest = (a == b) | (a.isnan() & b.isnan()), sys.float_info.max
    return torch.where(agree, 0.0, (a - b).abs()).nan_to_num(nan=largest, posinf=largest).max().item()


def in_double(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in the widest dtype of its kind, so that differences are exact; both parts of complex numbers."""
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _peers(mesh: Mesh, rank: int, axes: Sequence[int]) -> list[int]:
    """The ranks that differ from ``rank`` along ``axes`` alone."""
    home = mesh.coordinates(rank)
    others = [axis for axis in range(len(mesh.sizes)) if axis not in axes]
    return [peer for peer in range(mesh.ranks) if all(mesh.coordinates(peer)[axis] == home[axis] for axis in others)]


def _reduce(parts: Sequence[torch.Tensor], spec: ShardingSpec) -> torch.Tensor:
    reductions = {reduction for _, reduction in spec.partial}
    assert len(reductions) <= 1, f"{spec} mixes reductions"
    value = parts[0]
    for part in parts[1:]:
        value = REDUCE[next(iter(reductions))](value, part)
    return value


REDUCE = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum, "product": torch.mul}
assert set(REDUCE) == set(REDUCTIONS)


def to_placements(spec: ShardingSpec, sizes: Sequence[int]) -> tuple[Placement, ...]:
    """DTensor's placements, one for each mesh axis."""
    placements: list[Placement] = [Replicate() for _ in sizes]
    blocks = dict(spec.blocks)
    for dim, axes in enumerate(spec.dims):
        for position, axis in enumerate(axes):
            later = blocks.get(dim, 1) * math.prod(sizes[other] for other in axes[:position] if other > axis)
            placements[axis] = Shard(dim) if later == 1 else strided_shard(dim, later)
    for axis, reduction in spec.partial:
        placements[axis] = Partial(reduction)
    return tuple(placements)


def from_placements(placements: Sequence[Placement], rank: int, sizes: Sequence[int]) -> ShardingSpec:
    """The spec of a DTensor of ``rank`` dims placed so on axes of these sizes; axes of size 1 are dropped.

    Raises:
        MismatchError: a placement that has no spec.
    """
    dims: list[list[int]] = [[] for _ in range(rank)]
    partial: list[tuple[int, str]] = []
    blocks: dict[int, int] = {}
    for axis in reversed(range(len(sizes))):
        placement = placements[axis]
        if sizes[axis] == 1 or placement.is_replicate():
            continue
        if isinstance(placement, Partial):
            if type(placement) is not Partial or placement.reduce_op not in REDUCTIONS:
                raise MismatchError(f"the placement {placement} has no sharding spec", f"use Partial with one of {', '.join(REDUCTIONS)}")
            partial.append((axis, placement.reduce_op))
            continue
        factor = split_factor_of(placement)
        if factor is None:
            raise MismatchError(f"the placement {placement} has no sharding spec", "use Shard, Replicate or Partial")
        axes = dims[placement.dim]
        count = blocks.setdefault(placement.dim, factor)  # what is cut before any axis has cut is not cut by axes
        products = [count * math.prod(sizes[other] for other in axes[:position]) for position in range(len(axes) + 1)]
        if factor not in products:
            raise MismatchError(f"the strided shard {placement} does not fit a mesh of sizes {list(sizes)}", "use Shard placements")
        axes.insert(products.index(factor), axis)
    return ShardingSpec(tuple(map(tuple, dims)), tuple(partial), tuple(blocks.items()))


def to_dtensor(local: torch.Tensor, spec: ShardingSpec, shape: Sequence[int], device_mesh: DeviceMesh) -> DTensor:
    """The DTensor whose part on this rank is ``local``."""
    size = torch.Size(shape)
    stride = tuple(math.prod(size[dim + 1 :]) for dim in range(len(size)))
    placements = to_placements(spec, tuple(device_mesh.shape))
    return DTensor.from_local(local, device_mesh, placements, run_check=False, shape=size, stride=stride)


def own_shape(schedule: Schedule, value: str, rank: int) -> tuple[int, ...]:
    """The shape that a rank holds of a value with a spec."""
    mesh = schedule.machine.mesh
    return schedule.specs[value].own_shape(schedule.graph.tensors[schedule.values[value].tensor].shape, mesh.sizes, mesh.coordinates(rank))
