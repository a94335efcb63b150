"""Where collectives run: ``LockstepRanks`` (all ranks in one process) and ``ProcessRanks`` (this process is one rank).

Both give one method, ``collective``, on a list with one local tensor for each rank they host, so that one interpreter serves both.
Semantics (``n`` the group's size, ``i`` the rank's index in it, order row-major over the sub-axes):

| kind | result on rank i |
|---|---|
| all_gather (d) | the group's tensors concatenated along d |
| reduce_scatter (d) | part i of n along d of the group's reduction |
| all_reduce | the group's reduction |
| all_to_all (a, b) | every member's part i of n along b, concatenated along a |
| permute | the tensor of ``sources[rank]`` |
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from autopar.runtime.groups import create_process_groups, group_of
from autopar.runtime.placement import REDUCE
from autopar.torch_compat import functional_collectives
from cost_models import Mesh, SubAxis


@dataclass(frozen=True)
class Exchange:
    """One collective to run, the same on all ranks.

    Args:
        kind: ``all_gather``, ``reduce_scatter``, ``all_reduce``, ``all_to_all`` or ``permute``.
        axes: sub-axes of the group, major to minor.
        dims: ``(d,)``, ``(from, to)`` or ``()``.
        reduction: ``sum``, ``max`` or ``min``.
        sources: for a permute, the rank whose tensor each rank receives.
    """

    kind: str
    axes: tuple[SubAxis, ...]
    dims: tuple[int, ...] = ()
    reduction: str = "sum"
    sources: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        """Ranks in the group."""
        return math.prod(part.size for part in self.axes)

    def full_bytes(self, local: torch.Tensor) -> int:
        """Bytes of the gathered, exchanged or reduced tensor on the group, from the tensor one rank puts in."""
        return local.nbytes * (1 if self.kind in ("all_reduce", "reduce_scatter") else self.size)


class Backend(Protocol):
    """Hosts some ranks of a mesh and runs collectives for them."""

    mesh: Mesh
    ranks: tuple[int, ...]

    def collective(self, exchange: Exchange, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """One new tensor for each hosted rank."""
        ...


def part(tensor: torch.Tensor, dim: int, index: int, count: int) -> torch.Tensor:
    """Part ``index`` of ``count`` equal parts along ``dim``: a view."""
    extent = tensor.shape[dim] // count
    return tensor.narrow(dim, index * extent, extent)


@dataclass(frozen=True)
class LockstepRanks:
    """Every rank of the mesh in this process."""

    mesh: Mesh

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(range(self.mesh.ranks))

    def collective(self, exchange: Exchange, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if exchange.kind == "permute":
            return [tensors[source].clone() for source in exchange.sources]
        found = []
        for rank in self.ranks:
            members = group_of(self.mesh, exchange.axes, rank)
            found.append(_SEMANTICS[exchange.kind]([tensors[member] for member in members], members.index(rank), exchange))
        return found


def _reduced(members: Sequence[torch.Tensor], exchange: Exchange) -> torch.Tensor:
    value = members[0].clone()
    for other in members[1:]:
        REDUCE[exchange.reduction](value, other, out=value)
    return value


def _all_gather(members: Sequence[torch.Tensor], index: int, exchange: Exchange) -> torch.Tensor:
    return torch.cat(list(members), exchange.dims[0])


def _reduce_scatter(members: Sequence[torch.Tensor], index: int, exchange: Exchange) -> torch.Tensor:
    return _reduced([part(member, exchange.dims[0], index, len(members)) for member in members], exchange)


def _all_reduce(members: Sequence[torch.Tensor], index: int, exchange: Exchange) -> torch.Tensor:
    return _reduced(members, exchange)


def _all_to_all(members: Sequence[torch.Tensor], index: int, exchange: Exchange) -> torch.Tensor:
    joined, cut = exchange.dims
    return torch.cat([part(member, cut, index, len(members)) for member in members], joined)


_SEMANTICS = {"all_gather": _all_gather, "reduce_scatter": _reduce_scatter, "all_reduce": _all_reduce, "all_to_all": _all_to_all}


class ProcessRanks:
    """This process as one rank of the mesh, over torch.distributed's default process group.

    Args:
        mesh: its number of ranks is the world size.
        axes: every tuple of sub-axes that will be used. Collective: all ranks construct with the same list.
    """

    def __init__(self, mesh: Mesh, axes: Sequence[tuple[SubAxis, ...]]) -> None:
        self.mesh = mesh
        self.ranks = (dist.get_rank(),)
        self._groups = create_process_groups(mesh, axes)

    def collective(self, exchange: Exchange, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        (tensor,) = tensors
        return [_OVER_GROUP[exchange.kind](tensor, exchange, self._groups[exchange.axes], self.ranks[0])]


_AS_BYTES = (torch.int16, torch.complex64, torch.complex128)
"""Dtypes that gloo cannot move: sent as bytes."""


def _gathered(flat: torch.Tensor, size: int, group: dist.ProcessGroup) -> torch.Tensor:
    """The group's one-dim tensors, one after another."""
    if flat.dtype in _AS_BYTES:
        return _gathered(flat.view(torch.uint8), size, group).view(flat.dtype)
    functional = functional_collectives()
    return functional.wait_tensor(functional.all_gather_into_tensor(flat, size, group.group_name))


def _exchanged(flat: torch.Tensor, received: Sequence[int], sent: Sequence[int], group: dist.ProcessGroup) -> torch.Tensor:
    """One-dim exchange: ``sent[i]`` elements go to member ``i``, ``received[i]`` come from it."""
    if flat.dtype in _AS_BYTES:
        scale = flat.element_size()
        found = _exchanged(flat.view(torch.uint8), [size * scale for size in received], [size * scale for size in sent], group)
        return found.view(flat.dtype)
    functional = functional_collectives()
    return functional.wait_tensor(functional.all_to_all_single(flat, list(received), list(sent), group.group_name))


def _cut(tensor: torch.Tensor, dim: int, count: int) -> torch.Tensor:
    """``[count, ...]``: the equal parts along ``dim``, stacked."""
    shape = tensor.shape
    return tensor.reshape(*shape[:dim], count, shape[dim] // count, *shape[dim + 1 :]).movedim(dim, 0).contiguous()


def _join(stacked: torch.Tensor, dim: int) -> torch.Tensor:
    """The inverse of ``_cut``."""
    moved = stacked.movedim(0, dim)
    return moved.reshape(*moved.shape[:dim], moved.shape[dim] * moved.shape[dim + 1], *moved.shape[dim + 2 :])


def _group_all_gather(tensor: torch.Tensor, exchange: Exchange, group: dist.ProcessGroup, rank: int) -> torch.Tensor:
    stacked = _gathered(tensor.contiguous().view(-1), exchange.size, group)
    return _join(stacked.view(exchange.size, *tensor.shape), exchange.dims[0])


def _group_reduce_scatter(tensor: torch.Tensor, exchange: Exchange, group: dist.ProcessGroup, rank: int) -> torch.Tensor:
    stacked = _cut(tensor, exchange.dims[0], exchange.size)
    functional = functional_collectives()
    reduced = functional.reduce_scatter_tensor(stacked.view(-1), exchange.reduction, exchange.size, group.group_name)
    return functional.wait_tensor(reduced).view(stacked.shape[1:])


def _group_all_reduce(tensor: torch.Tensor, exchange: Exchange, group: dist.ProcessGroup, rank: int) -> torch.Tensor:
    functional = functional_collectives()
    return functional.wait_tensor(functional.all_reduce(tensor.contiguous(), exchange.reduction, group.group_name))


def _group_all_to_all(tensor: torch.Tensor, exchange: Exchange, group: dist.ProcessGroup, rank: int) -> torch.Tensor:
    joined, cut = exchange.dims
    stacked = _cut(tensor, cut, exchange.size)
    each = [stacked[0].numel()] * exchange.size
    return _join(_exchanged(stacked.view(-1), each, each, group).view(stacked.shape), joined)


def _group_permute(tensor: torch.Tensor, exchange: Exchange, group: dist.ProcessGroup, rank: int) -> torch.Tensor:
    """Each rank sends its block to the ranks that name it as their source; a block that stays is copied."""
    if all(source == receiver for receiver, source in enumerate(exchange.sources)):
        return tensor.clone()
    flat, members = tensor.contiguous().view(-1), dist.get_process_group_ranks(group)
    sent = [flat.numel() if exchange.sources[member] == rank and member != rank else 0 for member in members]
    received = [flat.numel() if exchange.sources[rank] == member and member != rank else 0 for member in members]
    outgoing = flat.repeat(sum(size > 0 for size in sent))
    found = _exchanged(outgoing, received, sent, group)
    return tensor.clone() if exchange.sources[rank] == rank else found.view(tensor.shape)


_OVER_GROUP = {
    "all_gather": _group_all_gather,
    "reduce_scatter": _group_reduce_scatter,
    "all_reduce": _group_all_reduce,
    "all_to_all": _group_all_to_all,
    "permute": _group_permute,
}
