"""The rows of a plan's file, each a frozen value; see ``autopar.plan``, which puts them together."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_serializer, model_validator

from autopar.cost_models import COST_MODELS, UNLIMITED, Execution
from autopar.cost_models.collectives import KindName, TransferName
from autopar.effort import Effort
from autopar.errors import SpecError
from autopar.graph import DTYPE_BYTES
from autopar.sharding import Blocks, ShardingSpec

PhaseName = Literal["forward", "backward", "recompute"]
Status = Literal["optimal", "feasible"]
EnteringKind = Literal["input", "parameter", "buffer", "constant", "tangent"]
LeavingKind = Literal["output", "gradient", "buffer"]
InstructionKind = Literal["run", "start", "wait", "slice", "add", "free"]


@cache
def _readable(text: str) -> str:
    try:
        ShardingSpec.parse(text)
    except SpecError as error:
        raise ValueError(error.message) from error
    return text


def _registered(name: str) -> str:
    if name not in COST_MODELS:
        raise ValueError(f"unknown cost model {name!r}; known are {', '.join(COST_MODELS)}")
    return name


def _known_dtype(name: str) -> str:
    if name not in DTYPE_BYTES:
        raise ValueError(f"unknown dtype {name!r}")
    return name


def _arguments(given: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(given.get("args"), list) or not isinstance(given.get("kwargs"), dict):
        raise ValueError("not the arguments of an operator: a list of args and kwargs by name")
    return given


def _call(given: dict[str, Any]) -> dict[str, Any]:
    for key, kind in (("args", list), ("kwargs", dict), ("loss_args", list)):
        if not isinstance(given.get(key, kind()), kind):
            raise ValueError(f"not the arguments of a call: {key} is no {'object' if kind is dict else 'list'}")
    return given


SpecText = Annotated[str, AfterValidator(_readable)]
DtypeName = Annotated[str, AfterValidator(_known_dtype)]
Count = Annotated[int, Field(ge=0, lt=2**63)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Shape = tuple[Count, ...]
Stage = Literal[0]
"""The stage of a pipeline that a row is of: each stage is a plan of its own."""


class Row(BaseModel):
    """The base of all rows: frozen, strict, no unknown keys."""

    # strict: "16" is no size and true no count; forbid: a misspelt key is an error, not a default
    # defer_build: what only shows plans never makes a row itself, and starts without the validators of each
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", populate_by_name=True, defer_build=True)


class CreatedBy(Row):
    """The software that made the plan. ``execution`` is the way of execution whose host is priced; absent where the host takes no time."""

    autopar: str
    torch: str
    solver: str
    cost_model: Annotated[str, AfterValidator(_registered)]
    execution: Execution | None = None


Inputs = Literal["global", "local"]
"""``global``: ranks pass whole inputs; ``local``: each its own part, such as the rows that a ``DistributedSampler`` gives it."""


Outputs = Literal["placed", "full"]
"""``placed``: what a plan splits leaves as a DTensor; ``full``: whole, as a plain tensor."""


class Model(Row):
    """The planned model. ``arguments`` is ``Graph.arguments``: how the call's tensors and results are nested. ``inputs`` is there where
    each rank passes its own rows of the batch."""

    target: str
    mode: Literal["train", "inference"]
    optimizer: str
    graph_sha256: str
    arguments: Annotated[dict[str, Any], AfterValidator(_call)] = Field(default_factory=dict)
    inputs: Literal["local"] | None = None


class Objective(Row):
    """Seconds of the step, with the bound proved over all plans for this mesh.

    The step is ``predicted.step_seconds``; under the communication cost model, where nothing overlaps, it is the sum of the collectives.
    ``tied_seconds`` of it are the price of equal layers that lie alike.
    """

    seconds: Seconds
    bound_seconds: Seconds
    gap: Annotated[float, Field(le=1, allow_inf_nan=False)]
    status: Status
    solve_seconds: Seconds
    tied_seconds: Seconds | None = None


class SearchPhase(Row):
    """One phase of a search: its work, its time, and the best step and bound before and after it.

    ``work_seconds`` counts work and is the same on every machine, ``cpu_seconds`` is what it took here. A step is null before there is a
    plan, a bound before there is one.
    """

    name: str
    work_seconds: Seconds
    cpu_seconds: Seconds
    step_seconds_before: Seconds | None
    step_seconds_after: Seconds | None
    bound_seconds_before: Seconds | None
    bound_seconds_after: Seconds | None

    @model_serializer
    def _with_nulls(self) -> dict[str, Any]:
        return dict(self)


class SearchRecord(Row):
    """How the plan was found. ``cut``: the time limit ended the search before its work was done, so another run may give another plan.

    ``found_by`` is the first phase that came down to the plan's step, ``proved_by`` the first that came up to its bound. Absent where it
    was there before any phase.
    """

    effort: Effort
    cut: bool
    found_by: str | None = None
    proved_by: str | None = None
    phases: tuple[SearchPhase, ...] = ()


class MeasuredCandidate(Row):
    """One plan that ``tune`` ran. ``name`` is that of the baseline, or ``search``.

    ``ratio`` is to the plan that was kept: the median over rounds of the ratio within a round. Below 1, rounds did not tell both apart.
    Without it and ``step_seconds`` the plan was not timed, for the ``reason``. Memory is absent where it cannot be followed.
    """

    name: str
    predicted_step_seconds: Seconds
    step_seconds: Seconds | None = None
    ratio: Seconds | None = None
    predicted_peak_memory_bytes_per_rank: Count
    peak_memory_bytes_per_rank: Count | None = None
    reason: str | None = None


class MeasuredPlan(Row):
    """What ``tune`` measured of the plan, and of those it was chosen from: itself, then the others, the fastest first.

    ``step_seconds`` is the median over ``rounds`` of the slowest rank's step, optimizer included. Memory is that of the fullest rank:
    storages of live tensors, absent where they cannot be followed. ``device`` names what ranks computed on.
    """

    step_seconds: Seconds
    peak_memory_bytes_per_rank: Count | None = None
    rounds: Annotated[int, Field(ge=1)]
    device: str
    execution: Execution
    candidates: tuple[MeasuredCandidate, ...]


class MemoryParts(Row):
    """Bytes per rank at the peak, by kind. ``optimizer_on_host``: states of the optimizer on the rank's host, and not on its device."""

    parameters: Count
    gradients: Count
    optimizer: Count
    activations: Count
    temporaries: Count
    optimizer_on_host: Count | None = None


class Predicted(Row):
    """Seconds of one step and bytes of one rank.

    ``step_seconds`` is the simulated time of the schedule with the optimizer's step, ``sequential_seconds`` the sum in sequence, without
    copies of values to the host and back. ``optimizer_seconds`` has the copies of states. ``peak_host_bytes_per_rank``: most bytes of a
    rank on its host at one time.
    """

    compute_seconds: Seconds
    communication_seconds: Seconds
    optimizer_seconds: Seconds
    step_seconds: Seconds
    sequential_seconds: Seconds
    received_bytes_per_rank: Count
    peak_memory_bytes_per_rank: Count
    memory: MemoryParts
    peak_host_bytes_per_rank: Count | None = None


class BaselinePlan(Row):
    """A plan people write by hand, in our own specs, priced by the same model. Where there is none, ``reason`` says why."""

    objective_seconds: Seconds | None = None
    step_seconds: Seconds | None = None
    peak_memory_bytes_per_rank: Count | None = None
    feasible: bool
    reason: str | None = None


class TensorSpec(Row):
    """Global shape, dtype and spec."""

    tensor: str
    shape: Shape
    dtype: DtypeName
    spec: SpecText


class EnteringSpec(TensorSpec):
    """A value that comes from outside; ``index`` is its place among all that enters."""

    index: Count

    def in_graph(self, sizes: Sequence[int]) -> tuple[Shape, ShardingSpec]:
        """Shape and spec as the operators have it, on a mesh of these sizes."""
        return self.shape, ShardingSpec.parse(self.spec)


class ParameterSpec(EnteringSpec):
    """A parameter; ``aliases`` are further module names of the same tied parameter.

    ``blocks``: a dim, and of how many equal blocks it is; to operators it is two dims (``autopar.sharding.Blocks``).
    ``states_on_host``: its optimizer states lie on the host between steps.
    """

    trained: bool | None = None
    aliases: tuple[str, ...] | None = None
    blocks: tuple[Count, Annotated[int, Field(ge=2)]] | None = None
    states_on_host: bool | None = None

    def in_graph(self, sizes: Sequence[int]) -> tuple[Shape, ShardingSpec]:
        if self.blocks is None:
            return super().in_graph(sizes)
        blocks = Blocks(*self.blocks)
        spec = blocks.spec(ShardingSpec.parse(self.spec), sizes)
        assert spec is not None, "check has found it to be one of blocks"
        return blocks.shape(self.shape), spec


class OutputSpec(TensorSpec):
    """A result: ``value`` is read for it where that is a reshard of the tensor; ``index`` is its place among all that leaves."""

    value: str | None = None
    index: Count


class LeavingSpec(OutputSpec):
    """A gradient or a buffer's new value, of the parameter, input or buffer ``name``."""

    name: str


class ValueSpec(TensorSpec):
    """An operator's input or output; ``value`` names the reshard or what was made again, absent where it is the tensor as first made."""

    value: str | None = None


class OpPlan(Row):
    """One operator with its arguments and its strategy. ``factors`` gives the mesh axes that split each factor of its rule.

    ``times`` is how often it runs in a step: once for each microbatch, or for all of them. A row of phase ``recompute`` is the second run
    of a forward operator: ``NAME@again`` of ``NAME``, the same but for what it reads and the values that it makes.
    """

    name: str
    op: str
    module: str
    location: str | None = None
    phase: PhaseName
    stage: Stage = 0
    times: Annotated[int, Field(ge=1)] = 1
    attributes: Annotated[dict[str, Any], AfterValidator(_arguments)]
    factors: dict[str, tuple[str, ...]] | None = None
    inputs: tuple[ValueSpec, ...]
    outputs: tuple[ValueSpec, ...]
    seconds: Seconds


class ReshardPlan(Row):
    """A tensor in a further spec, made once from ``source``; ``before`` is who reads it first.

    Its steps follow from the specs. The value after step n, counted from 1, is ``VALUE#n``, after the last step ``VALUE``.
    ``on_host``: it is a copy in the memory of the rank's host; what is made of such a copy is copied back from there. ``once``: it is made
    before the first of several microbatches, and kept until the last has ended.
    """

    value: str
    tensor: str
    source: str
    from_spec: SpecText = Field(alias="from")
    to_spec: SpecText = Field(alias="to")
    phase: PhaseName
    before: str
    on_host: bool | None = None
    once: bool | None = None


class TransferPlan(Row):
    """A copy of a rank's own part to its host or back, in execution order; ``bytes`` and ``seconds`` are those of one, made ``times``.

    ``id`` is what instructions call it, ``value`` the reshard that it makes.
    """

    id: str
    kind: TransferName
    phase: PhaseName
    times: Annotated[int, Field(ge=1)] = 1
    tensor: str
    value: str
    before: str
    bytes: Count
    seconds: Seconds


class PartPlan(Row):
    """One value's share of a bucket: which step (counted from 0) of the reshard ``value``, and the full tensor's bytes on the group."""

    tensor: str
    value: str
    step: Count = 0
    from_spec: SpecText = Field(alias="from")
    to_spec: SpecText = Field(alias="to")
    before: str
    bytes: Count


class CollectivePlan(Row):
    """One call, in execution order; ``bytes`` and ``seconds`` are those of the whole call, made ``times`` in a step.

    A call on one value names it itself; a bucket lists its ``parts``. ``id`` is what instructions call it; a collective inside the
    operator ``before`` has none.
    """

    id: str | None = None
    kind: KindName
    axes: tuple[str, ...]
    phase: PhaseName
    stage: Stage = 0
    times: Annotated[int, Field(ge=1)] = 1
    tensor: str | None = None
    value: str | None = None
    step: Count | None = None
    from_spec: SpecText | None = Field(None, alias="from")
    to_spec: SpecText | None = Field(None, alias="to")
    before: str | None = None
    parts: tuple[PartPlan, ...] | None = None
    bytes: Count
    received_bytes_per_rank: Count
    seconds: Seconds

    @model_validator(mode="after")
    def _one_or_many(self) -> CollectivePlan:
        own = [self.tensor, self.from_spec, self.to_spec, self.before]
        if self.parts is None and None in own:
            raise ValueError("a collective on one value needs tensor, from, to and before; a bucket needs parts")
        if self.parts is not None and (len(self.parts) < 2 or any(item is not None for item in (*own, self.value, self.step))):
            raise ValueError("a bucket has two parts or more, and tensor, value, step, from, to and before stand in these")
        if (self.id is None) != (self.parts is None and self.value is None):
            raise ValueError("a collective between operators has an id and a value or parts, one inside an operator neither")
        return self

    @property
    def values(self) -> int:
        """How many values it moves between operators; none inside one."""
        return len(self.parts) if self.parts is not None else int(self.value is not None)

    @property
    def members(self) -> tuple[PartPlan, ...]:
        """The parts of a bucket, or the one value as a part; none inside an operator."""
        if self.parts is not None:
            return self.parts
        if self.value is None or self.tensor is None or self.from_spec is None or self.to_spec is None or self.before is None:
            return ()
        return (
            PartPlan(
                tensor=self.tensor, value=self.value, step=self.step or 0, from_spec=self.from_spec, to_spec=self.to_spec,
                before=self.before, bytes=self.bytes,
            ),
        )  # fmt: skip


class AccumulationPlan(Row):
    """How microbatches make up a step; the fields are those of ``autopar.graph.Accumulation``, inputs by their public names."""

    cut: tuple[str, ...]
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    whole: bool = True
    reason: str | None = None
    divisor: str | None = None


class LimitsPlan(Row):
    """The settings of the schedule; the fields are those of ``autopar.schedule.Limits``.

    ``bucket_bytes``: of one bucket. ``ahead_bytes``: of collectives in flight before their readers need them. ``aside_bytes``: of
    collectives deferred into gaps. ``held_bytes``: live bytes up to which collectives may be in flight, 0 for no limit. ``summed_bytes``:
    of gradient sums kept over microbatches to be reduced once. Older files may say ``counts_waits``, which is ignored.
    """

    bucket_bytes: Count
    ahead_bytes: Count
    aside_bytes: Count
    held_bytes: Count = 0
    summed_bytes: Count = UNLIMITED

    @model_validator(mode="before")
    @classmethod
    def _without_old_rules(cls, data: Any) -> Any:
        return {key: value for key, value in data.items() if key != "counts_waits"} if isinstance(data, dict) else data


class InstructionPlan(Row):
    """One instruction of the schedule; the fields but ``stage`` are those of ``autopar.schedule.Instruction``.

    ``of`` is the operator of a run, the collective of a start or wait, the reshard's value of a slice, the gradient of an add; it runs in
    the microbatches from ``microbatch`` on, or once, before the first, where that is -1. ``over`` names the value whose memory a run's
    result takes, or which a start reduces in place.
    ``late`` is true of a wait that operators pass by: it is left until the loss is read. ``launches`` counts what the host issues for it.
    ``reads_back``: the host reads values of the run, so it waits for the device before it issues it.
    """

    id: Count
    kind: InstructionKind
    phase: PhaseName
    stage: Stage = 0
    microbatch: Annotated[int, Field(ge=-1)] = 0
    stream: str = ""
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    seconds: Seconds = 0.0
    bytes: Count = 0
    of: str = ""
    over: str | None = None
    late: bool | None = None
    launches: Count | None = None
    reads_back: bool | None = None

    def times(self, microbatches: int) -> int:
        """How often it runs in a step."""
        return 1 if self.microbatch < 0 else microbatches - self.microbatch
