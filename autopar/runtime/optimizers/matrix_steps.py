"""Matrices of which ranks hold parts are made orthogonal whole, for Muon: the ranks that split them share them out.

Each of these ranks is the owner of some matrices. An all-to-all brings each owner the parts of one. Another brings the ranks their parts of
what was made of it. So the computation is that of one device, and each matrix is computed once in its group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar.cost_models import Mesh
from autopar.runtime.ranks.backends import exchange_parts
from autopar.runtime.ranks.groups import create_process_groups, team_of
from autopar.runtime.ranks.placement import from_placements, gather, local_part
from autopar.sharding import ShardingSpec


def make_each_orthogonal(directions: Sequence[Tensor], likes: Sequence[DTensor], make: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """This rank's parts of what is made of matrices. Collective over their meshes.

    Args:
        directions: this rank's parts of the matrices, of one dtype.
        likes: for each matrix a DTensor that lies as it does, and is no partial sum.
        make: from a whole matrix to another of its shape and dtype.

    Raises:
        MismatchError: a placement that has no spec.
    """
    groups: dict[tuple[DeviceMesh, tuple[int, ...]], list[int]] = {}
    specs = [from_placements(like.placements, like.dim(), tuple(like.device_mesh.shape)) for like in likes]
    for number, (like, spec) in enumerate(zip(likes, specs, strict=True)):
        groups.setdefault((like.device_mesh, tuple(sorted(spec.split_axes))), []).append(number)
    made = list(directions)
    for (device_mesh, axes), numbers in groups.items():
        if not axes:
            for number in numbers:
                made[number] = make(directions[number])
            continue
        group = _Group(device_mesh, axes)
        for turn in zip_longest(*share_out([likes[number].shape for number in numbers], group.mesh.ranks)):
            turned = [None if place is None else numbers[place] for place in turn]
            for number, part in group.take_turn(turned, directions, specs, likes, make):
                made[number] = part
    return made


def share_out(shapes: Sequence[Sequence[int]], ranks: int) -> list[list[int]]:
    """For each rank the matrices, by number, that it owns: the largest first, each to the rank that has least to do so far.

    >>> share_out([(4, 4), (8, 8), (4, 4)], 2)
    [[1], [0, 2]]
    """
    work = [min(shape) * rows * columns for shape in shapes for rows, columns in (shape,)]
    owned, loads = [list[int]() for _ in range(ranks)], [0] * ranks
    for number in sorted(range(len(shapes)), key=lambda number: -work[number]):
        rank = loads.index(min(loads))
        owned[rank].append(number)
        loads[rank] += work[number]
    return owned


class _Group:
    """The ranks that split some matrices: a mesh of their own, of the axes that do.

    Attributes:
        mesh: of these axes, in the order of the whole mesh.
        rank: this process's in it.
    """

    def __init__(self, device_mesh: DeviceMesh, axes: tuple[int, ...]) -> None:
        names = device_mesh.mesh_dim_names or [f"axis{axis}" for axis in range(device_mesh.ndim)]
        whole = Mesh(tuple(zip(names, device_mesh.shape, strict=True)))
        team, parts = team_of(device_mesh), tuple(map(whole.whole, axes))
        coordinates = whole.coordinates(team.rank)
        self.axes = axes
        self.mesh = Mesh(tuple(whole.axes[axis] for axis in axes))
        self.rank = self.mesh.rank(tuple(coordinates[axis] for axis in axes))
        self.processes: dist.ProcessGroup = create_process_groups(whole, [parts], team)[parts]

    def take_turn(
        self, turn: Sequence[int | None], directions: Sequence[Tensor], specs: Sequence[ShardingSpec], likes: Sequence[Tensor],
        make: Callable[[Tensor], Tensor],
    ) -> list[tuple[int, Tensor]]:  # fmt: skip
        """This rank's parts of what the ranks of the group make of a matrix each, by the matrix's number.

        Args:
            turn: the matrix of each rank of the group; None of one that has none in this turn.
        """
        nothing, mine = directions[0].new_empty(0), turn[self.rank]
        mine_cut: list[Tensor] = [nothing] * self.mesh.ranks
        if mine is not None:
            room = directions[0].new_empty(likes[mine].shape)
            mine_cut = self._cut(room, specs[mine])
        sent = [nothing if number is None else directions[number] for number in turn]
        arrived = self._exchange(sent, mine_cut)
        if mine is not None:
            spec = self._spec(specs[mine])
            mine_cut = self._cut(make(gather(arrived, spec, self.mesh)), specs[mine])
        parts = self._exchange(mine_cut, sent)
        return [(number, part) for number, part in zip(turn, parts, strict=True) if number is not None]

    def _spec(self, spec: ShardingSpec) -> ShardingSpec:
        """A matrix's spec on the group's own mesh."""
        names = {axis: place for place, axis in enumerate(self.axes)}
        return ShardingSpec(tuple(tuple(names[axis] for axis in axes) for axes in spec.dims), (), spec.blocks)

    def _cut(self, whole: Tensor, spec: ShardingSpec) -> list[Tensor]:
        """The parts of all ranks of the group."""
        own = self._spec(spec)
        return [local_part(whole, own, self.mesh, rank) for rank in range(self.mesh.ranks)]

    def _exchange(self, sent: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
        """What each rank of the group sends this one, of shapes that are known; ``sent`` goes to each of them."""
        return exchange_parts(sent, [part.shape for part in like], self.processes)
