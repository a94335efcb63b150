"""What this rank holds of a DTensor in blocks: a part of each block, at its place in the whole tensor.

torch's checkpoints and state dicts know of one contiguous box a rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from autopar.errors import MismatchError
from autopar.runtime.ranks.placement import from_placements, part_at
from autopar.torch_compat import Chunk, has_blocks


def chunks(tensor: DTensor) -> list[Chunk] | None:
    """The parts, each with its offsets in the whole tensor; None where it is not in blocks, and one part says it all."""
    if not has_blocks(tensor):
        return None
    device_mesh = tensor.device_mesh
    coordinates, sizes = device_mesh.get_coordinate(), tuple(device_mesh.shape)
    assert coordinates is not None, "checkpoints ask the ranks of the mesh alone"
    spec = from_placements(tensor.placements, tensor.dim(), sizes)
    counts = dict(spec.blocks)

    def along(dim: int) -> Iterator[tuple[int, int, int]]:
        """Place in the whole, place in the part, and length."""
        extent = tensor.shape[dim] // counts.get(dim, 1)
        start, length = spec.span(dim, extent, sizes, coordinates)
        for block in range(counts.get(dim, 1)):
            yield block * extent + start, block * length, length

    found: list[tuple[tuple[int, ...], torch.Tensor]] = [((), tensor.to_local())]
    for dim in range(tensor.dim()):
        found = [((*offsets, here), part.narrow(dim, at, length)) for offsets, part in found for here, at, length in along(dim)]
    return found


def part_of(whole: torch.Tensor, placements: Iterable[Placement], device_mesh: DeviceMesh) -> torch.Tensor | None:
    """What this rank holds of a whole tensor that lies so; None where no spec says it."""
    coordinates, sizes = device_mesh.get_coordinate(), tuple(device_mesh.shape)
    assert coordinates is not None, "the ranks of the mesh alone ask"
    try:
        spec = from_placements(tuple(placements), whole.dim(), sizes)
    except MismatchError:
        return None
    return part_at(whole, spec, sizes, coordinates)
