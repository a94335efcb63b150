"""``autopar diff``: what changed between two plans."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autopar import compare
from autopar.cli.files import read_plan


def diff(
    first: Annotated[Path, typer.Argument(help="a plan file")],
    second: Annotated[Path, typer.Argument(help="another plan file")],
) -> None:
    print("\n".join(compare.diff(read_plan(first), read_plan(second))) or compare.UNCHANGED)
