"""A schedule bound to the ranks of a backend: its segments, and how a step runs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from autopar.runtime.instructions.code import Segment
from autopar.runtime.ranks.backends import Backend
from autopar.runtime.ranks.collectives import Flights, Observed, Values
from autopar.schedule import Schedule
from autopar.schedule.splitting import find_weight_part

Land = Callable[[Sequence[Values]], None]
"""Waits for late calls and adds their results to the values of each hosted rank."""


@dataclass(frozen=True)
class Late:
    """What of forward may run when the loss is read.

    Args:
        segment: its instructions; None where there are none.
        values: what these read and make.
        freed: those of them that forward frees.
    """

    segment: Segment | None = None
    values: frozenset[str] = frozenset()
    freed: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Executable:
    """A schedule bound to a backend and a device.

    Args:
        forward_segment, backward_segment: its instructions.
        first_segment: what runs before the first microbatch, once; None where nothing does.
        repeated_segment: those of backward of microbatches before the last.
        late: of forward, what only the loss asks for.
        input_segment: where backward runs in two parts, the first, equal in all microbatches (see ``schedule.splitting``); the two others
            are then without it.
        once_segment: of backward, what runs once a step behind all the rest; None where something else stands behind it.
    """

    schedule: Schedule
    backend: Backend
    forward_segment: Segment
    backward_segment: Segment
    repeated_segment: Segment
    late: Late = Late()
    input_segment: Segment | None = None
    once_segment: Segment | None = None
    first_segment: Segment | None = None

    @cached_property
    def kept(self) -> tuple[str, ...]:
        """The values that the backward instructions or backward outputs need from before."""
        schedule = self.schedule
        made, needed = {item.tensor for item in schedule.graph.inputs if item.kind != "tangent"}, set[str]()
        for item in schedule.instructions:
            if item.half == "forward":
                made.update(item.writes)
            elif item.kind != "free":
                needed.update(item.reads)
        needed.update(value for output, value in schedule.outputs if output.kind == "gradient")
        return tuple(sorted(needed & made))

    @cached_property
    def kept_for_weights(self) -> tuple[str, ...]:
        """The values that the second part of backward, or outputs of backward, need from before."""
        schedule, begin = self.schedule, find_weight_part(self.schedule)
        made = {item.tensor for item in schedule.graph.inputs}.union(*(item.writes for item in schedule.instructions[:begin]))
        needed = {value for item in schedule.instructions[begin:] if item.kind != "free" for value in item.reads}
        needed.update(value for output, value in schedule.outputs if output.kind == "gradient")
        return tuple(sorted(needed & made))

    def begin(self, ranks: Sequence[Values], observed: list[Observed] | None = None) -> None:
        """Runs what a step does once, before its first microbatch; ``ranks`` hold the results too then."""
        if self.first_segment is not None:
            _run(self.first_segment, ranks, {}, observed)

    def forward(self, ranks: Sequence[Values], observed: list[Observed] | None = None) -> None:
        """Runs the forward instructions; ``ranks`` hold the inputs before, what is still needed after.

        Args:
            ranks: the values of each rank that the backend hosts.
            observed: the collectives that are executed are appended.
        """
        land = self.forward_but_late(ranks, observed)
        if land is not None:
            land(ranks)

    def forward_but_late(self, ranks: Sequence[Values], observed: list[Observed] | None = None) -> Land | None:
        """The same but for the loss, if it is late: what is returned then waits for it and puts it among the values it is given."""
        flights: Flights = {}
        _run(self.forward_segment, ranks, flights, observed)
        late = self.late
        if not late.values:
            return None
        needed = [{name: held[name] for name in late.values if name in held} for held in ranks]
        for held in ranks:
            for name in late.freed & held.keys():
                del held[name]

        def land(ranks: Sequence[Values]) -> None:
            if late.segment is not None:
                _run(late.segment, needed, flights, None)
            for held, found in zip(ranks, needed, strict=True):
                held.update((name, value) for name, value in found.items() if name not in late.freed)

        return land

    def backward(
        self, ranks: Sequence[Values], observed: list[Observed] | None = None, *, last: bool = True, send: Callable[[], None] | None = None
    ) -> None:  # fmt: skip
        """Runs the backward instructions on what ``forward`` left, and on the sums over microbatches; of the ``last`` of these or not.

        Args:
            send: called when what leaves for another stage is made.
        """
        if self.input_segment is not None:
            self.make_input_gradients(ranks, observed)
        once = self.once_segment if send is not None and last else None
        self.make_weight_gradients(ranks, observed, last=last and once is None)
        if send is not None:
            send()
        if once is not None:
            _run(once, ranks, {}, observed)

    def make_input_gradients(self, ranks: Sequence[Values], observed: list[Observed] | None = None) -> None:
        """Runs the first part of backward, where it has two."""
        assert self.input_segment is not None
        _run(self.input_segment, ranks, {}, observed)

    def make_weight_gradients(self, ranks: Sequence[Values], observed: list[Observed] | None = None, *, last: bool = True) -> None:
        """Runs the second part, on the sums over microbatches."""
        _run(self.backward_segment if last else self.repeated_segment, ranks, {}, observed)


def _run(segment: Segment, ranks: Sequence[Values], flights: Flights, observed: list[Observed] | None) -> None:
    """Outside autograd and autocast; what is off already, as within an ``autograd.Function``, is not turned off once more."""
    if torch.is_grad_enabled():
        with torch.no_grad():
            _run(segment, ranks, flights, observed)
    elif torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            segment(ranks, flights, observed)
    else:
        segment(ranks, flights, observed)
