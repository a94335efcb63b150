"""Plan: what the user keeps. The JSON file of schema ``autopar.plan/2`` and its models.

A plan is self-contained: every tensor's shape, dtype and spec, every operator with its arguments, every reshard, every collective and the
schedule are in it, so that ``check`` can recompute it and a runtime can run it. One parameter, operator, reshard, collective and
instruction a line, stable order, units in the keys: ``git diff`` is the review.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, model_validator

from autopar.errors import FileError, SpecError
from autopar.files import parse_json, write_whole
from autopar.sharding import ShardingSpec
from cost_models import COST_MODELS

SCHEMA = "autopar.plan/2"

PhaseName = Literal["forward", "backward", "recompute"]
Status = Literal["optimal", "feasible"]
EnteringKind = Literal["input", "parameter", "buffer", "constant", "tangent"]
LeavingKind = Literal["output", "gradient", "buffer"]
InstructionKind = Literal["run", "start", "wait", "slice", "free"]
CollectiveKind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute"]


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


SpecText = Annotated[str, AfterValidator(_readable)]
Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Shape = tuple[Count, ...]


class _Row(BaseModel):
    # strict: "16" is no size and true no count; forbid: a misspelt key is an error, not a default
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", populate_by_name=True)


class CreatedBy(_Row):
    """What made the plan."""

    autopar: str
    torch: str
    solver: str
    cost_model: Annotated[str, AfterValidator(_registered)]


class Model(_Row):
    """What was planned. ``arguments`` is ``Graph.arguments``: how the call's tensors and results are nested."""

    target: str
    mode: Literal["train", "inference"]
    optimizer: str
    graph_sha256: str
    arguments: dict[str, Any] = Field(default_factory=dict)


class Objective(_Row):
    """Seconds of the step, with the bound proved over all plans for this mesh.

    The step is ``predicted.step_seconds``; under the communication cost model, where nothing overlaps, it is the sum of the collectives.
    ``tied_seconds`` of it are the price of equal layers that lie alike.
    """

    seconds: Seconds
    bound_seconds: Seconds
    gap: float
    status: Status
    solve_seconds: Seconds
    tied_seconds: Seconds | None = None


class MemoryParts(_Row):
    """What is live on a rank at the peak, in bytes."""

    parameters: Count
    gradients: Count
    optimizer: Count
    activations: Count
    temporaries: Count


class Predicted(_Row):
    """Seconds of one step and bytes of one rank.

    ``step_seconds`` is the simulated time of the schedule with the optimizer's step, ``sequential_seconds`` the sum in sequence.
    """

    compute_seconds: Seconds
    communication_seconds: Seconds
    optimizer_seconds: Seconds
    step_seconds: Seconds
    sequential_seconds: Seconds
    received_bytes_per_rank: Count
    peak_memory_bytes_per_rank: Count
    memory: MemoryParts


class BaselinePlan(_Row):
    """A plan people write by hand, in our own specs, priced by the same model. Where there is none, ``reason`` says why."""

    objective_seconds: Seconds | None = None
    step_seconds: Seconds | None = None
    peak_memory_bytes_per_rank: Count | None = None
    feasible: bool
    reason: str | None = None


class TensorSpec(_Row):
    """Global shape, dtype and spec."""

    tensor: str
    shape: Shape
    dtype: str
    spec: SpecText


class EnteringSpec(TensorSpec):
    """A value that comes from outside; ``index`` is its place among all that enters."""

    index: Count


class ParameterSpec(EnteringSpec):
    """A parameter; ``aliases`` are further module names of the same tied parameter."""

    trained: bool | None = None
    aliases: tuple[str, ...] | None = None


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


class OpPlan(_Row):
    """One operator with its arguments and its strategy. ``factors`` gives the mesh axes that split each factor of its rule.

    A row of phase ``recompute`` is the second run of a forward operator: ``NAME@again`` of ``NAME``, the same but for what it reads and
    the values that it makes.
    """

    name: str
    op: str
    module: str
    location: str | None = None
    phase: PhaseName
    stage: Count = 0
    times: Annotated[int, Field(ge=1)] = 1
    attributes: dict[str, Any]
    factors: dict[str, tuple[str, ...]] | None = None
    inputs: tuple[ValueSpec, ...]
    outputs: tuple[ValueSpec, ...]
    seconds: Seconds


class ReshardPlan(_Row):
    """A tensor in a further spec, made once from ``source``; ``before`` is who reads it first.

    Its steps follow from the specs. The value after step n, counted from 1, is ``VALUE#n``, after the last step ``VALUE``.
    """

    value: str
    tensor: str
    source: str
    from_spec: SpecText = Field(alias="from")
    to_spec: SpecText = Field(alias="to")
    phase: PhaseName
    before: str


class PartPlan(_Row):
    """One value's share of a bucket: which step (counted from 0) of the reshard ``value``, and the full tensor's bytes on the group."""

    tensor: str
    value: str
    step: Count = 0
    from_spec: SpecText = Field(alias="from")
    to_spec: SpecText = Field(alias="to")
    before: str
    bytes: Count


class CollectivePlan(_Row):
    """One call, in execution order; ``bytes`` and ``seconds`` are those of the whole call.

    A call on one value names it itself; a bucket lists its ``parts``. ``id`` is what instructions call it; a collective inside the
    operator ``before`` has none.
    """

    id: str | None = None
    kind: CollectiveKind
    axes: tuple[str, ...]
    phase: PhaseName
    stage: Count = 0
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


class LimitsPlan(_Row):
    """What the schedule keeps to: bytes of a bucket, bytes of collectives in flight ahead of their readers or behind, filled gaps, and
    bytes held in all up to which anything is in flight (0: no limit)."""

    bucket_bytes: Count
    ahead_bytes: Count
    aside_bytes: Count
    held_bytes: Count = 0


class InstructionPlan(_Row):
    """One instruction of the schedule; the fields are those of ``autopar.schedule.Instruction``.

    ``of`` is the operator of a run, the collective of a start or wait, the reshard's value of a slice.
    """

    id: Count
    kind: InstructionKind
    phase: PhaseName
    stage: Count = 0
    microbatch: Count = 0
    stream: str = ""
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    seconds: Seconds = 0.0
    bytes: Count = 0
    of: str = ""


class Plan(_Row):
    """A whole plan. Values, never changed: ``model_copy(update=...)`` makes another."""

    schema_: Literal["autopar.plan/2"] = Field("autopar.plan/2", alias="schema")
    created_by: CreatedBy
    model: Model
    hardware: dict[str, Any]
    mesh: dict[str, Annotated[int, Field(ge=1)]]
    microbatches: Annotated[int, Field(ge=1)] = 1
    memory_limit_bytes_per_rank: Count
    pins: dict[str, str] = Field(default_factory=dict)
    objective: Objective
    predicted: Predicted
    baselines: dict[str, BaselinePlan]
    inputs: dict[str, EnteringSpec]
    outputs: dict[str, OutputSpec]
    parameters: dict[str, ParameterSpec]
    buffers: dict[str, EnteringSpec]
    constants: dict[str, EnteringSpec] = Field(default_factory=dict)
    tangents: dict[str, EnteringSpec] = Field(default_factory=dict)
    gradients: tuple[LeavingSpec, ...] = ()
    buffer_updates: tuple[LeavingSpec, ...] = ()
    ops: tuple[OpPlan, ...]
    reshards: tuple[ReshardPlan, ...]
    collectives: tuple[CollectivePlan, ...]
    limits: LimitsPlan
    schedule: tuple[InstructionPlan, ...]

    _loss: Callable[..., Any] | None = PrivateAttr(None)

    def __eq__(self, other: object) -> bool:
        """Equal in the file; the remembered loss does not count."""
        return isinstance(other, Plan) and all(getattr(self, name) == getattr(other, name) for name in type(self).model_fields)

    __hash__ = None  # type: ignore[assignment]

    @property
    def loss(self) -> Callable[..., Any] | None:
        """The loss it was made with in this process; not in the file, since it is code."""
        return self._loss

    def remember_loss(self, loss: Callable[..., Any] | None) -> None:
        """Keeps the loss for ``compile``."""
        self._loss = loss

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of the mesh axes, in order."""
        return tuple(self.mesh.values())

    @property
    def captured(self) -> tuple[OpPlan, ...]:
        """The operators as captured, without second runs."""
        return tuple(row for row in self.ops if row.phase != "recompute")

    @property
    def recomputed(self) -> tuple[OpPlan, ...]:
        """The second runs."""
        return tuple(row for row in self.ops if row.phase == "recompute")

    @property
    def entering(self) -> tuple[tuple[EnteringKind, str, EnteringSpec], ...]:
        """Every value that comes from outside, by its place: (kind, public name, spec)."""
        kinds: tuple[tuple[EnteringKind, Mapping[str, EnteringSpec]], ...] = (
            ("input", self.inputs), ("parameter", self.parameters), ("buffer", self.buffers),
            ("constant", self.constants), ("tangent", self.tangents),
        )  # fmt: skip
        found = [(kind, name, spec) for kind, table in kinds for name, spec in table.items()]
        return tuple(sorted(found, key=lambda item: item[2].index))

    @property
    def leaving(self) -> tuple[tuple[LeavingKind, str, OutputSpec], ...]:
        """Everything that leaves, by its place: (kind, public name, spec)."""
        found: list[tuple[LeavingKind, str, OutputSpec]] = [("output", name, spec) for name, spec in self.outputs.items()]
        found += [("gradient", row.name, row) for row in self.gradients]
        found += [("buffer", row.name, row) for row in self.buffer_updates]
        return tuple(sorted(found, key=lambda item: item[2].index))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the file whole or not at all: a temporary file beside it, then a rename.

        Raises:
            FileError: when the folder does not exist or cannot be written.
        """
        write_whole(path, self.to_json())

    def to_json(self) -> str:
        """The file's text: one row a line."""
        return "".join(_lines(self.model_dump(by_alias=True, exclude_none=True)))

    @staticmethod
    def from_json(text: str, name: str = "the plan") -> Plan:
        """Reads a plan of this schema from text; ``name`` is what errors call it. ``autopar.load`` reads files, older ones too.

        Raises:
            FileError: naming the place that is truncated, of another schema or of the wrong type.
        """
        try:
            return Plan.model_validate_json(text)
        except ValidationError as error:
            raise _unreadable(text, name, error) from error

    def __str__(self) -> str:
        from autopar.report import summary

        return summary(self)

    def __repr__(self) -> str:
        """On one line; ``print(plan)`` shows the tables."""
        mesh = ",".join(f"{name}={size}" for name, size in self.mesh.items())
        figures = f"{self.objective.seconds:.4g} s, gap {100 * self.objective.gap:.2g} %, {self.predicted.peak_memory_bytes_per_rank} bytes"
        return f"<Plan of {self.model.target}, {self.model.mode}, on {mesh} of {self.hardware.get('name')}: {figures}>"

    def __dir__(self) -> list[str]:
        """What a plan is and does, without what its base class brings along."""
        return [*type(self).model_fields, *(name for name in vars(Plan) if not name.startswith(("_", "model_")))]

    def _repr_html_(self) -> str:
        from autopar.report import fragment

        return fragment(self)


def _unreadable(text: str, name: str, error: ValidationError) -> FileError:
    """Why the text is no plan: not whole, of another schema, or the first key of the wrong type."""
    hint = "write the plan again with autopar plan -o"
    try:
        data = parse_json(text, name, hint)
    except FileError as broken:
        return broken
    schema = data.get("schema") if isinstance(data, dict) else None
    if schema != SCHEMA:
        found = f"the schema {schema!r}" if schema is not None else "no schema"
        return FileError(f"{name} has {found}, this autopar reads {SCHEMA!r}", "write the plan again with this version of autopar")
    first = error.errors(include_url=False)[0]
    more = f" ({error.error_count() - 1} further places)" if error.error_count() > 1 else ""
    return FileError(
        f"{name} is not a plan: {_place(first['loc'])}: {first['msg']}, found {_short(first['input'])}{more}",
        "undo the edit, or write the plan again with autopar plan -o",
    )


_BY_ROW = (
    "baselines", "inputs", "outputs", "parameters", "buffers", "constants", "tangents",
    "gradients", "buffer_updates", "ops", "reshards", "collectives", "schedule",
)  # fmt: skip


def _lines(data: Mapping[str, Any]) -> Iterator[str]:
    yield "{"
    for number, (key, value) in enumerate(data.items()):
        yield f"{',' if number else ''}\n {json.dumps(key)}: "
        if key not in _BY_ROW or not value:
            yield _compact(value)
        elif isinstance(value, dict):
            yield "{\n  " + ",\n  ".join(f"{json.dumps(name)}: {_compact(row)}" for name, row in value.items()) + "\n }"
        else:
            yield "[\n  " + ",\n  ".join(map(_compact, value)) + "\n ]"
    yield "\n}\n"


def _compact(value: Any) -> str:
    return json.dumps(value, allow_nan=False, ensure_ascii=False)


def _place(location: tuple[int | str, ...]) -> str:
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    return text.removeprefix(".") or "the top"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
