"""Instruction, Schedule: the values that the passes make and everybody reads.

A schedule is one ordered list of instructions that every rank runs:

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

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import pairwise
from typing import Any, Literal, NamedTuple, TypeVar

from autopar import pricing
from autopar.graph import DTYPE_BYTES, Graph, GraphOutput, Op, Phase
from autopar.reshard import Step
from autopar.rules import is_alias
from autopar.schedule.assignment import Layout, Moment
from autopar.schedule.collectives import Collective, Part
from autopar.sharding import ShardingSpec, Strategy
from cost_models import Machine

Kind = Literal["run", "start", "wait", "slice", "add", "free"]
KINDS: tuple[Kind, ...] = ("run", "start", "wait", "slice", "add", "free")
Answer = TypeVar("Answer")

COMPUTE = "compute"
"""The stream that operators run on; every other stream is a link."""


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
        return "forward" if self.phase == "forward" else "backward"  # ``half``, without a call: asked of each many times

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
        counts_waits: when collectives run ahead is decided by a clock that counts the time for which operators wait for what the phase
            sends between them: they start later, and let more of that pass.
    """

    bucket_bytes: int = 25 * 2**20
    ahead_bytes: int = 400 * 2**20
    aside_bytes: int = 50 * 2**20
    held_bytes: int = 0
    summed_bytes: int = 2**62
    counts_waits: bool = False


@dataclass(frozen=True)
class Schedule:
    """The list, and what its names stand for.

    Args:
        instructions: in order, forward first.
        operations: by operator name, second runs by theirs.
        collectives: by id.
        cuts: by the value they make.
        values: every value.
        layouts: the reshards, by value.
        outputs: the graph's outputs with the value that leaves for each.
        limits: what the passes kept to.
    """

    graph: Graph
    machine: Machine
    instructions: tuple[Instruction, ...]
    operations: Mapping[str, Operation]
    collectives: Mapping[str, Collective]
    cuts: Mapping[str, Cut]
    values: Mapping[str, Value]
    layouts: Mapping[str, Layout]
    outputs: tuple[tuple[GraphOutput, str], ...]
    limits: Limits

    def under(self, limits: Limits) -> Schedule:
        """The same list under other limits; what is known of it stays known."""
        return self._knowing(replace(self, limits=limits), (*self.__dict__, "_known"))

    def freed(self, instructions: tuple[Instruction, ...]) -> Schedule:
        """The list with ``free`` in it: where values lie stays known."""
        return self._knowing(replace(self, instructions=instructions), ("specs", "sums", "storage"))

    def _knowing(self, made: Schedule, names: Iterable[str]) -> Schedule:
        for name in names:
            made.__dict__.setdefault(name, getattr(self, name))
        return made

    def once(self, question: Callable[[Schedule], Answer]) -> Answer:
        """What a function says of the list, whatever the limits: it is asked once."""
        known = self._known
        if question not in known:
            known[question] = question(self)
        answer: Answer = known[question]
        return answer

    @cached_property
    def _known(self) -> dict[object, Any]:
        return {}

    @cached_property
    def specs(self) -> Mapping[str, ShardingSpec]:
        """The spec of every value that has one."""
        return {name: value.spec for name, value in self.values.items() if value.spec is not None}

    def local_bytes(self, value: str) -> int:
        """Bytes of a value on one rank."""
        return self.values[value].bytes

    @cached_property
    def sums(self) -> tuple[str, ...]:
        """The values that gradients are summed in over the microbatches: there from the beginning of the step on, zero at first."""
        return tuple(item.writes[0] for item in self.instructions if item.kind == "add")

    @cached_property
    def rounds(self) -> tuple[tuple[int, tuple[Instruction, ...]], ...]:
        """What runs how often: the instructions of microbatches that do the same, in order."""
        last = self.graph.microbatches - 1
        begins = sorted({0, *(item.microbatch for item in self.instructions)}) + [last + 1]
        return tuple(
            (after - first, tuple(item for item in self.instructions if item.microbatch <= first))
            for first, after in pairwise(begins)
        )  # fmt: skip

    def times(self, item: Instruction) -> int:
        """How often an instruction runs in a step."""
        return self.graph.microbatches - item.microbatch

    @cached_property
    def calls(self) -> tuple[Collective, ...]:
        """The collectives between operators in the order in which every rank starts them."""
        return tuple(self.collectives[item.of] for item in self.instructions if item.kind == "start")

    @cached_property
    def storage(self) -> Mapping[str, str]:
        """The value, or the collective, whose memory each value lies in: itself, what it is a view of or written over, or the buffer it
        arrived in."""
        return self.stored()

    def stored(self, *, apart: bool = False) -> Mapping[str, str]:
        """The same; or with each value that a collective brings in memory of its own (``apart``), whoever it shares a buffer with."""
        root = {name: name for name in (*(item.tensor for item in self.graph.inputs), *self.sums)}
        views = {target: is_alias(op) for target, op in {item.op.target: item.op for item in self.operations.values()}.items()}
        for item in self.instructions:
            if item.kind == "run":
                shared = item.over or (item.reads[0] if item.reads and views[self.operations[item.of].op.target] else "")
                for name in item.writes:
                    root[name] = root[shared] if shared else name
            elif item.kind == "slice":
                value = item.writes[0]
                root[value] = value if self.cuts[value].step is not None else root[item.reads[0]]
            elif item.kind == "start":
                call = self.collectives[item.of]
                for part in call.parts:
                    own = apart or call.unpacks
                    root[part.target] = part.target if own else root[part.source] if call.in_place else call.id
        return root

    def compute_seconds(self) -> float:
        """Sum over operators and the sums of gradients, in sequence, without the collectives inside them."""
        operators = sum(self.times(item) * self.operator_seconds(item.of) for item in self._runs())
        return operators + sum(self.times(item) * item.seconds for item in self.instructions if item.kind == "add")

    def operator_seconds(self, name: str) -> float:
        """Seconds of one operator without the collectives inside it; the same for operators of one kind in one strategy."""
        op, strategy = self.operations[name]
        key = self.graph.kinds[op.name], id(strategy)
        if key not in self._seconds:
            self._seconds[key] = pricing.compute_seconds(op, self.graph.tensors, strategy, self.machine)
        return self._seconds[key]

    @cached_property
    def _seconds(self) -> dict[tuple[int, int], float]:
        return {}

    def communication_seconds(self) -> float:
        """Sum over collectives and their copies, in sequence, those inside operators included."""
        calls = sum(self.times(item) * item.seconds for item in self.instructions if item.kind in ("start", "wait"))
        inside = (pricing.inner_seconds(self.operations[item.of].strategy, self.machine) * self.times(item) for item in self._runs())
        return calls + sum(inside)

    def _runs(self) -> Iterator[Instruction]:
        return (item for item in self.instructions if item.kind == "run")

    def optimizer_seconds(self, optimizer: str) -> float:
        """One step of the optimizer on the local shards of trained parameters."""
        found = 0.0
        for item in self.graph.inputs:
            if item.tensor in self.graph.stepped:
                dtype = self.graph.tensors[item.tensor].dtype
                found += self.machine.optimizer_seconds(optimizer, self.local_bytes(item.tensor) // DTYPE_BYTES[dtype], dtype)
        return found
