"""Leg and Call: a step of a reshard and a collective call, with what they do to memory and time by the words of the plan's schema.

=================  ======================================  ============================================================
kind               buffer in                               buffer out
=================  ======================================  ============================================================
all_reduce         none: the sources are copied into the   the targets are views of it
                   buffer out and reduced there
reduce_scatter     copy of the sources, if in a bucket or  the targets are views of it
                   not cut along the first dim
all_gather         as reduce_scatter, but for the dim      the target is it; in a bucket, or where the dim that is
                                                           joined is not the first, targets are copied from it
all_to_all         as reduce_scatter                       as all_gather
permute            none                                    the target is it
=================  ======================================  ============================================================

Sources that are not copied stay until the wait, and so do buffers that are not the targets'.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from autopar.reshard import Step
from autopar.rows import CollectivePlan, ReshardPlan
from cost_models import Machine


@dataclass(frozen=True)
class Leg:
    """One step of a reshard on a rank. ``step`` is None where the reshard has nothing to do."""

    row: ReshardPlan
    number: int
    step: Step | None
    source: str
    target: str
    before: tuple[int, ...]
    after: tuple[int, ...]
    itemsize: int
    dtype: str

    @property
    def is_collective(self) -> bool:
        return self.step is not None and self.step.is_collective

    @property
    def given(self) -> int:
        """Bytes of the source."""
        return math.prod(self.before) * self.itemsize

    @property
    def taken(self) -> int:
        """Bytes of the target."""
        return math.prod(self.after) * self.itemsize


@dataclass(frozen=True)
class Call:
    """A collective of the plan with the legs it consists of."""

    row: CollectivePlan
    legs: tuple[Leg, ...]
    steps: tuple[Step, ...]

    @property
    def first(self) -> Step:
        return self.steps[0]

    @cached_property
    def copies_in(self) -> bool:
        """The sources are copied when it starts."""
        inside = any(
            step.kind in ("reduce_scatter", "all_to_all") and _rows_before(leg.before, step.dims[-1])
            for leg, step in zip(self.legs, self.steps, strict=True)
        )
        return self.first.kind == "all_reduce" or len(self.legs) > 1 or inside

    @cached_property
    def copies_out(self) -> bool:
        """The targets are copied out of a buffer by the wait."""
        step, leg = self.first, self.legs[0]
        bucket = step.kind == "all_gather" and len(self.legs) > 1
        return bucket or (step.kind in ("all_gather", "all_to_all") and _rows_before(leg.after, step.dims[0]))

    @cached_property
    def given(self) -> int:
        return sum(leg.given for leg in self.legs)

    @cached_property
    def taken(self) -> int:
        return sum(leg.taken for leg in self.legs)

    @cached_property
    def copied(self) -> int:
        """Bytes that the rank copies before and after the call."""
        return (self.given if self.copies_in else 0) + (self.taken if self.copies_out else 0)

    @cached_property
    def buffers(self) -> int:
        """Bytes that live from start to wait and are not the targets'."""
        inward = self.given if self.copies_in and self.first.kind != "all_reduce" else 0
        return inward + (self.taken if self.copies_out else 0)

    @cached_property
    def in_flight(self) -> int:
        """All bytes that it holds in flight."""
        return self.buffers + (0 if self.copies_out else self.taken) + (0 if self.copies_in else self.given)

    def seconds(self, machine: Machine) -> float:
        """The price of each leg with the latency of one call."""
        once = machine.latency_seconds(self.first.kind, self.first.axes)
        return once + math.fsum(max(step.seconds - once, 0.0) for step in self.steps)


def legs(
    row: ReshardPlan, shape: tuple[int, ...], steps: tuple[Step, ...], itemsize: int, dtype: str
) -> Iterator[Leg]:  # fmt: skip
    """The steps of a reshard whose source has ``shape`` on a rank; one without a step where there is nothing to do."""
    if not steps:
        yield Leg(row, 0, None, row.source, row.value, shape, shape, itemsize, dtype)
    source = row.source
    for number, step in enumerate(steps):
        target = row.value if number + 1 == len(steps) else f"{row.value}#{number + 1}"
        after = _moved(shape, step)
        yield Leg(row, number, step, source, target, shape, after, itemsize, dtype)
        shape, source = after, target


def _moved(shape: tuple[int, ...], step: Step) -> tuple[int, ...]:
    group = math.prod(part.size for part in step.axes)
    cut = step.dims[-1] if step.kind in ("slice", "reduce_scatter", "all_to_all") else None
    joined = step.dims[0] if step.kind in ("all_gather", "all_to_all") else None
    extents = (extent // group if dim == cut else extent for dim, extent in enumerate(shape))
    return tuple(extent * group if dim == joined else extent for dim, extent in enumerate(extents))


def _rows_before(shape: tuple[int, ...], dim: int) -> bool:
    """Blocks along ``dim`` are not runs of memory."""
    return math.prod(shape[:dim]) > 1
