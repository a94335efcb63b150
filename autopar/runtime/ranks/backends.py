"""Where collectives run: ``LockstepRanks`` (all ranks in one process), ``SharingRanks`` (the same, in less memory), ``LoneRank`` (one of
them, which receives nothing),
``ProcessRanks`` (this process is one rank), ``TracedRanks`` (one rank while its program is traced).

A backend moves flat buffers, one for each rank it hosts; what is packed into them and what is made of them is common to all (see
``collectives``), so what is tested in lockstep is what runs. ``n`` is the group's size, ``i`` a rank's index in it, in row-major order
over the sub-axes:

| kind | in | out |
|---|---|---|
| all_reduce | m | m: the group's reduction, written over what came in |
| reduce_scatter | n x m | m: part i of the group's reduction |
| all_gather | m | n x m: the group's buffers, one after another |
| all_to_all | n x m | n x m: every member's part i |
| permute | m | m: the buffer of rank ``sources[rank]`` |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.cost_models import Mesh, SubAxis
from autopar.cost_models.collectives import KINDS
from autopar.runtime.ranks.groups import Team, create_process_groups, group_of, team_of
from autopar.runtime.ranks.lent_buffers import Sent, lend
from autopar.runtime.ranks.placement import REDUCE
from autopar.torch_compat import all_gather_single, functional_collectives, reduce_scatter_single

Axes = tuple[SubAxis, ...]


@dataclass(frozen=True)
class Exchange:
    """One collective on flat buffers, the same on all ranks.

    Args:
        kind: see the table of this module.
        axes: sub-axes of the group, major to minor.
        reduction: one of ``autopar.sharding.REDUCTIONS``.
        sources: for a permute, the rank whose buffer each rank receives.
    """

    kind: str
    axes: Axes
    reduction: str = "sum"
    sources: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        """Ranks in the group."""
        return math.prod(part.size for part in self.axes)

    def full_bytes(self, sent: int) -> int:
        """Bytes of the gathered, exchanged or reduced tensors on the group, from those that a rank puts in."""
        return sent * (1 if KINDS[self.kind].takes_full else self.size)


Wait = Callable[[], list[Tensor]]
"""Waits for a collective (on a GPU: lets the current stream wait) and gives what arrived, one flat buffer for each hosted rank."""


Rooms = Sequence[Tensor] | None
"""Flat memory for what each hosted rank receives."""


@dataclass(frozen=True)
class Unequal:
    """Rows of a rank that go to the members of its group, to one after another.

    Args:
        rows: ``[rows, ...]``.
        sent, received: how many go to each member, and how many come from each.
    """

    rows: Tensor
    sent: Sequence[int]
    received: Sequence[int]


class Backend(Protocol):
    """Hosts some ranks of a mesh and moves buffers between them.

    Attributes:
        traced: operators are recorded in a graph, for which buffers are made by operators without side effects.
    """

    traced: bool

    @property
    def mesh(self) -> Mesh: ...

    @property
    def ranks(self) -> tuple[int, ...]: ...

    def start(self, exchange: Exchange, buffers: Sequence[Tensor], rooms: Rooms = None) -> Wait:
        """Begins; a buffer belongs to the collective until it was waited for.

        Args:
            rooms: of an all_gather, the memory to be filled, where buffers are already in their places in it.
        """
        ...

    def exchange(self, exchange: Exchange, given: Sequence[Unequal]) -> list[Tensor]:
        """An all_to_all of unequal parts, waited for at once: what each hosted rank receives, ``[rows, ...]``."""
        ...

    def streams(self, exchange: Exchange) -> bool:
        """Whether a collective can wait for another one by itself; else this thread waits, and what arrived is there for good."""
        ...

    def beside(self, exchange: Exchange) -> AbstractContextManager[Any]:
        """Within it, what is waited for does not hold up the operators that are run later, where there are streams."""
        ...


# --- all ranks in this process -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LockstepRanks:
    """Every rank of the mesh in this process; a collective is over when it has begun."""

    mesh: Mesh
    traced = False

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(range(self.mesh.ranks))

    def start(self, exchange: Exchange, buffers: Sequence[Tensor], rooms: Rooms = None) -> Wait:
        if KINDS[exchange.kind].pairs:
            found = [buffers[source].clone() for source in exchange.sources]
        elif KINDS[exchange.kind].in_place:
            for members in dict.fromkeys(group_of(self.mesh, exchange.axes, rank) for rank in self.ranks):
                first, *others = (buffers[member] for member in members)
                for other in others:
                    REDUCE[exchange.reduction](first, other, out=first)
                for other in others:
                    other.copy_(first)
            found = list(buffers)
        elif rooms is not None:
            found = list(rooms)
            for rank, room in zip(self.ranks, rooms, strict=True):
                for place, member in zip(room.view(exchange.size, -1), group_of(self.mesh, exchange.axes, rank), strict=True):
                    if member != rank:
                        place.copy_(buffers[member])
        else:
            found = []
            for rank in self.ranks:
                members = group_of(self.mesh, exchange.axes, rank)
                found.append(_SEMANTICS[exchange.kind]([buffers[member] for member in members], members.index(rank), exchange))

        def wait(held: Sequence[Tensor] = buffers) -> list[Tensor]:
            return found

        return wait

    def exchange(self, exchange: Exchange, given: Sequence[Unequal]) -> list[Tensor]:
        parts, found = [item.rows.split(list(item.sent)) for item in given], []
        for rank in self.ranks:
            members = group_of(self.mesh, exchange.axes, rank)
            found.append(torch.cat([parts[member][members.index(rank)] for member in members]))
        return found

    def streams(self, exchange: Exchange) -> bool:
        return False

    def beside(self, exchange: Exchange) -> AbstractContextManager[Any]:
        return nullcontext()


class SharingRanks(LockstepRanks):
    """All ranks in this process, for many of them: the ranks of a group share one tensor of what they gather, which no operator may write
    over, and a call holds no more than it must.

    What is gathered is put together when it is waited for, of sources that must not change before; what is reduced, at once.
    """

    def start(self, exchange: Exchange, buffers: Sequence[Tensor], rooms: Rooms = None) -> Wait:
        kind = KINDS[exchange.kind]
        if kind.joins and not kind.cuts:
            return _Gathering(self.groups(exchange), buffers)
        if not (kind.cuts and kind.reduces):
            found = super().start(exchange, buffers)()
            return lambda: found
        parts = list(buffers)
        for members in self.groups(exchange):
            total = _reduced([buffers[member] for member in members], exchange)
            for index, member in enumerate(members):
                parts[member] = _own_part(total, index, exchange).clone()
        return lambda: parts

    def groups(self, exchange: Exchange) -> list[tuple[int, ...]]:
        """The groups of an exchange, each once."""
        return list(dict.fromkeys(tuple(group_of(self.mesh, exchange.axes, rank)) for rank in self.ranks))


class _Gathering:
    """An all-gather: the same tensor for all ranks of a group, made when it is waited for."""

    def __init__(self, groups: Sequence[Sequence[int]], buffers: Sequence[Tensor]) -> None:
        self.groups, self.buffers, self.found = groups, list(buffers), list[Tensor]()

    def __call__(self) -> list[Tensor]:
        if not self.found:
            self.found = list(self.buffers)
            for members in self.groups:
                whole = torch.cat([self.buffers[member] for member in members])
                for member in members:
                    self.found[member] = whole
            self.buffers.clear()
        return self.found


def _reduced(members: Sequence[Tensor], exchange: Exchange) -> Tensor:
    value = members[0].clone()
    for other in members[1:]:
        REDUCE[exchange.reduction](value, other, out=value)
    return value


def _own_part(buffer: Tensor, index: int, exchange: Exchange) -> Tensor:
    return buffer.view(exchange.size, -1)[index]


_SEMANTICS: dict[str, Callable[[Sequence[Tensor], int, Exchange], Tensor]] = {
    "reduce_scatter": lambda members, index, exchange: _reduced([_own_part(member, index, exchange) for member in members], exchange),
    "all_gather": lambda members, index, exchange: torch.cat(list(members)),
    "all_to_all": lambda members, index, exchange: torch.cat([_own_part(member, index, exchange) for member in members]),
}


# --- one rank alone ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LoneRank:
    """One rank of a mesh without the others: what it would receive is memory as it is, or zeros where it may be an index. For counts and
    times of a rank's own work."""

    mesh: Mesh
    rank: int = 0
    traced: bool = False

    @property
    def ranks(self) -> tuple[int, ...]:
        return (self.rank,)

    def start(self, exchange: Exchange, buffers: Sequence[Tensor], rooms: Rooms = None) -> Wait:
        (buffer,) = buffers
        kind = KINDS[exchange.kind]
        size = buffer.numel() * (exchange.size if kind.joins else 1) // (exchange.size if kind.cuts else 1)
        make = buffer.new_empty if buffer.is_floating_point() else buffer.new_zeros
        found = rooms[0] if rooms is not None else buffer if kind.in_place else make(size)

        def wait(held: Sequence[Tensor] = buffers) -> list[Tensor]:
            return [found]

        return wait

    def exchange(self, exchange: Exchange, given: Sequence[Unequal]) -> list[Tensor]:
        (item,) = given
        return [item.rows.new_zeros(sum(item.received), *item.rows.shape[1:])]

    def streams(self, exchange: Exchange) -> bool:
        return False

    def beside(self, exchange: Exchange) -> AbstractContextManager[Any]:
        return nullcontext()


# --- this process as one rank ------------------------------------------------------------------------------------------


class ProcessRanks:
    """This process as one rank of the mesh, over torch.distributed.

    NCCL runs each group's collectives on a stream of the group's own, which begins after what the current stream has been given so far.

    Args:
        mesh: its number of ranks is that of the team.
        axes: every tuple of sub-axes that will be used. Collective: all ranks construct with the same list.
        team: the processes that are its ranks; the whole world when not given.
    """

    traced = False

    def __init__(self, mesh: Mesh, axes: Sequence[Axes], team: Team | None = None) -> None:
        self.mesh, self.team = mesh, team or team_of()
        self.ranks = (self.team.rank,)
        self.groups = create_process_groups(mesh, axes, self.team)
        self._streams: dict[Axes, Any] = {}

    def start(self, exchange: Exchange, buffers: Sequence[Tensor], rooms: Rooms = None) -> Wait:
        (buffer,) = buffers
        if rooms is not None:
            (room,) = rooms
            return Sent(*_gathered(buffer, room, self.groups[exchange.axes]), buffer)
        ends = self.ends(exchange) if KINDS[exchange.kind].pairs else None
        return Sent(*_OVER_GROUP[exchange.kind](buffer, exchange, self.groups[exchange.axes], ends), buffer)

    def exchange(self, exchange: Exchange, given: Sequence[Unequal]) -> list[Tensor]:
        (item,) = given
        return list(Sent(*_exchanged(item, self.groups[exchange.axes]), item.rows)())

    def ends(self, exchange: Exchange) -> Ends:
        """Of a permute, for each member of the group: 1 where this rank's buffer goes there; 1 where the one it receives comes from."""
        members, rank, sources = group_of(self.mesh, exchange.axes, self.team.rank), self.team.rank, exchange.sources
        sent = [int(sources[member] == rank and member != rank) for member in members]
        return sent, [int(sources[rank] == member and member != rank) for member in members]

    def streams(self, exchange: Exchange) -> bool:
        return "nccl" in dist.get_backend(self.groups[exchange.axes])

    def beside(self, exchange: Exchange) -> AbstractContextManager[Any]:
        """On a GPU a stream of the group's own, so that a call that follows another one waits there; on CPUs this thread waits."""
        if not self.streams(exchange):
            return nullcontext()
        stream = self._streams.setdefault(exchange.axes, torch.cuda.Stream())
        stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(stream)


_AS_BYTES = frozenset({
    torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.complex32, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
})  # fmt: skip
"""Dtypes that gloo cannot move: sent as bytes."""
_REDUCTIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN, "product": dist.ReduceOp.PRODUCT}
_ALL_GATHER, _REDUCE_SCATTER = all_gather_single(), reduce_scatter_single()
Started = tuple[Any, Tensor, Sequence[Tensor]]
"""The work in flight, its result, and the tensors that it reads and writes."""
Ends = tuple[list[int], list[int]]
"""Where a rank's buffer goes, and where it comes from, by member of the group."""


def _plain(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8) if tensor.dtype in _AS_BYTES else tensor


def _all_reduce(buffer: Tensor, exchange: Exchange, group: dist.ProcessGroup, ends: Ends | None) -> Started:
    lent = lend(buffer)
    return dist.all_reduce(lent, _REDUCTIONS[exchange.reduction], group, async_op=True), buffer, (lent,)


def _reduce_scatter(buffer: Tensor, exchange: Exchange, group: dist.ProcessGroup, ends: Ends | None) -> Started:
    out = buffer.new_empty(buffer.numel() // exchange.size)
    lent = lend(out), lend(buffer)
    return _REDUCE_SCATTER(*lent, _REDUCTIONS[exchange.reduction], group, async_op=True), out, lent


def _all_gather(buffer: Tensor, exchange: Exchange, group: dist.ProcessGroup, ends: Ends | None) -> Started:
    return _gathered(buffer, buffer.new_empty(buffer.numel() * exchange.size), group)


def _gathered(buffer: Tensor, out: Tensor, group: dist.ProcessGroup) -> Started:
    lent = lend(_plain(out)), lend(_plain(buffer))
    return _ALL_GATHER(*lent, group, async_op=True), out, lent


def _all_to_all(buffer: Tensor, exchange: Exchange, group: dist.ProcessGroup, ends: Ends | None) -> Started:
    out = torch.empty_like(buffer)
    lent = lend(_plain(out)), lend(_plain(buffer))
    return dist.all_to_all_single(*lent, group=group, async_op=True), out, lent


def _exchanged(item: Unequal, group: dist.ProcessGroup) -> Started:
    """As ``_all_to_all``, of unequal parts."""
    rows, out = item.rows.contiguous(), item.rows.new_empty(sum(item.received), *item.rows.shape[1:])
    lent = lend(_plain(out)), lend(_plain(rows))
    return dist.all_to_all_single(*lent, list(item.received), list(item.sent), group=group, async_op=True), out, lent


def _permute(buffer: Tensor, exchange: Exchange, group: dist.ProcessGroup, ends: Ends | None) -> Started:
    """Each rank sends its buffer to the ranks that name it as their source; one that stays is copied."""
    assert ends is not None
    size, (sent, received) = _plain(buffer).numel(), ends
    out = torch.empty_like(buffer) if any(received) else buffer.clone()
    outgoing = _repeated(_plain(buffer), sum(sent))
    incoming = _plain(out) if any(received) else outgoing.new_empty(0)
    lent = lend(incoming), lend(outgoing)
    sizes = [size * count for count in received], [size * count for count in sent]
    return dist.all_to_all_single(*lent, *sizes, group=group, async_op=True), out, lent


def _repeated(buffer: Tensor, times: int) -> Tensor:
    return buffer if times == 1 else buffer.repeat(times)


_OVER_GROUP: dict[str, Callable[[Tensor, Exchange, dist.ProcessGroup, Ends | None], Started]] = {
    "all_reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
    "all_to_all": _all_to_all,
    "permute": _permute,
}


def exchange_parts(sent: Sequence[Tensor], received: Sequence[torch.Size], group: dist.ProcessGroup) -> list[Tensor]:
    """What each member of a group sends this rank, waited for.

    Args:
        sent: for each member, all of one dtype.
        received: the shape that comes from each member.
    """
    buffer = torch.cat([part.reshape(-1) for part in sent])
    counts = [shape.numel() for shape in received]
    out = buffer.new_empty(sum(counts))
    lent = lend(_plain(out)), lend(_plain(buffer))
    work = dist.all_to_all_single(*lent, counts, [part.numel() for part in sent], group=group, async_op=True)
    (arrived,) = Sent(work, out, lent, buffer)()
    return [part.view(shape) for part, shape in zip(arrived.split(counts), received, strict=True)]


# --- one rank while it is traced ---------------------------------------------------------------------------------------


class TracedRanks(ProcessRanks):
    """This process as one rank, by functional collectives, which a graph can hold and ``torch.compile`` understands."""

    traced = True

    def start(self, exchange: Exchange, buffers: Sequence[Tensor], rooms: Rooms = None) -> Wait:
        (buffer,) = buffers
        plain, functional, group = _plain(buffer), functional_collectives(), self.groups[exchange.axes].group_name
        if not KINDS[exchange.kind].pairs:
            started = _FUNCTIONAL[exchange.kind](functional, plain, exchange, group)
            return lambda: [_as(buffer, functional.wait_tensor(started))]
        sent, received = self.ends(exchange)
        sizes = [plain.numel() * count for count in received], [plain.numel() * count for count in sent]
        started = functional.all_to_all_single(_repeated(plain, sum(sent)), *sizes, group)
        if any(received):
            return lambda: [_as(buffer, functional.wait_tensor(started))]
        return lambda: [_as(buffer, torch.cat([plain, functional.wait_tensor(started)]))]

    def streams(self, exchange: Exchange) -> bool:
        return False

    def beside(self, exchange: Exchange) -> AbstractContextManager[Any]:
        return nullcontext()


def _as(buffer: Tensor, found: Tensor) -> Tensor:
    return found if found.dtype == buffer.dtype else found.view(buffer.dtype)


def _even(buffer: Tensor, exchange: Exchange) -> list[int]:
    return [buffer.numel() // exchange.size] * exchange.size


_FUNCTIONAL: dict[str, Callable[[Any, Tensor, Exchange, str], Tensor]] = {
    "all_reduce": lambda ops, buffer, exchange, group: ops.all_reduce(buffer, exchange.reduction, group),
    "reduce_scatter": lambda ops, buffer, exchange, group: ops.reduce_scatter_tensor(buffer, exchange.reduction, exchange.size, group),
    "all_gather": lambda ops, buffer, exchange, group: ops.all_gather_into_tensor(buffer, exchange.size, group),
    "all_to_all": lambda ops, buffer, exchange, group: ops.all_to_all_single(
        buffer, _even(buffer, exchange), _even(buffer, exchange), group
    ),
}
