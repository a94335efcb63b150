"""``autopar check``: recomputes a plan from the plan alone; with TARGET also that it was made for this model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from autopar.cli.files import read_plan

SHOWN = 20


def check(
    plan: Annotated[Path, typer.Argument(help="a file written by autopar plan -o")],
    target: Annotated[str | None, typer.Argument(help="the model it was made for, to compare its graph too")] = None,
) -> None:
    from autopar.check import check as recompute

    read = read_plan(plan)
    graph = None
    if target is not None:
        from autopar.cli.target import capture_target

        graph = capture_target(target, read.model.mode, read.model.arguments.get("compute_dtype"))
    found = recompute(read, graph)
    if not found:
        print(
            f"{plan} holds: specs, strategies, {len(read.collectives)} collectives, {len(read.schedule)} instructions, "
            "step, cost and memory are as recomputed"
        )
        return
    for difference in found[:SHOWN]:
        print(difference)
    if len(found) > SHOWN:
        print(f"... and {len(found) - SHOWN} more")
    print(f"error: {plan} does not hold: {len(found)} differences, the first at {found[0].where}", file=sys.stderr)
    print("hint: a plan is valid as written by autopar plan; undo the edit, or plan again", file=sys.stderr)
    raise typer.Exit(1)
