"""``autopar explain``: why one thing in a plan is as it is."""

from __future__ import annotations

import json as json_format
from pathlib import Path
from typing import Annotated

import typer

from autopar import compare
from autopar.cli.files import read_plan
from autopar.cli.terminal import out


def explain(
    plan: Annotated[Path, typer.Argument(help="a file written by autopar plan -o")],
    name: Annotated[str, typer.Argument(help="a parameter, buffer, input, output, operator, tensor, reshard or collective")],
    json: Annotated[bool, typer.Option("--json", help="print JSON instead of lines")] = False,
) -> None:
    lines = compare.explain(read_plan(plan), name)
    out(json_format.dumps({"plan": str(plan), "name": name, "lines": lines}, indent=1) if json else "\n".join(lines))
