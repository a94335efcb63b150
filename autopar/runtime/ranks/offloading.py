"""Copies to the host and back, bound to a device: on a GPU pinned memory and a stream for each way, on CPUs plain copies.

On a GPU a copy begins after what the current stream has been given so far, and the current stream waits for it where the schedule does. So
the source of a copy to the host may be freed after that wait, and its memory is reused no earlier. On CPUs a copy is over when it has
begun; memory that stands for a host's is counted apart (``HostMemory``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from autopar.runtime.ranks.collectives import Bringing, Flight, Flights, Observed, Values
from autopar.schedule import Collective


class HostMemory:
    """Whether what this process allocates stands for memory of the host: ``verify`` counts it apart from a device's."""

    allocating = False

    @classmethod
    @contextmanager
    def allocate(cls) -> Iterator[None]:
        """Within it, it does."""
        cls.allocating = True
        try:
            yield
        finally:
            cls.allocating = False


class Transfer:
    """A copy of the hosted ranks' parts to the host or back. It stands where a ``collectives.Call`` does.

    Args:
        of: the schedule's call.
        device: the ranks'.
        earlier: the calls in flight that bring what it reads: they are waited for first.
    """

    last: tuple[str, ...] = ()
    """What it reads is given back after its wait, not before."""

    def __init__(self, of: Collective, device: torch.device, earlier: Sequence[Bringing] = ()) -> None:
        (part,) = of.parts
        self.of, self.device, self.earlier = of, device, earlier
        self.source, self.target, self.to_host = part.source, part.target, part.step.kind == "to_host"
        self.targets = (part.target,)

    def start(self, ranks: Sequence[Values], flights: Flights, observed: list[Observed] | None) -> None:
        """Begins the copies."""
        arrived = [dict(held) for held in ranks]
        for call in self.earlier:
            flight = flights[call.of.id]
            call.land(flight, arrived)
            flight.wait, flight.landed = None, [{name: held[name] for name in call.targets} for held in arrived]
        sources = [held[self.source] for held in arrived]
        copy = self._copy_beside if self.device.type == "cuda" else self._copy
        flights[self.of.id] = copy(sources)

    def finish(self, ranks: Sequence[Values], flights: Flights, observed: list[Observed] | None) -> None:
        """Waits; what it makes is there."""
        self.land(flights.pop(self.of.id), ranks)

    def land(self, flight: Flight, ranks: Sequence[Values]) -> None:
        """Puts the targets among the values."""
        if flight.wait is None:
            flight.hand_over(ranks)
            return
        for held, target in zip(ranks, flight.wait(), strict=True):
            held[self.target] = target

    def _copy(self, sources: Sequence[Tensor]) -> Flight:
        """The copies, made at once."""
        if not self.to_host:
            return Flight(partial(list, [_room(source, self.device).copy_(source) for source in sources]), sources)
        with HostMemory.allocate():
            rooms = [_room(source, torch.device("cpu")) for source in sources]
        return Flight(partial(list, [room.copy_(source) for room, source in zip(rooms, sources, strict=True)]), sources)

    def _copy_beside(self, sources: Sequence[Tensor]) -> Flight:
        """The copies on a stream of this way's own."""
        current = torch.cuda.current_stream(self.device)
        stream = stream_of(self.device, self.to_host)
        if self.to_host:
            rooms = [torch.empty(source.shape, dtype=source.dtype, pin_memory=True) for source in sources]
        else:
            rooms = [_room(source, self.device) for source in sources]
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            for room, source in zip(rooms, sources, strict=True):
                room.copy_(source, non_blocking=True)
            done = stream.record_event()

        def wait() -> list[Tensor]:
            torch.cuda.current_stream(self.device).wait_event(done)
            return rooms

        return Flight(wait, sources)


@cache
def stream_of(device: torch.device, to_host: bool) -> Any:
    """The stream of a device for copies to the host, or back; made when it is first used."""
    return torch.cuda.Stream(device)


def _room(source: Tensor, device: torch.device) -> Tensor:
    """Memory for a dense copy."""
    return torch.empty(source.shape, dtype=source.dtype, device=device)
