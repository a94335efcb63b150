"""Instruction, Segment, Limits: the values that passes make and all other packages read.

A schedule (``schedule.Schedule``) is one ordered list of instructions that every rank runs:

========  ===============================================================================================================
``run``   an operator on this rank's parts
``start`` a collective or a copy to the host or back begins: its sources are handed over, its targets are not there yet
``wait``  the call's targets are there from here on; of a copy to the host, its source is not needed any more
``slice`` a local step of a reshard: this rank's part of a dim, or the mask of a sum still to be made
``add``   a gradient of one microbatch is added to the sum over those so far (see ``accumulating``)
``free``  values that nobody reads any more
========  ===============================================================================================================

How a collective holds memory follows from its kind, see ``collectives``; the runtime does as written there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from typing import Literal, NamedTuple

from autopar.cost_models import UNLIMITED
from autopar.graph import Op, Phase
from autopar.reshard import Step
from autopar.rules import IN_ORDER, MemoryOrder
from autopar.schedule.assignment import BACKWARD, FORWARD, Layout, Moment
from autopar.schedule.collectives import Part
from autopar.schedule.settings import ASIDE_BYTES, BUCKET_BYTES, PREFETCH_BYTES
from autopar.sharding import ShardingSpec, Strategy

BEFORE_ALL = -1
"""The ``microbatch`` of an instruction that runs once a step, before the first microbatch."""
Kind = Literal["run", "start", "wait", "slice", "add", "free"]
KINDS: tuple[Kind, ...] = ("run", "start", "wait", "slice", "add", "free")

COMPUTE = "compute"
"""The stream that operators run on; every other stream is a link, or copies to the host (``to_host``) or back (``from_host``)."""


class Segment(NamedTuple):
    """Forward or backward of one microbatch: the key by which instructions are grouped. Recomputation belongs to backward.

    Args:
        microbatch: the first whose work it is, or ``BEFORE_ALL``; a list without pipelining stands for all of them.
    """

    phase: Phase
    microbatch: int = 0

    def among(self, items: Iterable[Instruction]) -> list[Instruction]:
        """The instructions that belong to it."""
        forward, before = self.phase == FORWARD, self.microbatch == BEFORE_ALL
        return [item for item in items if (item.phase == FORWARD) is forward and (item.microbatch == BEFORE_ALL) is before]


class Instruction(NamedTuple):
    """One entry of the list. It is a tuple, because a deep graph has tens of thousands and every pass makes new ones.

    Args:
        id: its name in the list; final schedules number from 0 in order.
        kind: see the table of this module.
        phase: forward, backward, or recompute for an operator's second run and its reshards; all of forward comes first.
        reads: values that must be there. Those of a ``start`` may also be in flight: it then begins when they arrive.
        writes: values that are there afterwards; those of a ``start`` are there after its wait.
        stream: ``compute``, or the names of the links that are held, joined by ``+``; empty when it takes no time. A ``wait`` takes
            the time of all its call's copies, in and out, once the call has ended.
        seconds: how long it holds its stream.
        bytes: taken from the rank's memory by it; of a ``free``: given back.
        of: the operator of a ``run`` (``NAME@again`` of its second), the collective of a ``start`` or ``wait``, the reshard's value of
            a ``slice``, the gradient of an ``add``.
        over: of a run, the value whose memory its result takes; of a ``start``, the one that is reduced in place; None where there is none.
        microbatch: the first in which it runs; it does in all after it. ``BEFORE_ALL``: it runs once, before the first.
        launches: kernels and calls that the host issues for it; None where the host has no price.
        reads_back: of a run, True where the host reads values of it: it waits for the device before it issues the run.
        late: of a wait, True where operators do not wait: its values are for the loss alone, and are waited for when that is read.
    """

    id: int
    kind: Kind
    phase: Moment
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    stream: str = ""
    seconds: float = 0.0
    bytes: int = 0
    of: str = ""
    microbatch: int = 0
    over: str | None = None
    late: bool | None = None
    launches: int | None = None
    reads_back: bool | None = None

    @classmethod
    def of_row(cls, row: object) -> Instruction:
        """The instruction that a row of a plan file names."""
        return cls._make(_FIELDS_OF(row))

    @property
    def half(self) -> Phase:
        """Whether it stands in forward or in backward."""
        return FORWARD if self.phase == FORWARD else BACKWARD  # ``half`` without a call: asked of each many times

    @property
    def segment(self) -> Segment:
        """The segment that it belongs to."""
        return Segment(self.half, min(self.microbatch, 0))

    @property
    def streams(self) -> tuple[str, ...]:
        """The streams it holds."""
        return _split(self.stream)


_FIELDS_OF = attrgetter(*Instruction._fields)


@cache
def _split(stream: str) -> tuple[str, ...]:
    return tuple(stream.split("+")) if stream else ()


class Operation(NamedTuple):
    """An operator under a strategy; its ``run`` says which values it reads and writes. A second run is the same operator.

    Args:
        copied: the positions of the operands that are copied before it reads them, since they do not lie in order; ``copied_bytes`` of
            all.
        apart: a view that copies, so that its result lies in memory of its own.
    """

    op: Op
    strategy: Strategy
    copied: tuple[int, ...] = ()
    copied_bytes: int = 0
    apart: bool = False

    @property
    def workspace(self) -> int:
        """Bytes that it holds on a rank beside its results, while it runs."""
        return self.strategy.workspace + self.copied_bytes


class Cut(NamedTuple):
    """A local step of a reshard; ``part`` is None where there is nothing to do."""

    layout: Layout
    part: Part | None

    @property
    def step(self) -> Step | None:
        return None if self.part is None else self.part.step


class Value(NamedTuple):
    """A graph tensor in a spec, or on its way there (``spec`` None), and its bytes on a rank.

    Args:
        bytes: on the rank's device; 0 of a value on the host.
        order: how it lies in memory.
        host_bytes: in the memory of the rank's host; 0 of a value on the device.
    """

    tensor: str
    spec: ShardingSpec | None
    bytes: int
    order: MemoryOrder = IN_ORDER
    host_bytes: int = 0


@dataclass(frozen=True)
class Limits:
    """The limits of the passes, in bytes; a search may choose them.

    Args:
        bucket_bytes: of a bucket, at most. A larger value is a call of its own.
        ahead_bytes: of collectives in flight ahead of their readers, at most; and of those behind, that nobody reads in the segment. One
            call of each is always allowed. With 0 everything is gathered just before it is read.
        aside_bytes: kept by operators that are deferred to fill gaps, at most; with 0 none are deferred.
        held_bytes: of a rank, without the optimizer's states. Collectives are in flight only up to it; 0 is no limit.
        summed_bytes: by which sums over microbatches may be larger than the least, at most. Beyond it gradients are reduced in every
            microbatch, as far as makes them smaller.
    """

    bucket_bytes: int = BUCKET_BYTES
    ahead_bytes: int = PREFETCH_BYTES
    aside_bytes: int = ASIDE_BYTES
    held_bytes: int = 0
    summed_bytes: int = UNLIMITED


LEAN_LIMITS = Limits(bucket_bytes=0, ahead_bytes=0, aside_bytes=0, summed_bytes=0)
"""The limits under which a schedule needs least memory."""
