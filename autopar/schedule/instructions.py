"""Instruction and what its names stand for: the values that the passes make and everybody reads.

A schedule (``schedule.Schedule``) is one ordered list of instructions that every rank runs:

========  ===============================================================================================================
``run``   an operator on this rank's parts
``start`` a collective begins: its sources are handed over, its targets are not there yet
``wait``  the collective's targets are there from here on
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
from typing import Literal, NamedTuple

from autopar.graph import Op, Phase
from autopar.reshard import Step
from autopar.schedule.assignment import BACKWARD, FORWARD, Layout, Moment
from autopar.schedule.collectives import Part
from autopar.sharding import ShardingSpec, Strategy

Kind = Literal["run", "start", "wait", "slice", "add", "free"]
KINDS: tuple[Kind, ...] = ("run", "start", "wait", "slice", "add", "free")

COMPUTE = "compute"
"""The stream that operators run on; every other stream is a link."""


class Segment(NamedTuple):
    """A stage's forward or backward of one microbatch: the key by which instructions are grouped. Recomputation belongs to backward.

    Args:
        microbatch: the first whose work it is; a list without pipelining stands for all of them.
    """

    stage: int
    phase: Phase
    microbatch: int = 0

    def among(self, items: Iterable[Instruction]) -> list[Instruction]:
        """The instructions that belong to it."""
        stage, forward = self.stage, self.phase == FORWARD
        return [item for item in items if (item.phase == FORWARD) is forward and item.stage == stage]


class Instruction(NamedTuple):
    """One entry of the list. A tuple, since a deep graph has tens of thousands and every pass makes some anew.

    Args:
        id: its name in the list; final schedules number from 0 in order.
        kind: see the table of this module.
        phase: forward, backward, or recompute for an operator's second run and what only that reads; all of forward comes first.
        reads: values that must be there; of a ``start`` they may also be in flight: it then begins when they arrive.
        writes: values that are there afterwards (of a ``start``: once it was waited for).
        stream: ``compute``, or the names of the links that are held, joined by ``+``; empty when it takes no time. A ``wait`` takes
            the time of all its call's copies, in and out, once the call has ended.
        seconds: how long it holds its stream.
        bytes: taken from the rank's memory by it; of a ``free``: given back.
        of: the operator of a ``run`` (``NAME@again`` of its second), the collective of a ``start`` or ``wait``, the reshard's value of
            a ``slice``, the gradient of an ``add``.
        over: of a run, the value whose memory its result takes; of a ``start``, the one that is reduced in place; None where there is none.
        stage: of a pipeline; one so far.
        microbatch: the first in which it runs; it does in all after it.
        late: of a wait, True where operators do not wait: what comes is for the loss alone, and is waited for when that is read.
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
    stage: int = 0
    microbatch: int = 0
    over: str | None = None
    late: bool | None = None

    @property
    def half(self) -> Phase:
        """Whether it stands in forward or in backward."""
        return FORWARD if self.phase == FORWARD else BACKWARD  # ``half`` without a call: asked of each many times

    @property
    def segment(self) -> Segment:
        """The segment that it belongs to."""
        return Segment(self.stage, self.half)

    @property
    def streams(self) -> tuple[str, ...]:
        """The streams it holds."""
        return _split(self.stream)


@cache
def _split(stream: str) -> tuple[str, ...]:
    return tuple(stream.split("+")) if stream else ()


class Operation(NamedTuple):
    """An operator under a strategy; its ``run`` says which values it reads and writes. A second run is the same operator."""

    op: Op
    strategy: Strategy


class Cut(NamedTuple):
    """A local step of a reshard; ``part`` is None where there is nothing to do."""

    layout: Layout
    part: Part | None

    @property
    def step(self) -> Step | None:
        return None if self.part is None else self.part.step


class Value(NamedTuple):
    """What a name stands for: a graph tensor in a spec, or on its way there (``spec`` None), and its bytes on a rank."""

    tensor: str
    spec: ShardingSpec | None
    bytes: int


@dataclass(frozen=True)
class Limits:
    """What the passes keep to; a search may choose them.

    Args:
        bucket_bytes: most bytes of a bucket, and so of what small collectives are joined to; a larger value is a call of its own.
        ahead_bytes: most bytes of collectives in flight ahead of their readers, and of those behind that nobody reads in the phase;
            one call of each is always allowed. 0: none, everything is gathered just before it is read.
        aside_bytes: most bytes kept by operators that are set aside to fill gaps in which others would wait for a collective; 0: none are.
        held_bytes: most bytes of a rank, without the optimizer's states, up to which collectives are in flight ahead of their readers or
            behind; 0: whatever it takes.
        summed_bytes: most bytes by which sums of gradients over microbatches may be larger for being reduced once, after the last;
            where that is more, gradients are reduced in every microbatch and summed then.
    """

    bucket_bytes: int = 25 * 2**20
    ahead_bytes: int = 400 * 2**20
    aside_bytes: int = 50 * 2**20
    held_bytes: int = 0
    summed_bytes: int = 2**62


LEAN_LIMITS = Limits(bucket_bytes=0, ahead_bytes=0, aside_bytes=0, summed_bytes=0)
"""The limits under which a schedule needs least memory."""
