"""``autopar check``: recomputes a plan from the plan alone; with TARGET also that it was made for this model."""

from __future__ import annotations

import json as json_format
from pathlib import Path
from typing import Annotated

import typer

from autopar.cli.files import read_plan
from autopar.cli.terminal import out
from autopar.errors import VerificationError

SHOWN = 20


def check(
    plan: Annotated[Path, typer.Argument(help="a file written by autopar plan -o")],
    target: Annotated[str | None, typer.Argument(help="the model it was made for, to compare its graph too")] = None,
    json: Annotated[bool, typer.Option("--json", help="print JSON instead of lines")] = False,
) -> None:
    from autopar.check import check as recompute

    read = read_plan(plan)
    graph = None
    if target is not None:
        from autopar.cli.target import capture_target

        graph = capture_target(target, read.model.mode, read.model.arguments.get("compute_dtype"), read.microbatches)
    found = recompute(read, graph)
    if json:
        differences = [{"where": item.where, "words": str(item)} for item in found]
        out(json_format.dumps({"plan": str(plan), "holds": not found, "differences": differences}, indent=1))
    elif not found:
        out(
            f"{plan} holds: specs, strategies, {len(read.collectives)} collectives, {len(read.schedule)} instructions, "
            "step, cost and memory are as recomputed"
        )
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
