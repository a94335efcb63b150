"""The groups of ranks behind a tuple of sub-axes, and their process groups.

A sub-axis ``tp:(2)4`` is the digit of size 4 of the axis' coordinate that has 2 blocks outside it. A group holds the ranks that differ
in those digits alone, ordered row-major over the sub-axes, major to minor. A mesh may be all processes or a part of them: a replica, with
data parallelism around it. A group is made by its members alone, in the same order on each; it waits for others as long as the default
group does.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autopar.cost_models import Mesh, SubAxis
from autopar.schedule import Schedule
from autopar.torch_compat import new_group, timeout_of


@lru_cache(maxsize=4096)
def groups(mesh: Mesh, axes: tuple[SubAxis, ...]) -> tuple[tuple[int, ...], ...]:
    """Every group of ``axes``, by first rank.

    >>> groups(Mesh((("dp", 2), ("tp", 4))), (SubAxis(1, 2, 2),))
    ((0, 1), (2, 3), (4, 5), (6, 7))
    """
    found: dict[int, tuple[int, ...]] = {}
    for rank in range(mesh.ranks):
        members = _members(mesh, rank, axes)
        found.setdefault(members[0], members)
    return tuple(found.values())


@lru_cache(maxsize=65536)
def group_of(mesh: Mesh, axes: tuple[SubAxis, ...], rank: int) -> tuple[int, ...]:
    """The group of ``axes`` that holds ``rank``."""
    return _members(mesh, rank, axes)


def _members(mesh: Mesh, rank: int, axes: Sequence[SubAxis]) -> tuple[int, ...]:
    home = list(mesh.coordinates(rank))
    inside = [mesh.sizes[sub.axis] // (sub.outer * sub.size) for sub in axes]
    for sub, stride in zip(axes, inside, strict=True):
        digit = home[sub.axis] // stride % sub.size
        home[sub.axis] -= digit * stride
    members = []
    for digits in itertools.product(*(range(sub.size) for sub in axes)):
        coordinates = list(home)
        for digit, sub, stride in zip(digits, axes, inside, strict=True):
            coordinates[sub.axis] += digit * stride
        members.append(mesh.rank(tuple(coordinates)))
    return tuple(members)


@dataclass(frozen=True)
class Team:
    """The processes that are the ranks of one mesh.

    Args:
        members: for each rank of the mesh, its process's rank in the world.
        rank: this process's rank in the mesh.
        group: all of them, in the world's order.
    """

    members: tuple[int, ...]
    rank: int
    group: dist.ProcessGroup

    @property
    def first(self) -> int:
        """The rank in the world of the mesh's rank 0."""
        return self.members[0]

    @cached_property
    def world(self) -> int:
        """The number of all processes, asked once: to ask takes 10 us."""
        return dist.get_world_size()


def team_of(device_mesh: DeviceMesh | None = None) -> Team:
    """The processes of a DeviceMesh, or of the whole world. Collective over them."""
    if device_mesh is None:
        world = dist.group.WORLD
        assert world is not None
        return Team(tuple(range(dist.get_world_size())), dist.get_rank(), world)
    members = tuple(device_mesh.mesh.flatten().tolist())
    return Team(members, members.index(dist.get_rank()), _group(tuple(sorted(members))))


_CREATED: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], dist.ProcessGroup]] = WeakKeyDictionary()
"""Process groups by world and by members: communicators are expensive, and modules share them."""


def _group(members: tuple[int, ...]) -> dist.ProcessGroup:
    """The process group of these ranks of the world, in this order. Collective over them."""
    world = dist.group.WORLD
    assert world is not None
    if members == tuple(range(dist.get_world_size())):
        return world
    created = _CREATED.setdefault(world, {})
    if members not in created:
        created[members] = new_group(list(members), timeout=timeout_of(world), use_local_synchronization=True)
    return created[members]


Purpose = tuple[str, tuple[int, ...]]
"""What a group is for, and its ranks in the world: two groups of the same ranks have different communicators."""
_BY_PURPOSE: WeakKeyDictionary[dist.ProcessGroup, dict[Purpose, dist.ProcessGroup]] = WeakKeyDictionary()


def create_in_turn(wanted: Sequence[Purpose]) -> dict[Purpose, dist.ProcessGroup]:
    """Process groups that cross the meshes of stages. Collective over the world: all give the same list, and keep those they are in.

    A group that its members make by themselves is named by how many they have made, which differs from stage to stage.
    """
    world = dist.group.WORLD
    assert world is not None
    created = _BY_PURPOSE.setdefault(world, {})
    for purpose in dict.fromkeys(wanted):
        if purpose not in created:
            created[purpose] = new_group(list(purpose[1]), timeout=timeout_of(world))
    rank = dist.get_rank()
    return {purpose: created[purpose] for purpose in wanted if rank in purpose[1]}


def create_process_groups(mesh: Mesh, wanted: Sequence[tuple[SubAxis, ...]], team: Team) -> dict[tuple[SubAxis, ...], dist.ProcessGroup]:
    """This rank's process group for each tuple of sub-axes. Collective: every rank of the mesh calls it with the same list."""
    assert len(team.members) == mesh.ranks
    found: dict[tuple[SubAxis, ...], dist.ProcessGroup] = {}
    for axes in dict.fromkeys(wanted):
        # The order of the group's ranks is the row-major order of the sub-axes, not that of the world's ranks.
        found[axes] = _group(tuple(team.members[rank] for rank in group_of(mesh, axes, team.rank)))
    return found


def groups_needed(schedule: Schedule) -> tuple[tuple[SubAxis, ...], ...]:
    """Every tuple of sub-axes that a collective of the schedule runs over, in order of first use."""
    found: dict[tuple[SubAxis, ...], None] = {}
    for item in schedule.instructions:
        if item.kind == "start":
            found.update({} if schedule.collectives[item.of].is_transfer else {schedule.collectives[item.of].axes: None})
        elif item.kind == "run":
            inside = schedule.operations[item.of].strategy.inner
            found.update(dict.fromkeys(tuple(map(schedule.machine.mesh.whole, inner.axes)) for inner in inside))
    return tuple(found)
