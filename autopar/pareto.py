"""Pareto: the plans under a ladder of memory limits, and the file with their figures, schema ``autopar.pareto/1``."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from autopar.display import render
from autopar.errors import FileError
from autopar.files import parse_json
from autopar.plan import Plan
from autopar.rows import Count, Row, Seconds, Status

PARETO_SCHEMA = "autopar.pareto/1"
_AGAIN = "write the file again with autopar plan --pareto -o"


class Rung(Row):
    """One limit with the figures of its plan; the fields are the plan's."""

    memory_limit_bytes_per_rank: Count
    objective_seconds: Seconds
    bound_seconds: Seconds
    gap: Annotated[float, Field(le=1, allow_inf_nan=False)]
    status: Status
    peak_memory_bytes_per_rank: Count
    microbatches: Annotated[int, Field(ge=1)]
    recomputed_operators: Count
    mesh: dict[str, Annotated[int, Field(ge=1)]]


class BaselineFigures(Row):
    """What a plan written by hand takes, whatever the limit."""

    objective_seconds: Seconds
    peak_memory_bytes_per_rank: Count


class Ladder(Row):
    """The file: a row a limit, the least memory first. Older files name neither mode nor hardware, and have no baselines."""

    schema_: Literal["autopar.pareto/1"] = Field("autopar.pareto/1", alias="schema")
    target: str
    mode: Literal["train", "inference"] | None = None
    hardware: str | None = None
    baselines: dict[str, BaselineFigures] = Field(default_factory=dict)
    rows: Annotated[tuple[Rung, ...], Field(min_length=1)]

    def to_json(self) -> str:
        """The file's text."""
        return json.dumps(self.model_dump(by_alias=True, exclude_none=True), indent=1) + "\n"

    @staticmethod
    def from_json(text: str, name: str = "the ladder") -> Ladder:
        """Reads a file's text; ``name`` is what errors call it.

        Raises:
            FileError: naming the place that is truncated, of another schema or of the wrong type.
        """
        data = parse_json(text, name, _AGAIN)
        schema = data.get("schema") if isinstance(data, dict) else None
        if schema != PARETO_SCHEMA:
            found = f"the schema {schema!r}" if schema is not None else "no schema"
            hint = "give a file of autopar plan --pareto -o"
            raise FileError(f"{name} has {found}, a ladder of memory limits has {PARETO_SCHEMA!r}", hint)
        try:
            return Ladder.model_validate_json(text)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(map(str, first["loc"]))
            raise FileError(f"{name} is not a ladder of memory limits: {place}: {first['msg']}", f"undo the edit, or {_AGAIN}") from error


@dataclass(frozen=True)
class Pareto:
    """Plans by the memory they were allowed, the least first. A plan that fits in less stands again where nothing better was found."""

    plans: tuple[Plan, ...]

    @property
    def ladder(self) -> Ladder:
        """The figures of the plans."""
        first = self.plans[0]
        rows = tuple(
            Rung(
                memory_limit_bytes_per_rank=plan.memory_limit_bytes_per_rank, objective_seconds=plan.objective.seconds,
                bound_seconds=plan.objective.bound_seconds, gap=plan.objective.gap, status=plan.objective.status,
                peak_memory_bytes_per_rank=plan.predicted.peak_memory_bytes_per_rank, microbatches=plan.microbatches,
                recomputed_operators=len(plan.recomputed), mesh=plan.mesh,
            )
            for plan in self.plans
        )  # fmt: skip
        baselines = {
            name: BaselineFigures(objective_seconds=row.objective_seconds, peak_memory_bytes_per_rank=row.peak_memory_bytes_per_rank)
            for plan in self.plans
            for name, row in plan.baselines.items()
            if row.objective_seconds is not None and row.peak_memory_bytes_per_rank is not None
        }
        hardware = str(first.hardware.get("name"))
        return Ladder(target=first.model.target, mode=first.model.mode, hardware=hardware, baselines=baselines, rows=rows)

    def to_json(self) -> str:
        """One row a limit, with the plan's figures."""
        return self.ladder.to_json()

    def __str__(self) -> str:
        return render("Pareto.__str__", self.ladder)

    def _repr_html_(self) -> str:
        return render("Pareto._repr_html_", self.ladder)
