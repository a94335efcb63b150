"""A plan of the schema before, scheduled: only where such a file is read, since the passes take longer to import than a plan to show."""

from __future__ import annotations

import json
from typing import Any

from autopar.check import illegal_rows
from autopar.errors import FileError
from autopar.plan import SCHEMA, Plan
from autopar.recording.replaying import assignment_of, graph_of, machine_of
from autopar.recording.writing import write
from autopar.rows import BaselinePlan
from autopar.schedule import Limits, Memory, Schedule, make_schedule, memory
from autopar.schedule.passes import default_limits

UNPRICED = "priced under {schema}, by the sum in sequence"


def schedule(data: dict[str, Any], name: str) -> tuple[Plan, str]:
    """The plan of data of the old schema with a schedule, and what that changed in words. Raises FileError."""
    schema = data["schema"]
    unpriced = UNPRICED.format(schema=schema)
    old = Plan.from_json(json.dumps(_without_schedule(data)), name)
    broken = illegal_rows(old)
    if broken:
        raise FileError(f"{name} cannot be scheduled: {broken[0]}", "undo the edit, or write the plan again with autopar plan -o")
    graph = graph_of(old)
    if graph.sha256 != old.model.graph_sha256:
        raise FileError(f"{name} cannot be scheduled: its operators are not those it was made for", "undo the edit, or plan again")
    made, held = _fitting(old)
    summed = old.created_by.cost_model == "communication"
    plan = write(
        made, held, target=old.model.target, optimizer=old.model.optimizer, memory_limit=old.memory_limit_bytes_per_rank, pins=old.pins,
        bound_seconds=old.objective.bound_seconds if summed else 0.0, solve_seconds=old.objective.solve_seconds,
        created_by=old.created_by,
        baselines={baseline: BaselinePlan(feasible=row.feasible, reason=unpriced) for baseline, row in old.baselines.items()},
    )  # fmt: skip
    words = "its objective stays the sum of its collectives" if summed else (
        f"its objective is now the step, {plan.objective.seconds:.4g} s (the sum was {old.objective.seconds:.4g} s), "
        "without the old bound, which was one on the sum"
    )  # fmt: skip
    fits = plan.predicted.peak_memory_bytes_per_rank <= plan.memory_limit_bytes_per_rank
    more = "" if fits else f"; it needs {held.peak} bytes per rank, over its limit of {plan.memory_limit_bytes_per_rank}"
    return plan, f"{name} is of schema {schema}: it was scheduled on load, and {words}{more}"


def _without_schedule(data: dict[str, Any]) -> dict[str, Any]:
    """The old data with the keys of this schema, so that one reader says what is wrong in both."""
    found = {**data, "schema": SCHEMA, "schedule": [], "collectives": [], "limits": {"bucket_bytes": 0, "ahead_bytes": 0, "aside_bytes": 0}}
    if isinstance(data.get("predicted"), dict):
        found["predicted"] = {**data["predicted"], "sequential_seconds": 0.0}
    return found


def _fitting(plan: Plan) -> tuple[Schedule, Memory]:
    """The plan's schedule; where buckets and gathering ahead would not fit in its memory limit, the one without them."""
    machine, graph = machine_of(plan), graph_of(plan)
    assignment = assignment_of(plan, graph)
    for limits in (default_limits(machine), Limits(0, 0)):
        schedule = make_schedule(graph, assignment, machine, limits)
        held = memory(schedule, plan.model.optimizer)
        if held.peak <= plan.memory_limit_bytes_per_rank:
            break
    return schedule, held
