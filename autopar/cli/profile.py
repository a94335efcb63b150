"""``autopar profile``: measures this machine and writes a hardware file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from autopar.cli.files import write_text
from autopar.plan import check_writable


def profile(
    output: Annotated[Path | None, typer.Option("--output", "-o", help="the hardware file to write (TOML)")] = None,
    ranks: Annotated[int, typer.Option(help="local ranks between which the link is measured; 1 leaves it out")] = 2,
    seconds: Annotated[float, typer.Option(help="about how long each figure is measured")] = 0.5,
) -> None:
    if output is not None:
        check_writable(output)
    from autopar.measurement import measure, to_toml

    print(f"measuring for about {8 * seconds:.0f} s", file=sys.stderr)
    text = to_toml(measure(ranks, seconds))
    if output is not None:
        write_text(output, text)
    print(text, end="")
