"""PipelinePlan: the JSON file of a pipeline, schema ``autopar.pipeline-plan/1``.

A stage's plan is a whole ``autopar.plan/2`` document of the stage's own graph. What reads, checks and replays plans does so of stages too.
Beside the stages stand the cut, what crosses, and the order of each stage's actions.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PrivateAttr, ValidationError, model_validator

from autopar.display import render
from autopar.errors import FileError
from autopar.files import parse_json, write_whole
from autopar.plan import Plan
from autopar.rows import AccumulationPlan, BaselinePlan, Count, CreatedBy, DtypeName, Model, Objective, Row, Seconds, Shape

PIPELINE_SCHEMA = "autopar.pipeline-plan/1"
OrderName = Literal["auto", "whole", "gpipe", "1f1b", "zero-bubble", "interleaved"]
"""How each stage orders its actions. ``auto``: ``whole``, or ``zero-bubble`` where that is clearly faster. ``whole``: searched, with
backward whole. ``zero-bubble``: searched, with gradients of weights in actions of their own. ``gpipe``: all of forward, then all of
backward. ``1f1b``: one backward after each forward, once one microbatch more is in flight than stages are behind. ``interleaved``:
searched, with several stages a rank and backward whole."""
_AGAIN = "write the plan again with autopar plan -o"


class CallInput(Row):
    """An input of the call: the shape that one microbatch has of it."""

    shape: Shape
    dtype: DtypeName


class BoundaryPlan(Row):
    """A value that crosses in each microbatch, in the layout in which it does."""

    tensor: str
    from_stage: Count
    to_stage: Count
    spec: str
    bytes_per_rank: Count


class StagePlan(Row):
    """One stage.

    Args:
        first_module: where it begins; empty for the first stage.
        order: its actions, ``F0`` for forward of microbatch 0, ``B0`` for its backward, ``W0`` for its gradients of weights where these are
            apart.
        forward_seconds, backward_seconds: of one microbatch.
        last_backward_seconds: of the last microbatch, whose backward reduces gradients.
        begin_seconds: of what runs once, before the first microbatch: weights are gathered that are kept.
        last_sent_seconds: until the last microbatch's backward has made what it sends, where that is before its end.
        held_bytes_per_rank: of one microbatch between forward and backward.
        weights_seconds, last_weights_seconds, held_for_weights_bytes_per_rank: where gradients of weights are apart: of one microbatch, of
            the last, and the bytes that one holds between backward and these. ``backward_seconds`` are then without them.
        busy_seconds: of the stage alone.
        rest_bytes_per_rank: what it has there between its actions, without microbatches in flight.
        peak_memory_bytes_per_rank: of a rank that runs it, with the rank's other stages.
        in_flight: microbatches that it holds at once, at most.
        plan: of the stage's graph on the stage's ranks, for one microbatch in flight.
    """

    first_module: str
    order: str
    forward_seconds: Seconds
    backward_seconds: Seconds
    last_backward_seconds: Seconds
    optimizer_seconds: Seconds
    busy_seconds: Seconds
    held_bytes_per_rank: Count
    peak_memory_bytes_per_rank: Count
    in_flight: Annotated[int, Field(ge=1)]
    last_sent_seconds: Seconds | None = None
    begin_seconds: Seconds | None = None
    weights_seconds: Seconds | None = None
    last_weights_seconds: Seconds | None = None
    held_for_weights_bytes_per_rank: Count | None = None
    rest_bytes_per_rank: Count | None = None
    plan: Plan


class PipelinePlan(Row):
    """A whole pipeline. Values, never changed. ``order`` is what was asked for; each stage has its own in full.

    Stage s runs at position s mod ``mesh["pp"]``. Where a position has several, ``turns`` has its stages, ``0 0 4 0``, action by action.
    """

    schema_: Literal["autopar.pipeline-plan/1"] = Field("autopar.pipeline-plan/1", alias="schema")
    created_by: CreatedBy
    model: Model
    hardware: dict[str, Any]
    mesh: Annotated[dict[str, Annotated[int, Field(ge=1, lt=2**31)]], Field(min_length=1)]
    microbatches: Annotated[int, Field(ge=1)]
    microbatches_tried: tuple[Annotated[int, Field(ge=1)], ...] | None = None
    accumulation: AccumulationPlan | None = None
    memory_limit_bytes_per_rank: Count
    pins: dict[str, str] = Field(default_factory=dict)
    order: OrderName = "auto"
    objective: Objective
    transfer_seconds: Seconds
    inputs: dict[str, CallInput]
    boundaries: tuple[BoundaryPlan, ...]
    tied: dict[str, tuple[int, ...]] = Field(default_factory=dict)
    baselines: dict[str, BaselinePlan] = Field(default_factory=dict)
    turns: tuple[str, ...] | None = None
    stages: Annotated[tuple[StagePlan, ...], Field(min_length=1)]

    _loss: Callable[..., Any] | None = PrivateAttr(None)

    @model_validator(mode="after")
    def _is_of_one_pipeline(self) -> Self:
        """Raises ValueError: stages that the mesh, what crosses, or the microbatches do not agree with."""
        stages = len(self.stages)
        if stages % self.positions:
            raise ValueError(f"{stages} stages cannot be dealt to the {self.positions} positions of the mesh")
        for row in self.boundaries:
            if max(row.from_stage, row.to_stage) >= stages:
                raise ValueError(f"{row.tensor} crosses from stage {row.from_stage} to stage {row.to_stage}, of {stages} stages")
        for name in self.cut_inputs - self.inputs.keys():
            raise ValueError(f"microbatches cut the input {name}, which the call has not")
        for number, stage in enumerate(self.stages):
            made, cut = stage.plan.accumulation, self.cut_inputs & stage.plan.inputs.keys()
            if made is not None and self.accumulation is not None and (set(made.cut), made.weight) != (cut, self.accumulation.weight):
                raise ValueError(f"the accumulation of stage {number} is not that of the pipeline: it cuts {', '.join(sorted(cut))} there")
            kinds = [word[:1] for word in stage.order.split()]
            for kind in dict.fromkeys(("F", "B", *kinds)):
                count = kinds.count(kind)
                if count != self.microbatches:
                    raise ValueError(f"the order of stage {number} has {count} actions {kind}, of {self.microbatches} microbatches")
        return self

    @property
    def loss(self) -> Callable[..., Any] | None:
        """The loss it was made with in this process; not in the file, since it is code."""
        return self._loss

    def remember_loss(self, loss: Callable[..., Any] | None) -> None:
        """Keeps the loss for ``compile_pipeline``."""
        self._loss = loss

    @property
    def cut_inputs(self) -> set[str]:
        """The inputs that are cut into a part for each microbatch."""
        return set() if self.accumulation is None else set(self.accumulation.cut)

    @property
    def cut(self) -> tuple[str, ...]:
        """The first module of each stage but the first."""
        return tuple(stage.first_module for stage in self.stages[1:])

    @property
    def positions(self) -> int:
        """Ranks along the axis of stages."""
        return next(iter(self.mesh.values()))

    @property
    def chunks(self) -> int:
        """Stages that each rank runs."""
        return len(self.stages) // self.positions

    @property
    def order_asked(self) -> str:
        """The order as a user asks for it."""
        return f"{self.order}:{self.chunks}" if self.chunks > 1 else self.order

    @property
    def split(self) -> bool:
        """Whether gradients of weights are made in actions of their own."""
        return self.order == "zero-bubble" or (self.order == "auto" and any(row.weights_seconds is not None for row in self.stages))

    @property
    def peak_memory_bytes_per_rank(self) -> int:
        """Of the fullest stage."""
        return max(stage.peak_memory_bytes_per_rank for stage in self.stages)

    def model_names(self) -> frozenset[str]:
        """The names of all parameters and buffers, those of tied ones too."""
        rows = [(name, row) for stage in self.stages for name, row in stage.plan.parameters.items()]
        found = {name for name, _ in rows} | {other for _, row in rows for other in row.aliases or ()}
        return frozenset(found | {name for stage in self.stages for name in stage.plan.buffers})

    def to_json(self) -> str:
        """The file's text: a stage's plan one row a line, as in its own file."""
        data = self.model_dump(by_alias=True, exclude_none=True, exclude={"stages", *(("order",) if self.order == "auto" else ())})
        stages = []
        for stage in self.stages:
            facts = json.dumps(stage.model_dump(exclude_none=True, exclude={"plan"}), allow_nan=False, ensure_ascii=False)
            stages.append(f'{facts[:-1]}, "plan": {stage.plan.to_json().rstrip()}}}')
        rows = [f" {json.dumps(key)}: {json.dumps(value, allow_nan=False, ensure_ascii=False)}" for key, value in data.items()]
        return "{\n" + ",\n".join([*rows, ' "stages": [\n' + ",\n".join(stages) + "\n ]"]) + "\n}\n"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the file whole or not at all. Raises FileError: the folder does not exist or cannot be written."""
        write_whole(path, self.to_json())

    @staticmethod
    def from_json(text: str, name: str = "the pipeline's plan") -> PipelinePlan:
        """Reads a plan from text; ``name`` is what errors call it.

        Raises:
            FileError: naming the place that is truncated, of another schema or of the wrong type.
        """
        data = parse_json(text, name, _AGAIN)
        schema = data.get("schema") if isinstance(data, dict) else None
        if schema != PIPELINE_SCHEMA:
            found = f"the schema {schema!r}" if schema is not None else "no schema"
            raise FileError(f"{name} has {found}, a pipeline's plan has {PIPELINE_SCHEMA!r}", "give a file of autopar plan --mesh pp=...")
        try:
            return PipelinePlan.model_validate_json(text)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            words = ": ".join([*[".".join(map(str, first["loc"]))] * bool(first["loc"]), first["msg"].removeprefix("Value error, ")])
            raise FileError(f"{name} is not a pipeline's plan: {words}", f"undo the edit, or {_AGAIN}") from error

    def __str__(self) -> str:
        return render("PipelinePlan.__str__", self)

    def __repr__(self) -> str:
        """On one line; ``print(plan)`` shows the table of stages."""
        mesh = ",".join(f"{name}={size}" for name, size in self.mesh.items())
        figures = f"{self.objective.seconds:.4g} s, gap {100 * self.objective.gap:.2g} %"
        return f"<PipelinePlan of {self.model.target} on {mesh} of {self.hardware.get('name')}: {figures}>"
