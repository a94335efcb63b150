"""``autopar check``: recomputes a plan from the plan alone; with TARGET also that it was made for this model."""

from __future__ import annotations

import json as json_format
from pathlib import Path
from typing import Annotated, cast

import typer

from autopar.cli.files import read_pipeline, read_plan
from autopar.cli.terminal import out
from autopar.errors import VerificationError
from autopar.pipeline_plan import PipelinePlan
from autopar.plan import Plan

SHOWN = 20


def check(
    plan: Annotated[Path, typer.Argument(help="a file written by autopar plan -o")],
    target: Annotated[str | None, typer.Argument(help="the model it was made for, to compare its graph too")] = None,
    json: Annotated[bool, typer.Option("--json", help="print JSON instead of lines")] = False,
) -> None:
    from autopar.check import check as recompute
    from autopar.check.pipelines import check_pipeline

    pipeline = read_pipeline(plan)
    read: Plan | PipelinePlan = read_plan(plan) if pipeline is None else pipeline
    graph = None
    if target is not None:
        from autopar.cli.target import capture_target

        graph = capture_target(target, read.model.mode, read.model.arguments.get("compute_dtype"), read.microbatches)
    found = check_pipeline(pipeline, graph) if pipeline is not None else recompute(cast(Plan, read), graph)
    if json:
        differences = [{"where": item.where, "words": str(item)} for item in found]
        out(json_format.dumps({"plan": str(plan), "holds": not found, "differences": differences}, indent=1))
    elif not found:
        out(f"{plan} holds: {_held(read)}, step, cost and memory are as recomputed")
    else:
        for difference in found[:SHOWN]:
            out(difference)
        if len(found) > SHOWN:
            out(f"... and {len(found) - SHOWN} more")
    if found:
        raise VerificationError(
            f"{plan} does not hold: {len(found)} differences, the first at {found[0].where}",
            "a plan is valid as written by autopar plan; undo the edit, or plan again",
        )


def _held(plan: Plan | PipelinePlan) -> str:
    if isinstance(plan, PipelinePlan):
        return f"{len(plan.stages)} stages, {len(plan.boundaries)} values that cross, the timetable"
    return f"specs, strategies, {len(plan.collectives)} collectives, {len(plan.schedule)} instructions"
