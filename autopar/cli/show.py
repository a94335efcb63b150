"""``autopar show``: what a person asks of a plan first. Imports no torch, so that it answers at once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autopar.cli.files import read_plan, write_text


def show(
    plan: Annotated[Path, typer.Argument(help="a file written by autopar plan -o")],
    html: Annotated[Path | None, typer.Option(help="write a self-contained page")] = None,
    trace: Annotated[Path | None, typer.Option(help="write the simulated timeline as a chrome trace")] = None,
) -> None:
    read = read_plan(plan)
    if html is not None:
        from autopar.report import html as render

        write_text(html, render(read))
    if trace is not None:
        from autopar.report import chrome_trace

        write_text(trace, chrome_trace(read))
    print(read)
