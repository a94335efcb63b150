"""``autopar show``: what a person asks of a plan first. Imports no torch, so that it answers at once."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Annotated

import typer

from autopar import report
from autopar.cli.files import check_apart, check_writable, read_pipeline, read_plan, write_text
from autopar.cli.terminal import columns, out
from autopar.errors import UsageError
from autopar.files import STANDARD
from autopar.pipeline_plan import PipelinePlan
from autopar.plan import Plan


def show(
    plan: Annotated[Path, typer.Argument(help="a file written by autopar plan -o")],
    html: Annotated[Path | None, typer.Option(help="write a self-contained page")] = None,
    svg: Annotated[Path | None, typer.Option(help="write the step and the layers as one picture")] = None,
    trace: Annotated[Path | None, typer.Option(help="write the simulated timeline as a chrome trace")] = None,
    search: Annotated[bool, typer.Option("--search", help="print the phases of the search, and what each gained")] = False,
    json: Annotated[bool, typer.Option("--json", help="print the plan's JSON instead of its table")] = False,
) -> None:
    pipeline = read_pipeline(plan)
    if pipeline is not None:
        _show_pipeline(pipeline, plan, svg, trace, refused=html is not None or search, json=json)
        return
    files = {html: report.html, svg: report.svg, trace: report.chrome_trace}
    for one, other in combinations((html, svg, trace), 2):
        check_apart(one, other)
    wanted = {path: render for path, render in files.items() if path is not None}
    for path in wanted:
        check_writable(path, plan)
    read = read_plan(plan, in_part=not wanted and (search or not json))
    for path, render in wanted.items():
        write_text(path, render(read))
    if STANDARD not in wanted:
        if search:
            _print_search(read, json)
        else:
            out(read.to_json() if json else report.summary(read, columns()), end="" if json else "\n")


def _show_pipeline(pipeline: PipelinePlan, plan: Path, svg: Path | None, trace: Path | None, *, refused: bool, json: bool) -> None:
    from autopar.report.pipeline import pipeline_summary
    from autopar.report.pipeline_timetable import pipeline_svg, pipeline_trace

    if refused:
        raise UsageError(f"{plan} is a pipeline's plan, which has no page and no phases so far", "take --svg or --trace, or the table")
    check_apart(svg, trace)
    wanted = {path: render for path, render in ((svg, pipeline_svg), (trace, pipeline_trace)) if path is not None}
    for path in wanted:
        check_writable(path, plan)
    for path, render in wanted.items():
        write_text(path, render(pipeline))
    if STANDARD not in wanted:
        out(pipeline.to_json() if json else pipeline_summary(pipeline, columns()), end="" if json else "\n")


def _print_search(plan: Plan, json: bool) -> None:
    from autopar.report.phases import search_summary

    words = search_summary(plan, columns())
    out(plan.search.model_dump_json(indent=1) if json and plan.search is not None else words)
