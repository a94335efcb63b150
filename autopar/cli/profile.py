"""``autopar profile``: measures this machine and writes a hardware file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autopar.cli.files import check_writable, write_result
from autopar.cli.terminal import note, out
from autopar.cost_models import Hardware
from autopar.files import STANDARD
from autopar.report import units
from autopar.report.tables import Table

if TYPE_CHECKING:
    from autopar.measurement import Measured


def profile(
    output: Annotated[Path | None, typer.Option("--output", "-o", help="the hardware file to write (TOML)")] = None,
    ranks: Annotated[
        int | None,
        typer.Option(min=1, help="local ranks to start, as many as will train: one a GPU, or one a core up to four, if not given"),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="a few models' operators, for a rough file in seconds")] = False,
) -> None:
    if output is not None:
        check_writable(output)
    from autopar.measurement import QUICK, measure

    try:
        measured = measure(ranks, QUICK if quick else None)
    except KeyboardInterrupt:
        note("profile: interrupted while measuring; no file was written")
        raise
    if measured is not None:  # under torchrun, rank 0 writes
        _write(measured, output)


def _write(measured: Measured, output: Path | None) -> None:
    from autopar.measurement import to_toml

    text = to_toml(measured)
    if output is not None:
        write_result(output, text)
    note("\n".join(residuals(measured.hardware).lines()))
    if output != STANDARD:
        out(text, end="")


def residuals(hardware: Hardware) -> Table:
    """How far the fits lie from what was measured."""
    rows = tuple(
        (name, str(item.points), *("-" if it is None else units.percent(it) for it in (item.median, item.percentile_90, item.largest)))
        for name, item in hardware.residuals
    )
    figures = ("points", "median error", "90th percentile", "largest")
    return Table(("fit", *figures), rows, frozenset(figures))
