"""Leg and Call: a step of a reshard and a collective call, with what they do to memory and time by the words of the plan's schema.

=================  ======================================  ============================================================
kind               buffer in                               buffer out
=================  ======================================  ============================================================
all_reduce         none: the sources are copied into the   the targets are views of it; with ``over`` in the schedule,
                   buffer out and reduced there            the source itself
reduce_scatter     copy of the sources, if in a bucket or  the targets are views of it
                   not cut along the first dim
all_gather         as reduce_scatter, but for the dim      the target is it; in a bucket, or where the dim that is
                                                           joined is not the first, targets are copied from it
all_to_all         as reduce_scatter                       as all_gather
permute            none                                    the target is it
to_host            none                                    the target, which lies on the host
from_host          none, the source lies on the host       the target is it
=================  ======================================  ============================================================

A source that does not lie in order is copied in too, but by an all-gather: that copies it straight to its place in the buffer out, unless
the source repeats.

Sources that are not copied stay until the wait, and so do buffers that are not the targets'. Where a reshard cuts, joins or trades a dim
that ranks hold in unequal parts, every rank sends as much as the largest part: sources are copied in, filled up, and targets copied out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from autopar.check.parts import largest, travelling
from autopar.cost_models import Machine
from autopar.cost_models.collectives import TRANSFERS
from autopar.reshard import Step
from autopar.rows import CollectivePlan, ReshardPlan, TransferPlan
from autopar.rules import IN_ORDER, MemoryOrder
from autopar.sharding import ShardingSpec

_SENDING = ("all_reduce", "reduce_scatter", "all_to_all", "permute")
"""Kinds whose buffer in is no part of the buffer out; an all-reduce over its source has no other, so that the source must lie in order."""


@dataclass(frozen=True)
class Leg:
    """One step of a reshard on a rank. ``step`` is None where the reshard has nothing to do.

    Args:
        before, after: the shapes of source and target.
        sent, came: as they travel; ``filled`` where unequal parts are made equal for that.
        order: how its source lies in memory.
    """

    row: ReshardPlan
    number: int
    step: Step | None
    source: str
    target: str
    before: tuple[int, ...]
    sent: tuple[int, ...]
    came: tuple[int, ...]
    after: tuple[int, ...]
    filled: bool
    itemsize: int
    dtype: str
    order: MemoryOrder = IN_ORDER

    @property
    def is_collective(self) -> bool:
        return self.step is not None and self.step.is_collective

    @property
    def is_transfer(self) -> bool:
        return self.step is not None and self.step.kind in TRANSFERS

    @property
    def given(self) -> int:
        """Bytes of the source on the device."""
        return 0 if self.step is not None and self.step.kind == "from_host" else math.prod(self.before) * self.itemsize

    @property
    def taken(self) -> int:
        """Bytes of the target on the device."""
        return 0 if self.step is not None and self.step.kind == "to_host" else math.prod(self.after) * self.itemsize

    @property
    def packed(self) -> int:
        """Bytes that go in."""
        return math.prod(self.sent) * self.itemsize

    @property
    def arrived(self) -> int:
        """Bytes that come out."""
        return math.prod(self.came) * self.itemsize

    @property
    def on_group(self) -> int:
        """Bytes of what is gathered, reduced or exchanged, on the group."""
        assert self.step is not None
        ranks = math.prod(part.size for part in self.step.axes)
        return self.packed if self.step.kind in ("all_reduce", "reduce_scatter") else self.packed * ranks


@dataclass(frozen=True)
class Call:
    """A collective of the plan, or a copy to the host or back, with the legs it consists of.

    Args:
        in_place: it says that it writes over its source.
    """

    row: CollectivePlan | TransferPlan
    legs: tuple[Leg, ...]
    steps: tuple[Step, ...]
    in_place: bool = False

    @property
    def first(self) -> Step:
        return self.steps[0]

    @property
    def is_transfer(self) -> bool:
        return self.legs[0].is_transfer

    @cached_property
    def copies_in(self) -> bool:
        """The sources are copied when it starts."""
        inside = any(
            step.kind in ("reduce_scatter", "all_to_all") and _rows_before(leg.sent, step.dims[-1])
            for leg, step in zip(self.legs, self.steps, strict=True)
        )
        apart = any(not leg.order.in_order and (self.first.kind in _SENDING or leg.order.repeats) for leg in self.legs)
        return (self.first.kind == "all_reduce" and not self.in_place) or len(self.legs) > 1 or inside or self.filled or apart

    @property
    def filled(self) -> bool:
        """Unequal parts are among what is sent."""
        return any(leg.filled for leg in self.legs)

    @cached_property
    def copies_out(self) -> bool:
        """The targets are copied out of a buffer by the wait."""
        step, leg = self.first, self.legs[0]
        bucket = step.kind == "all_gather" and len(self.legs) > 1
        return bucket or self.filled or (step.kind in ("all_gather", "all_to_all") and _rows_before(leg.came, step.dims[0]))

    @cached_property
    def given(self) -> int:
        return sum(leg.given for leg in self.legs)

    @cached_property
    def taken(self) -> int:
        return sum(leg.taken for leg in self.legs)

    @cached_property
    def copied(self) -> int:
        """Bytes that the rank copies before and after the call."""
        packed, arrived = sum(leg.packed for leg in self.legs), sum(leg.arrived for leg in self.legs)
        return (packed if self.copies_in else 0) + (arrived if self.copies_out else 0)

    @cached_property
    def buffers(self) -> int:
        """Bytes that live from start to wait and are not the targets'."""
        inward = sum(leg.packed for leg in self.legs) if self.copies_in and self.first.kind != "all_reduce" else 0
        return inward + (sum(leg.arrived for leg in self.legs) if self.copies_out else 0)

    @cached_property
    def in_flight(self) -> int:
        """All bytes that it holds in flight."""
        return self.begins_with + (0 if self.copies_in else self.given)

    @property
    def begins_with(self) -> int:
        """Bytes that its start takes."""
        return self.buffers + (0 if self.copies_out or self.in_place else self.taken)

    @property
    def reads_on(self) -> tuple[Leg, ...]:
        """The legs whose sources it reads where they lie, until its wait."""
        return () if self.copies_in or self.in_place else self.legs

    def seconds(self, machine: Machine) -> float:
        """The price of each leg with the latency of one call."""
        once = machine.latency_seconds(self.first.kind, self.first.axes)
        return once + math.fsum(max(step.seconds - once, 0.0) for step in self.steps)


@dataclass(frozen=True)
class Ends:
    """What a reshard turns into what: a tensor of ``shape`` from one spec into another, on a mesh of these sizes."""

    shape: tuple[int, ...]
    source: ShardingSpec
    target: ShardingSpec
    sizes: tuple[int, ...]

    def travelling(self, steps: tuple[Step, ...]) -> tuple[int, ...]:
        """The tensor's shape with the dims filled up that steps move in unequal parts."""
        moved: set[int] = set()
        for step in steps:
            moved |= set(range(len(self.shape))) if step.kind == "permute" else set(step.dims)
        longer = travelling(self.shape, self.source, self.target, self.sizes)
        return tuple(longer[dim] if dim in moved else extent for dim, extent in enumerate(self.shape))


def legs(
    row: ReshardPlan, ways: Sequence[tuple[Ends, tuple[Step, ...]]], itemsize: int, dtype: str, order: MemoryOrder
) -> Iterator[Leg]:  # fmt: skip
    """The steps of a reshard, of one stretch or two; one without a step where there is nothing to do.

    Args:
        order: how the source of the reshard lies.
    """
    total, number, source = sum(len(steps) for _, steps in ways), 0, row.source
    if not total:
        ends = ways[0][0]
        shape = largest(ends.shape, ends.source, ends.sizes)
        yield Leg(row, 0, None, row.source, row.value, shape, shape, shape, shape, False, itemsize, dtype)
    for ends, steps in ways:
        whole, shape = ends.travelling(steps), largest(ends.shape, ends.source, ends.sizes)
        sent = largest(whole, ends.source, ends.sizes)
        for place, step in enumerate(steps, 1):
            target = row.value if number + 1 == total else f"{row.value}#{number + 1}"
            came = _moved(sent, step)
            after = largest(ends.shape, ends.target, ends.sizes) if place == len(steps) else came
            filled, lies = whole != ends.shape, IN_ORDER if number else order
            yield Leg(row, number, step, source, target, shape, sent, came, after, filled, itemsize, dtype, lies)
            shape = sent = came
            source, number = target, number + 1


def transfer(row: ReshardPlan, shape: tuple[int, ...], itemsize: int, dtype: str, machine: Machine) -> Leg:
    """The copy of a rank's part, of a value of ``shape`` there, that a row on the host is, or one that is made of such a row."""
    copied = math.prod(shape) * itemsize
    step = Step("to_host" if row.on_host else "from_host", (), (), full_bytes=copied, seconds=machine.transfer_seconds(copied))
    return Leg(row, 0, step, row.source, row.value, shape, shape, shape, shape, False, itemsize, dtype)


def _moved(shape: tuple[int, ...], step: Step) -> tuple[int, ...]:
    group = math.prod(part.size for part in step.axes)
    cut = step.dims[-1] if step.kind in ("slice", "reduce_scatter", "all_to_all") else None
    joined = step.dims[0] if step.kind in ("all_gather", "all_to_all") else None
    extents = (extent // group if dim == cut else extent for dim, extent in enumerate(shape))
    return tuple(extent * group if dim == joined else extent for dim, extent in enumerate(extents))


def _rows_before(shape: tuple[int, ...], dim: int) -> bool:
    """Blocks along ``dim`` are not runs of memory."""
    return math.prod(shape[:dim]) > 1
