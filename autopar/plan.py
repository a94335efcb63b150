"""Plan: what the user keeps. The JSON file of schema ``autopar.plan/2`` and its models.

A plan is self-contained: every tensor's shape, dtype and spec, every operator with its arguments, every reshard, every collective and the
schedule are in it, so that ``check`` can recompute it and a runtime can run it. One parameter, operator, reshard, collective and
instruction a line, stable order, units in the keys: ``git diff`` is the review.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, PrivateAttr, ValidationError

from autopar.cost_models.mesh import MOST_AXES
from autopar.display import render
from autopar.errors import FileError
from autopar.files import loads, parse_json, write_whole
from autopar.graph import DTYPE_BYTES
from autopar.rows import (
    AccumulationPlan,
    BaselinePlan,
    CollectivePlan,
    Count,
    CreatedBy,
    EnteringKind,
    EnteringSpec,
    InstructionPlan,
    LeavingKind,
    LeavingSpec,
    LimitsPlan,
    MeasuredPlan,
    Model,
    Objective,
    OpPlan,
    OutputSpec,
    ParameterSpec,
    Predicted,
    ReshardPlan,
    Row,
    SearchRecord,
    TransferPlan,
)
from autopar.sharding import ShardingSpec
from autopar.unread import MARK, Unread, cut, holding

if TYPE_CHECKING:
    import networkx

SCHEMA = "autopar.plan/2"


class Plan(Row):
    """A whole plan. Values, never changed: ``model_copy(update=...)`` makes another."""

    schema_: Literal["autopar.plan/2"] = Field("autopar.plan/2", alias="schema")
    created_by: CreatedBy
    model: Model
    hardware: dict[str, Any]
    mesh: Annotated[dict[str, Annotated[int, Field(ge=1, lt=2**31)]], Field(min_length=1, max_length=MOST_AXES)]
    microbatches: Annotated[int, Field(ge=1)] = 1
    microbatches_tried: tuple[Annotated[int, Field(ge=1)], ...] | None = None
    accumulation: AccumulationPlan | None = None
    memory_limit_bytes_per_rank: Count
    pins: dict[str, str] = Field(default_factory=dict)
    objective: Objective
    search: SearchRecord | None = None
    predicted: Predicted
    measured: MeasuredPlan | None = None
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
    transfers: tuple[TransferPlan, ...] | None = None
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
    def copies(self) -> tuple[TransferPlan, ...]:
        """The copies to the host and back, in execution order; none of a plan that offloads nothing."""
        return self.transfers or ()

    @property
    def captured(self) -> tuple[OpPlan, ...]:
        """The operators as captured, without second runs."""
        return tuple(row for row in self.ops if row.phase != "recompute")

    @property
    def recomputed(self) -> tuple[OpPlan, ...]:
        """The second runs."""
        return tuple(row for row in holding(self.ops, "recompute") if row.phase == "recompute")

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

    def parts(self, tensor: str) -> int:
        """How many parts of what enters are there at once: of an input that is cut, those of all microbatches."""
        cut = self.accumulation.cut if self.accumulation is not None else ()
        return self.microbatches if any(name in cut and row.tensor == tensor for name, row in self.inputs.items()) else 1

    @property
    def collectives_in_a_step(self) -> tuple[CollectivePlan, ...]:
        """The collectives as a step runs them, one after another: before the first microbatch, then in each."""
        begins = {row.of: row.microbatch for row in self.schedule if row.kind == "start"}
        first = [begins.get(row.id or "", 0) for row in self.collectives]
        rows = list(zip(first, self.collectives, strict=True))
        before = (row for begin, row in rows if begin < 0)
        return (*before, *(row for number in range(self.microbatches) for begin, row in rows if 0 <= begin <= number))

    def to_networkx(self) -> networkx.MultiDiGraph[str]:
        """The dataflow of a step: a node for each operator, reshard, input and output, an edge for each read of a value.

        Names of nodes: the operator's, the reshard's value, the input's tensor, and ``KIND:NAME`` of an output (``output:loss``).
        Attributes of nodes: ``kind`` (``op``, ``reshard``, ``add``, or the input's or output's), ``name``, ``seconds`` and ``bytes``;
        of operators also ``op``, ``module``, ``phase``. ``add`` sums the gradients of microbatches.
        ``seconds`` are those of one run, collectives included; ``bytes`` are the full tensors of the collectives.
        Reshards in one bucket share its seconds by their bytes.
        Attributes of edges: ``tensor``, ``value``, ``shape``, ``dtype``, ``spec``, ``bytes``, ``bytes_per_rank``, and the reader's
        ``seconds``: ``networkx.dag_longest_path(plan.to_networkx(), "seconds")`` is the critical path.
        """
        import networkx  # it takes 0.15 s to import: only callers pay for it

        made = networkx.MultiDiGraph()
        maker: dict[str, str] = {}
        shapes: dict[str, tuple[tuple[int, ...], str]] = {}
        reads: list[tuple[str, str, str, str]] = []  # node, tensor, value, spec

        def add(node: str, kind: str, name: str, seconds: float = 0.0, **facts: str) -> None:
            made.add_node(node, kind=kind, name=name, seconds=seconds, bytes=0, **facts)

        for kind, name, entering in self.entering:
            add(entering.tensor, kind, name)
            maker[entering.tensor] = entering.tensor
            shapes[entering.tensor] = entering.in_graph(self.sizes)[0], entering.dtype
        for row in self.ops:
            add(row.name, "op", row.name, row.seconds, op=row.op, module=row.module, phase=row.phase)
            reads += [(row.name, item.tensor, item.value or item.tensor, item.spec) for item in row.inputs]
            maker.update((item.value or item.tensor, row.name) for item in row.outputs)
            shapes.update((item.tensor, (item.shape, item.dtype)) for item in row.outputs)
        for change in self.reshards:
            add(change.value, "reshard", change.value)
            reads.append((change.value, change.tensor, change.source, change.from_spec))
            maker[change.value] = change.value
        for side, name, leaving in self.leaving:
            add(f"{side}:{name}", side, name)
            reads.append((f"{side}:{name}", leaving.tensor, leaving.value or leaving.tensor, leaving.spec))
        specs = {value: (tensor, spec) for _, tensor, value, spec in reads}
        for item in self.schedule:
            if item.kind == "add":
                ((value,), (total,)) = item.reads, item.writes
                tensor, spec = specs[total]
                add(total, "add", total, item.seconds)
                maker[total] = total
                reads.append((total, tensor, value, spec))
        for call in self.collectives:
            parts = [(part.value, part.bytes) for part in call.members] or [(str(call.before), call.bytes)]
            total_bytes = sum(size for _, size in parts)
            for node, size in parts:
                made.nodes[node]["seconds"] += call.seconds * (size / total_bytes if total_bytes else 1 / len(parts))
                made.nodes[node]["bytes"] += size
        for copy in self.copies:
            made.nodes[copy.value].update(seconds=copy.seconds, bytes=copy.bytes)
        for node, tensor, value, spec in reads:
            shape, dtype = shapes[tensor]
            local = ShardingSpec.parse(spec).local_shape(shape, self.sizes)
            full, own = (math.prod(sizes) * DTYPE_BYTES[dtype] for sizes in (shape, local))
            made.add_edge(
                maker[value], node, tensor=tensor, value=value, shape=shape, dtype=dtype, spec=spec, bytes=full, bytes_per_rank=own,
                seconds=made.nodes[node]["seconds"],
            )  # fmt: skip
        return made

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the file whole or not at all: a temporary file beside it, then a rename.

        Raises:
            FileError: when the folder does not exist or cannot be written.
        """
        write_whole(path, self.to_json())

    def to_json(self) -> str:
        """The file's text: one row a line."""
        whole = self.model_copy(update={key: tuple(getattr(self, key)) for key in _TABLES})
        return "".join(_lines(whole.model_dump(by_alias=True, exclude_none=True)))

    @staticmethod
    def from_json(text: str, name: str = "the plan") -> Plan:
        """Reads a plan of this schema from text; ``name`` is what errors call it. ``autopar.load`` reads files, older ones too.

        Raises:
            FileError: naming the place that is truncated, of another schema or of the wrong type, or a key that stands twice.
        """
        try:
            plan = Plan.model_validate_json(text)
        except ValidationError as error:
            raise _unreadable(text, name, error) from error
        parse_json(text, name, _AGAIN)  # of a key that stands twice the model sees the last alone
        return plan

    @staticmethod
    def from_json_in_part(text: str, name: str = "the plan") -> Plan:
        """As ``from_json``, but the long tables (operators, reshards, collectives, schedule) are parsed on first use.

        Raises:
            FileError: as ``from_json``, for all but these tables, which raise it when they are read.
        """
        rest, found = cut(text, _TABLES)
        try:
            top = loads(rest)
        except (ValueError, RecursionError):
            top = None
        marked = isinstance(top, dict) and all(top.get(key) == json.loads(MARK) for key in found)
        if not marked or rest.count(MARK) != len(found):
            return Plan.from_json(text, name)
        try:
            plan = Plan.model_validate_json(rest.replace(MARK, "[]"))
        except ValidationError:
            return Plan.from_json(text, name)
        whole = cache(lambda: Plan.from_json(text, name))
        unread = {key: Unread(_TABLES[key], lines, partial(_table, whole, key)) for key, lines in found.items()}
        return plan.model_copy(update=unread)

    def __str__(self) -> str:
        return render("Plan.__str__", self)

    def __repr__(self) -> str:
        """On one line; ``print(plan)`` shows the tables."""
        mesh = ",".join(f"{name}={size}" for name, size in self.mesh.items())
        figures = f"{self.objective.seconds:.4g} s, gap {100 * self.objective.gap:.2g} %, {self.predicted.peak_memory_bytes_per_rank} bytes"
        return f"<Plan of {self.model.target}, {self.model.mode}, on {mesh} of {self.hardware.get('name')}: {figures}>"

    def __dir__(self) -> list[str]:
        """A plan's own fields and methods, without those of its base class."""
        return [*type(self).model_fields, *(name for name in vars(Plan) if not name.startswith(("_", "model_")))]

    def _repr_html_(self) -> str:
        return render("Plan._repr_html_", self)


def _unreadable(text: str, name: str, error: ValidationError) -> FileError:
    """Why the text is not a plan: not whole, of another schema, or the first key of the wrong type."""
    try:
        data = parse_json(text, name, _AGAIN)
    except FileError as broken:
        return broken
    schema = data.get("schema") if isinstance(data, dict) else None
    if schema != SCHEMA:
        found = f"the schema {schema!r}" if schema is not None else "no schema"
        plan = isinstance(schema, str) and schema.startswith(SCHEMA.partition("/")[0] + "/")
        if str(schema).startswith("autopar.pipeline-plan/"):
            hint = "autopar show, explain, diff, check and verify take it; from Python, autopar.load"
            return FileError(f"{name} is a pipeline's plan", hint)
        hint = "write the plan again with this version of autopar" if plan else "give a file written by autopar plan -o, without --pareto"
        return FileError(f"{name} has {found}, this autopar reads {SCHEMA!r}", hint)
    first = error.errors(include_url=False)[0]
    more = f" ({error.error_count() - 1} further places)" if error.error_count() > 1 else ""
    return FileError(
        f"{name} is not a plan: {_place(first['loc'])}: {first['msg']}, found {_short(first['input'])}{more}",
        "undo the edit, or write the plan again with autopar plan -o",
    )


def _table(whole: Callable[[], Plan], key: str) -> tuple[Any, ...]:
    """A table of the plan as it is read whole."""
    found: tuple[Any, ...] = getattr(whole(), key)
    return found


_AGAIN = "write the plan again with autopar plan -o"
_TABLES: dict[str, type[Row]] = {"ops": OpPlan, "reshards": ReshardPlan, "collectives": CollectivePlan, "schedule": InstructionPlan}
"""The long ones, which may be read when they are asked for."""
_BY_ROW = (
    "baselines", "inputs", "outputs", "parameters", "buffers", "constants", "tangents",
    "gradients", "buffer_updates", "ops", "reshards", "collectives", "transfers", "schedule",
)  # fmt: skip


_ENDING_IN_ROWS = {"search": "phases", "measured": "candidates"}
"""Records that end in a table, and its key."""


def _lines(data: Mapping[str, Any]) -> Iterator[str]:
    yield "{"
    for number, (key, value) in enumerate(data.items()):
        yield f"{',' if number else ''}\n {json.dumps(key)}: "
        if key in _ENDING_IN_ROWS:
            yield _with_rows(value, _ENDING_IN_ROWS[key])
        elif key not in _BY_ROW or not value:
            yield _compact(value)
        elif isinstance(value, dict):
            yield "{\n  " + ",\n  ".join(f"{json.dumps(name)}: {_compact(row)}" for name, row in value.items()) + "\n }"
        else:
            yield "[\n  " + ",\n  ".join(map(_compact, value)) + "\n ]"
    yield "\n}\n"


def _with_rows(record: Mapping[str, Any], table: str) -> str:
    """A record: a line for its facts, then one for each row of its table."""
    facts = _compact({key: value for key, value in record.items() if key != table})
    rows = ",\n  ".join(map(_compact, record[table]))
    return f'{facts[:-1]}, "{table}": [' + (f"\n  {rows}\n ]}}" if rows else "]}")


_compact = json.JSONEncoder(allow_nan=False, ensure_ascii=False).encode
"""A value on one line; made once, since a deep plan has tens of thousands of rows."""


def _place(location: tuple[int | str, ...]) -> str:
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    return text.removeprefix(".") or "the top"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
