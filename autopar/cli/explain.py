"""``autopar explain``: why one thing in a plan is as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autopar import compare
from autopar.cli.files import read_plan


def explain(
    plan: Annotated[Path, typer.Argument(help="a file written by autopar plan -o")],
    name: Annotated[str, typer.Argument(help="a parameter, buffer, input, output, operator, tensor, reshard or collective")],
) -> None:
    print("\n".join(compare.explain(read_plan(plan), name)))
