"""``autopar show``: what a person asks of a plan first. Imports no torch, so that it answers at once."""

from __future__ import annotations

import json as json_format
from collections.abc import Callable, Mapping
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any

import typer

from autopar import report
from autopar.cli.files import check_apart, check_writable, read_ladder, read_pipeline, read_plan, write_text
from autopar.cli.terminal import columns, out
from autopar.errors import UsageError
from autopar.files import STANDARD
from autopar.pipeline_plan import PipelinePlan
from autopar.plan import Plan

Renders = Mapping[str, Callable[[Any], str]]
"""What draws a file's content, by the option that asks for it."""
OF_PLANS: Renders = {"--html": report.html, "--svg": report.svg, "--trace": report.chrome_trace}
OF_PIPELINES: Renders = {"--html": report.pipeline_html, "--svg": report.pipeline_svg, "--trace": report.pipeline_trace}
OF_LADDERS: Renders = {"--html": report.ladder_html, "--svg": report.ladder_svg}


def show(
    plan: Annotated[Path, typer.Argument(help="a file written by autopar plan -o: a plan, a pipeline or a ladder")],
    html: Annotated[Path | None, typer.Option(help="write a self-contained page")] = None,
    svg: Annotated[Path | None, typer.Option(help="write the step and the layers as one picture")] = None,
    trace: Annotated[Path | None, typer.Option(help="write the simulated timeline as a chrome trace")] = None,
    search: Annotated[bool, typer.Option("--search", help="print the phases of each search, and what each gained")] = False,
    json: Annotated[bool, typer.Option("--json", help="print the plan's JSON instead of its table")] = False,
) -> None:
    wanted = {option: path for option, path in (("--html", html), ("--svg", svg), ("--trace", trace)) if path is not None}
    for one, other in combinations(wanted.values(), 2):
        check_apart(one, other)
    for path in wanted.values():
        check_writable(path, plan)
    asked = [*wanted, *(["--search"] if search else [])]
    pipeline = read_pipeline(plan)
    if pipeline is not None:
        _write(wanted, OF_PIPELINES, pipeline)
        if search and STANDARD not in wanted.values():
            _print_searches(pipeline, json)
            return
        words = pipeline.to_json if json else lambda: report.pipeline_summary(pipeline, columns())
    elif (ladder := read_ladder(plan)) is not None:
        _check_drawn(asked, OF_LADDERS, f"{plan} is a ladder of memory limits")
        _write(wanted, OF_LADDERS, ladder)
        words = ladder.to_json if json else lambda: report.ladder_summary(ladder, columns())
    else:
        read = read_plan(plan, in_part=not wanted and (search or not json))
        _write(wanted, OF_PLANS, read)
        if search and STANDARD not in wanted.values():
            _print_search(read, json)
            return
        words = read.to_json if json else lambda: report.summary(read, columns())
    if STANDARD not in wanted.values():
        out(words(), end="" if json else "\n")


def _check_drawn(asked: list[str], renders: Renders, what: str) -> None:
    """Raises UsageError: an option asks for what a file of this kind does not have."""
    for option in asked:
        if option not in renders:
            lacks = "phases of a search" if option == "--search" else "single step to trace"
            raise UsageError(f"{what}, which has no {lacks}", f"drop {option}, or take {' or '.join(renders)}")


def _write(wanted: Mapping[str, Path], renders: Renders, content: object) -> None:
    for option, path in wanted.items():
        write_text(path, renders[option](content))


def _print_search(plan: Plan, json: bool) -> None:
    from autopar.report.phases import search_summary

    words = search_summary(plan, columns())
    out(plan.search.model_dump_json(indent=1) if json and plan.search is not None else words)


def _print_searches(plan: PipelinePlan, json: bool) -> None:
    """Of the stages; as JSON a list, one record a stage."""
    from autopar.report.phases import pipeline_search_summary, pipeline_searches

    if json:
        out(json_format.dumps([search.model_dump(mode="json") for search in pipeline_searches(plan)], indent=1))
    else:
        out(pipeline_search_summary(plan, columns()))
