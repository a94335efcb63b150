"""``autopar show``: what a person asks of a plan first. Imports no torch, so that it answers at once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autopar.cli.files import check_apart, check_writable, read_plan, write_text
from autopar.cli.terminal import columns, out
from autopar.files import STANDARD
from autopar.plan import Plan
from autopar.report import summary


def show(
    plan: Annotated[Path, typer.Argument(help="a file written by autopar plan -o")],
    html: Annotated[Path | None, typer.Option(help="write a self-contained page")] = None,
    trace: Annotated[Path | None, typer.Option(help="write the simulated timeline as a chrome trace")] = None,
    search: Annotated[bool, typer.Option("--search", help="print the phases of the search, and what each gained")] = False,
    json: Annotated[bool, typer.Option("--json", help="print the plan's JSON instead of its table")] = False,
) -> None:
    check_apart(html, trace)
    for path in (html, trace):
        if path is not None:
            check_writable(path, plan)
    read = read_plan(plan, in_part=html is None and trace is None and (search or not json))
    if html is not None:
        from autopar.report import html as render

        write_text(html, render(read))
    if trace is not None:
        from autopar.report import chrome_trace

        write_text(trace, chrome_trace(read))
    if STANDARD not in (html, trace):
        if search:
            _print_search(read, json)
        else:
            out(read.to_json() if json else summary(read, columns()), end="" if json else "\n")


def _print_search(plan: Plan, json: bool) -> None:
    from autopar.report.phases import search_summary

    words = search_summary(plan, columns())
    out(plan.search.model_dump_json(indent=1) if json and plan.search is not None else words)
