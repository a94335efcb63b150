"""A schedule's collectives bound to a backend: values are packed into a flat buffer, the buffer travels, values are made of what arrives.

Who copies what is said once, in the table of ``schedule.Collective``. A flat buffer that a group's ranks cut or join is ``[n, ...]``: row i
holds block i of each part, in order. So a bucket needs no other layout than a single value, and a value whose blocks are runs of memory
is such a buffer already.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from autopar.cost_models import Mesh, SubAxis
from autopar.cost_models.collectives import KINDS
from autopar.runtime.ranks.backends import Backend, Exchange, Wait
from autopar.runtime.ranks.filling import fitted, lay_out, put_together
from autopar.runtime.ranks.groups import group_of
from autopar.schedule import Collective
from autopar.schedule.collectives import Part
from autopar.torch_compat import copy_each

Values = dict[str, Tensor]
"""A rank's local tensors by value name."""
GONE = torch.empty(0)
"""Stands for a value that only a call holds, until it is freed."""


@dataclass(frozen=True)
class Observed:
    """A collective that was executed, in the words of the plan's list; its bytes are those of the buffers that were sent.

    Numbers of rows that an earlier operator was told are listed again, as the plan lists them.

    Args:
        tensor, before: what it is made of and for; None of a bucket.
        parts: of a bucket: the same, and the bytes, of each.
        spared: what it read, or a call before it that it had to wait for, whose memory it gave back before its own wait; with the id of
            the call from whose start on it was not there.
    """

    kind: str
    axes: tuple[SubAxis, ...]
    phase: str
    bytes: int
    tensor: str | None = None
    before: str | None = None
    parts: tuple[tuple[str, str, int], ...] = ()
    spared: tuple[tuple[str, str], ...] = ()

    def row(self, mesh: Mesh) -> dict[str, Any]:
        """As JSON."""
        names = [mesh.sub_axis_name(item) for item in self.axes]
        what: dict[str, Any] = {"tensor": self.tensor, "before": self.before}
        if self.parts:
            what = {"parts": [dict(zip(("tensor", "before", "bytes"), part, strict=True)) for part in self.parts]}
        return {"kind": self.kind, "axes": names, "phase": self.phase, **what, "bytes": self.bytes}


@dataclass
class Flight:
    """A call under way.

    Args:
        wait: for its buffers.
        held: what must stay alive until it was waited for.
        landed: its targets on each hosted rank, where a later call has had to wait for it already.
    """

    wait: Wait | None
    held: Sequence[Any] = ()
    landed: Sequence[Values] | None = None

    def hand_over(self, ranks: Sequence[Values]) -> None:
        """Puts the targets that have landed among the values of each hosted rank."""
        assert self.landed is not None
        for held, landed in zip(ranks, self.landed, strict=True):
            held.update(landed)


Flights = dict[str, Flight]
"""The calls under way, by id."""


def exchange_of(collective: Collective) -> Exchange:
    """What a backend is asked for."""
    step = collective.parts[0].step
    return Exchange(step.kind, step.axes, step.reduction or "sum", step.sources or ())


def exchange_inside(mesh: Mesh, kind: str, axes: Sequence[int], reduction: str) -> Exchange:
    """What a backend is asked for by an operator with collectives inside, over whole axes; ``reduction`` as in ``InnerCollective``."""
    whole = tuple(mesh.whole(axis) for axis in axes)
    if not KINDS[kind].pairs:
        return Exchange(kind, whole, reduction)
    groups = [group_of(mesh, whole, rank) for rank in range(mesh.ranks)]
    return Exchange(kind, whole, sources=tuple(group[SOURCE[reduction](group.index(rank))] for rank, group in enumerate(groups)))


SOURCE: Mapping[str, Callable[[int], int]] = {"mirror": lambda place: -1 - place, "next": lambda place: place - 1}
"""By the word of a permute inside an operator: from a rank's place in the group to the place that it receives from."""


class Bringing(Protocol):
    """A call whose targets a later call reads while it is under way."""

    @property
    def of(self) -> Collective: ...

    @property
    def last(self) -> Sequence[str]: ...

    @property
    def targets(self) -> Sequence[str]: ...

    def land(self, flight: Flight, ranks: Sequence[Values]) -> None: ...


class Call:
    """A collective bound to a backend.

    Args:
        of: the collective.
        earlier: the calls still in flight when it starts that bring what it reads: they are waited for first.
        last: of what it reads, what nobody reads after it: it is the call's alone until it is freed, and where it had to be copied to lie
            in order, it goes at once.
    """

    def __init__(self, of: Collective, backend: Backend, earlier: Sequence[Bringing] = (), last: Set[str] = frozenset()) -> None:
        step = of.parts[0].step
        self.last = () if of.packs or len(of.parts) > 1 else tuple(last)
        self.of, self.backend, self.earlier = of, backend, earlier
        self.exchange = exchange_of(of)
        self.sources, self.targets = tuple(part.source for part in of.parts), tuple(part.target for part in of.parts)
        kind = KINDS[step.kind]
        cut, joined = self.exchange.size if kind.cuts else 1, self.exchange.size if kind.joins else 1
        mesh, made = backend.mesh, dict[tuple[Part, ...], tuple[Packing, Unpacking]]()
        alike = [tuple(part.on(mesh.sizes, mesh.coordinates(rank)) for part in of.parts) for rank in backend.ranks]
        for parts in dict.fromkeys(alike):
            own = replace(of, parts=parts)
            made[parts] = _packing(own, cut, backend.traced), _unpacking(own, joined)
        groups = [group_of(mesh, self.exchange.axes, rank) for rank in backend.ranks]
        self.places = [group.index(rank) for group, rank in zip(groups, backend.ranks, strict=True)]
        self.in_place = kind.role == "gather" and not of.packs and not backend.traced
        self.packs, self.unpacks = zip(*(made[parts] for parts in alike), strict=True)

    def start(self, ranks: Sequence[Values], flights: Flights, observed: list[Observed] | None) -> None:
        """Hands over what it reads."""
        if not self.earlier:
            self._start(ranks, flights, observed, ())
            return
        with self.backend.beside(self.exchange):
            arrived = [{name: held[name] for name in self.sources if name in held} for held in ranks]
            spared: list[str] = []
            for call in self.earlier:
                flight = flights[call.of.id]
                spared += () if flight.wait is None else call.last
                call.land(flight, arrived)
                if not self.backend.streams(self.exchange):
                    flight.wait, flight.landed = None, [{name: held[name] for name in call.targets} for held in arrived]
            self._start(arrived, flights, observed, () if self.backend.streams(self.exchange) else spared)
            if not self.of.packs or self.backend.streams(self.exchange):
                flights[self.of.id].held = arrived

    def _start(self, ranks: Sequence[Values], flights: Flights, observed: list[Observed] | None, spared: Sequence[str]) -> None:
        sources = [[held[name] for name in self.sources] for held in ranks]
        rooms = None
        if self.in_place and not any(source.is_contiguous() for (source,) in sources):
            rooms = [source.new_empty(source.numel() * self.exchange.size) for (source,) in sources]
            places = zip(sources, rooms, self.places, strict=True)
            buffers = [_laid(source, room.view(self.exchange.size, -1)[place]) for (source,), room, place in places]
        else:
            buffers = [pack(tensors) for pack, tensors in zip(self.packs, sources, strict=True)]
        if observed is not None:
            gone = [*spared, *(self.last if rooms is not None else ())]
            observed.append(replace(self._observed(sources[0]), spared=tuple((name, self.of.id) for name in gone)))
        del sources
        for held in ranks:
            held.update(dict.fromkeys(self.last, GONE))
        flights[self.of.id] = Flight(self.backend.start(self.exchange, buffers, rooms))

    def finish(self, ranks: Sequence[Values], flights: Flights, observed: list[Observed] | None) -> None:
        """Waits; what it makes is there."""
        self.land(flights.pop(self.of.id), ranks)

    def land(self, flight: Flight, ranks: Sequence[Values]) -> None:
        """Puts the targets among the values."""
        if flight.wait is None:
            flight.hand_over(ranks)
            return
        try:
            buffers = flight.wait()
        except RuntimeError as error:
            raise self._lost(error) from error
        made: dict[tuple[int, int], Sequence[Tensor]] = {}  # ranks that share a buffer share what is made of it
        for held, buffer, unpack in zip(ranks, buffers, self.unpacks, strict=True):
            key = id(buffer), id(unpack)
            if key not in made:
                made[key] = unpack(buffer)
            held.update(zip(self.targets, made[key], strict=True))

    def _lost(self, error: RuntimeError) -> RuntimeError:
        """The backend's own error speaks of sockets; this one says what was being done, and who else took part."""
        axes = ", ".join(map(self.backend.mesh.sub_axis_name, self.exchange.axes))
        members = {rank: group_of(self.backend.mesh, self.exchange.axes, rank) for rank in self.backend.ranks}
        who = "; ".join(f"rank {rank} with ranks {[other for other in group if other != rank]}" for rank, group in members.items())
        return RuntimeError(f"{self.of.kind} {self.of.id} over {axes} was not finished ({who}): another rank is gone or late: {error}")

    def _observed(self, sources: Sequence[Tensor]) -> Observed:
        call, sizes = self.of, []
        for part, tensor in zip(self.of.parts, sources, strict=True):
            elements = math.prod(part.shapes.sent) if part.filled else tensor.numel()
            sizes.append(self.exchange.full_bytes(elements * tensor.element_size()))
        layouts = [part.layout for part in call.parts]
        if len(layouts) == 1:
            return Observed(call.kind, call.axes, call.phase, sizes[0], layouts[0].tensor, layouts[0].before)
        parts = tuple((layout.tensor, layout.before, size) for layout, size in zip(layouts, sizes, strict=True))
        return Observed(call.kind, call.axes, call.phase, sum(sizes), parts=parts)


# --- what goes in -------------------------------------------------------------------------------------------------------

Packing = Callable[[Sequence[Tensor]], Tensor]


def _packing(call: Collective, blocks: int, traced: bool) -> Packing:
    """The sources of one rank -> the flat buffer it puts in: a copy where the table says so, else the source itself."""
    cuts = [_cutting(part, blocks) for part in call.parts]
    if len(cuts) == 1:
        cut = cuts[0]
        if call.filled and not traced:
            part, room = call.parts[0], (blocks, *_block_shape(call.parts[0], blocks))
            return lambda sources: lay_out(sources[0], sources[0].new_empty(room), part).view(-1)
        if call.filled or call.parts[0].copied:
            return lambda sources: cut(sources[0]).clone(memory_format=torch.contiguous_format).view(-1)
        if KINDS[call.kind].in_place and not call.in_place and not traced:
            return lambda sources: sources[0].clone(memory_format=torch.contiguous_format).view(-1)
        return lambda sources: cut(sources[0]).contiguous().view(-1)
    shapes = [(blocks, *_block_shape(part, blocks)) for part in call.parts]
    rows = [(blocks, math.prod(shape[1:])) for shape in shapes]
    if traced:
        return lambda sources: torch.cat(
            [cut(source).reshape(size) for cut, source, size in zip(cuts, sources, rows, strict=True)], 1
        ).view(-1)
    runs_of_memory, total = not any(part.cuts_inside or part.filled for part in call.parts), sum(size for _, size in rows)
    unequal = [number for number, part in enumerate(call.parts) if part.filled]
    even = [number for number, part in enumerate(call.parts) if not part.filled]

    def fill(sources: Sequence[Tensor]) -> Tensor:
        if runs_of_memory and all(source.is_contiguous() for source in sources):  # one kernel for all of them
            return torch.cat([source.view(size) for source, size in zip(sources, rows, strict=True)], 1).view(-1)
        whole = sources[0].new_empty(blocks * total)
        pieces = whole.view(blocks, total).split([size for _, size in rows], 1)
        room = [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]
        if even:
            copy_each([room[number] for number in even], [cuts[number](sources[number]) for number in even])
        for number in unequal:
            lay_out(sources[number], room[number], call.parts[number])
        return whole

    return fill


def _cutting(part: Part, blocks: int) -> Callable[[Tensor], Tensor]:
    """A source as ``[blocks, ...]``: a view of it."""
    if blocks == 1:
        return lambda source: fitted(source, part.shapes.sent, part.shapes)[None] if part.filled else source[None]
    dim, sent = part.step.dims[-1], part.shapes.sent
    parts = (blocks, sent[dim] // blocks)
    if part.filled:
        return lambda source: fitted(source, sent, part.shapes).unflatten(dim, parts).movedim(dim, 0)
    return lambda source: source.unflatten(dim, parts).movedim(dim, 0)


def _laid(source: Tensor, place: Tensor) -> Tensor:
    """A flat place in memory, with a source in it."""
    place.view(source.shape).copy_(source)
    return place


def _block_shape(part: Part, blocks: int) -> tuple[int, ...]:
    sent = part.shapes.sent
    if blocks == 1:
        return sent
    dim = part.step.dims[-1]
    return (*sent[:dim], sent[dim] // blocks, *sent[dim + 1 :])


# --- what comes out -----------------------------------------------------------------------------------------------------

Unpacking = Callable[[Tensor], Sequence[Tensor]]


def _unpacking(call: Collective, blocks: int) -> Unpacking:
    """The flat buffer of one rank -> its targets: views of it, or copies where the table says so."""
    shapes = [part.shapes.came for part in call.parts]
    if len(shapes) == 1 and not call.unpacks:
        return lambda buffer: (buffer.view(shapes[0]),)
    sizes = [math.prod(shape) // blocks for shape in shapes]
    if not call.unpacks:
        return lambda buffer: [piece.view(shape) for piece, shape in zip(buffer.split(sizes), shapes, strict=True)]
    joins, total = [_joining(part, blocks) for part in call.parts], sum(sizes)
    return lambda buffer: [join(piece) for join, piece in zip(joins, buffer.view(blocks, total).split(sizes, 1), strict=True)]


def _joining(part: Part, blocks: int) -> Callable[[Tensor], Tensor]:
    """A part's columns of the buffer as its target, where unequal parts were filled up in memory of its own."""
    came, dim = part.shapes.came, part.step.dims[0] if blocks > 1 else 0
    each = (blocks, *came[:dim], came[dim] // blocks, *came[dim + 1 :]) if came else (blocks,)
    if part.filled:
        return lambda columns: put_together(columns.view(each), part)
    if blocks == 1:
        return lambda columns: columns.view(came).clone(memory_format=torch.contiguous_format)
    return lambda columns: columns.view(each).movedim(0, dim).reshape(came).contiguous()


def exchange_now(backend: Backend, exchange: Exchange, tensors: Sequence[Tensor]) -> list[Tensor]:
    """A collective on one tensor of each hosted rank, waited for at once: what operators with collectives inside need.

    What arrives has the tensor's shape, and is flat where it is of another size.
    """
    kind = KINDS[exchange.kind]
    own = kind.in_place or kind.pairs  # as ``rules.launches.sends_copy`` counts
    buffers = [(tensor.clone(memory_format=torch.contiguous_format) if own else tensor.contiguous()).view(-1) for tensor in tensors]
    found = backend.start(exchange, buffers)()
    return [
        buffer.view(tensor.shape) if buffer.numel() == tensor.numel() else buffer for buffer, tensor in zip(found, tensors, strict=True)
    ]


def exchange_beside(backend: Backend, exchange: Exchange, tensors: Sequence[Tensor]) -> list[Callable[[], Tensor]]:
    """A collective that is begun on one contiguous tensor of each hosted rank, which must stay as it is: what waits for each rank's."""
    wait = backend.start(exchange, [tensor.view(-1) for tensor in tensors])

    def part(rank: int, shape: torch.Size) -> Tensor:
        return wait()[rank].view(shape)

    return [partial(part, rank, tensor.shape) for rank, tensor in enumerate(tensors)]
