"""``autopar diff``: what changed between two plans."""

from __future__ import annotations

import json as json_format
from pathlib import Path
from typing import Annotated

import typer

from autopar import compare
from autopar.cli.files import read_pipeline, read_plan
from autopar.cli.terminal import out
from autopar.errors import UsageError
from autopar.files import STANDARD


def diff(
    first: Annotated[Path, typer.Argument(help="a plan file, of a pipeline too")],
    second: Annotated[Path, typer.Argument(help="another plan file")],
    json: Annotated[bool, typer.Option("--json", help="print JSON instead of lines")] = False,
) -> None:
    if first == second == STANDARD:
        raise UsageError("two plans cannot both be read from the standard input", "give a file for one of them: autopar diff plan.json -")
    old, new = (read_pipeline(path) or read_plan(path, in_part=True) for path in (first, second))
    found = compare.diff(old, new)
    if json:
        out(json_format.dumps({"first": str(first), "second": str(second), "same": not found, "changes": found}, indent=1))
    else:
        out("\n".join(found) or compare.UNCHANGED)
