"""The groups of ranks behind a tuple of sub-axes, and their process groups.

A sub-axis ``tp:(2)4`` is the digit of size 4 of the axis' coordinate that has 2 blocks outside it. A group holds the ranks that differ
in those digits alone, ordered row-major over the sub-axes, major to minor. Every rank creates every group, in the same order; they wait for
others as long as the default group does.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache
from weakref import WeakKeyDictionary

import torch.distributed as dist

from autopar.torch_compat import timeout_of
from cost_models import Mesh, SubAxis


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


_CREATED: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], dist.ProcessGroup]] = WeakKeyDictionary()
"""Process groups already created, by members, for each world: communicators are dear, and modules share them."""


def create_process_groups(mesh: Mesh, wanted: Sequence[tuple[SubAxis, ...]]) -> dict[tuple[SubAxis, ...], dist.ProcessGroup]:
    """This rank's process group for each tuple of sub-axes. Collective: every rank calls it with the same list."""
    world = dist.group.WORLD
    assert world is not None and dist.get_world_size() == mesh.ranks
    created, rank = _CREATED.setdefault(world, {}), dist.get_rank()
    found: dict[tuple[SubAxis, ...], dist.ProcessGroup] = {}
    for axes in dict.fromkeys(wanted):
        for members in groups(mesh, axes):
            if members not in created:
                # The order of the group's ranks is the row-major order of the sub-axes, not that of the world's ranks.
                created[members] = dist.new_group(list(members), sort_ranks=False, timeout=timeout_of(world))
            if rank in members:
                found[axes] = created[members]
    return found
