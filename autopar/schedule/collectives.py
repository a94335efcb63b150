"""Collective: one call on one value or on several, and the memory that it holds. A copy to the host or back is a call of one rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from autopar.cost_models import Machine, SubAxis
from autopar.cost_models.collectives import CALLS, FROM_HOST, TO_HOST, TRANSFERS
from autopar.reshard import Shapes, Step, cuts_inside, joins_inside
from autopar.schedule.assignment import Layout, Moment, half
from autopar.sharding import ShardingSpec


class Part(NamedTuple):
    """One value's share of a collective.

    Args:
        layout: the reshard it is a step of.
        number: which step of it.
        step: the step.
        source, target: the values before and after it.
        shapes: on a rank.
        itemsize: bytes of an element.
        from_spec: the spec that the reshard starts from.
        late: only the reader of the loss waits for it (``deferred_loss``).
        copied: its source is copied to travel, since it does not lie in order. All-gathers copy such a source straight to its place in
            the buffer out, unless it repeats.
    """

    layout: Layout
    number: int
    step: Step
    source: str
    target: str
    shapes: Shapes
    itemsize: int
    dtype: str
    from_spec: ShardingSpec
    late: bool = False
    copied: bool = False

    @property
    def source_bytes(self) -> int:
        """Of the source on the device."""
        return 0 if self.step.kind == FROM_HOST.name else math.prod(self.shapes.source) * self.itemsize

    @property
    def target_bytes(self) -> int:
        """Of the target on the device."""
        return 0 if self.step.kind == TO_HOST.name else math.prod(self.shapes.target) * self.itemsize

    @property
    def sent_bytes(self) -> int:
        """Of the source as it travels."""
        return math.prod(self.shapes.sent) * self.itemsize

    @property
    def came_bytes(self) -> int:
        """Of the target as it arrives."""
        return math.prod(self.shapes.came) * self.itemsize

    @property
    def cuts_inside(self) -> bool:
        """The source's blocks are not runs of memory: another dim than its first is cut."""
        return cuts_inside(self.step, self.shapes.sent)

    @property
    def joins_inside(self) -> bool:
        """The target's blocks are not runs of memory: another dim than its first is joined."""
        return joins_inside(self.step, self.shapes.came)

    @property
    def filled(self) -> bool:
        """Unequal parts are filled up to equal ones when they are sent, and cut when they arrive."""
        return self.shapes.filled

    @property
    def laid_kernels(self) -> int:
        """Kernels that lay it out in a buffer where it is filled up: zeros, and a copy for each block. One kernel lays out all others."""
        return 1 + (self._ranks if CALLS[self.step.kind].cuts else 1) if self.filled else 0

    @property
    def put_kernels(self) -> int:
        """Kernels that copy its target out of a buffer: of one that is filled up, one for each block."""
        return self._ranks if self.filled and CALLS[self.step.kind].joins else 1

    @property
    def _ranks(self) -> int:
        """Ranks of the group."""
        return math.prod(axis.size for axis in self.step.axes)

    def on(self, sizes: Sequence[int], coordinates: Sequence[int]) -> Part:
        """The part as the rank at ``coordinates`` has it."""
        own = self.shapes.on(sizes, coordinates)
        return self if own is self.shapes else self._replace(shapes=own)


@dataclass(frozen=True)
class Collective:
    """One call: a collective on one value, or on several in a flat buffer (a bucket).

    =================  =====================================  =========================================================
    kind               buffer in                              buffer out
    =================  =====================================  =========================================================
    all_reduce         none: the sources are copied into the  the targets are views of it; ``in_place``: the source itself,
                       buffer out and reduced there           which becomes the target
    reduce_scatter     copy of the sources if ``packs``       the targets are views of it
    all_gather         copy of the sources if ``packs``       the target is it, or if ``unpacks`` the targets are copied
                                                              from it by the wait
    all_to_all         copy of the source if ``packs``        as of all_gather
    permute            copy of the source if ``packs``        the target is it
    to_host            none                                   the target, which takes nothing of the device
    from_host          none                                   the target is it
    =================  =====================================  =========================================================

    Sources that are not copied stay alive until the wait; so do buffers that are not the targets'. Unequal parts are filled up in the
    buffer in, and the wait copies their targets out of the buffer out.

    Args:
        in_place: of an all-reduce of one value that nobody else reads: it is reduced where it lies.
    """

    id: str
    parts: tuple[Part, ...]
    in_place: bool = False

    @property
    def kind(self) -> str:
        return self.parts[0].step.kind

    @property
    def axes(self) -> tuple[SubAxis, ...]:
        return self.parts[0].step.axes

    @property
    def reduction(self) -> str:
        return self.parts[0].step.reduction

    @property
    def is_transfer(self) -> bool:
        """Whether it copies to the host or back, and no other rank takes part."""
        return self.kind in TRANSFERS

    @property
    def phase(self) -> Moment:
        """The phase of its parts; where they differ, that of their segment: some are for second runs alone."""
        first, *others = {part.layout.phase for part in self.parts}
        return half(first) if others else first

    @property
    def dtype(self) -> str:
        return self.parts[0].dtype

    @property
    def late(self) -> bool:
        """Nobody waits for it but who reads the loss."""
        return all(part.late for part in self.parts)

    @cached_property
    def full_bytes(self) -> int:
        """The gathered, reduced or exchanged tensors on the group."""
        return sum(round(part.step.full_bytes) for part in self.parts)

    @cached_property
    def received_bytes(self) -> int:
        """Received by a rank, at most."""
        return sum(round(part.step.received_bytes_per_rank) for part in self.parts)

    @cached_property
    def packs(self) -> bool:
        """The sources are copied into a buffer when it starts, and may be freed then."""
        copied = CALLS[self.kind].in_place and not self.in_place
        return copied or len(self.parts) > 1 or self.filled or self.parts[0].cuts_inside or self.parts[0].copied

    @cached_property
    def unpacks(self) -> bool:
        """The targets are copied out of a buffer by the wait."""
        return (CALLS[self.kind].role == "gather" and len(self.parts) > 1) or self.filled or self.parts[0].joins_inside

    @cached_property
    def filled(self) -> bool:
        """Unequal parts are filled up to travel, among them."""
        return any(part.filled for part in self.parts)

    @cached_property
    def source_bytes(self) -> int:
        return sum(part.source_bytes for part in self.parts)

    @cached_property
    def target_bytes(self) -> int:
        return sum(part.target_bytes for part in self.parts)

    @cached_property
    def staging_bytes(self) -> int:
        """Buffers that live from the start to the wait and are not the targets'."""
        inward = sum(part.sent_bytes for part in self.parts) if self.packs and not CALLS[self.kind].in_place else 0
        return inward + (sum(part.came_bytes for part in self.parts) if self.unpacks else 0)

    @cached_property
    def taken_bytes(self) -> int:
        """Bytes that its start takes: its buffers, and the targets where they lie in one."""
        return self.staging_bytes + (0 if self.unpacks or self.in_place else self.target_bytes)

    @cached_property
    def held_bytes(self) -> int:
        """Bytes that it keeps in flight: its buffers, and the sources where they are not copied."""
        return self.taken_bytes + (0 if self.packs else self.source_bytes)

    @property
    def reads_in_flight(self) -> tuple[str, ...]:
        """The sources that must not change before the wait; none of a call in place."""
        return () if self.packs or self.in_place else tuple(part.source for part in self.parts)

    @cached_property
    def copied_bytes(self) -> int:
        """Bytes that the rank copies into its buffers and out of them."""
        sent, came = sum(part.sent_bytes for part in self.parts), sum(part.came_bytes for part in self.parts)
        return (sent if self.packs else 0) + (came if self.unpacks else 0)

    @cached_property
    def issued_in(self) -> int:
        """What the host issues for its start: the call, and kernels that copy its sources into a buffer."""
        joined = any(not part.filled for part in self.parts)
        return 1 + (joined + sum(part.laid_kernels for part in self.parts) if self.packs else 0)

    @cached_property
    def issued_out(self) -> int:
        """What the host issues for its wait: the call, and kernels that copy its targets out of a buffer."""
        return 1 + (sum(part.put_kernels for part in self.parts) if self.unpacks else 0)

    def seconds(self, machine: Machine) -> float:
        """Its price. Parts of one call share one latency."""
        latency = machine.latency_seconds(self.kind, self.axes)
        return latency + sum(max(part.step.seconds - latency, 0.0) for part in self.parts)
