"""``autopar explain``: why one thing in a plan is as it is."""

from __future__ import annotations

import json as json_format
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autopar import compare
from autopar.cli.files import read_pipeline, read_plan
from autopar.cli.terminal import Line, out
from autopar.errors import UsageError
from autopar.report import units

if TYPE_CHECKING:
    from autopar.plan import Plan


def explain(
    plan: Annotated[Path, typer.Argument(help="a file written by autopar plan -o")],
    name: Annotated[
        str, typer.Argument(help="a parameter, buffer, input, output, operator, tensor, reshard or collective; of a pipeline also: cut")
    ],
    others: Annotated[int, typer.Option("--next", min=0, help="number of next best choices to solve for, with what each adds")] = 0,
    time_limit: Annotated[float, typer.Option(help="seconds for --next")] = 60.0,
    json: Annotated[bool, typer.Option("--json", help="print JSON instead of lines")] = False,
) -> None:
    pipeline = read_pipeline(plan)
    if pipeline is not None:
        from autopar.pipeline.explanation import explain_pipeline  # for start-up time: imports the solvers

        if others:
            raise UsageError("--next solves a plan without stages", "drop --next")
        lines = explain_pipeline(pipeline, name)
    else:
        read = read_plan(plan)
        lines = compare.explain(read, name)
        lines += tuple(_next(read, name, others, time_limit)) if others else ()
    out(json_format.dumps({"plan": str(plan), "name": name, "lines": lines}, indent=1) if json else "\n".join(lines))


def _next(plan: Plan, name: str, count: int, seconds: float) -> Iterator[str]:
    """Lines on the next best choices of a parameter, buffer, input or operator, each solved anew. Raises UsageError: for other names."""
    from autopar.recording import graph_of, machine_of, replay
    from autopar.recording.replaying import assignment_of
    from autopar.search.choices.pins import resolve_pins
    from autopar.search.fixing.alternatives import find_alternatives

    if not 0 < seconds < math.inf:
        raise UsageError(f"the time limit is {seconds:g} s", "give a positive number of seconds")
    graph = graph_of(plan)
    named = {key: item.tensor for item in graph.inputs for one in (item.name, *item.aliases) for key in (one, f"{item.kind}:{one}")}
    found = named.get(name, name)
    with Line() as line:
        line.say(f"solving again for other choices of {name}, at most {seconds:.0f} s", now=True)
        rows = find_alternatives(
            replay(plan, graph), assignment_of(plan, graph), found, optimizer=plan.model.optimizer, limit=plan.memory_limit_bytes_per_rank,
            pins=resolve_pins(graph, machine_of(plan).mesh, plan.pins), seconds=seconds,
        )  # fmt: skip
    if not rows:
        yield "nothing else was found in time that fits"
        return
    yield f"next best, all else solved again once ({units.seconds(plan.objective.seconds)} as it is):"
    for row in rows[:count]:
        more = row.seconds - plan.objective.seconds
        share = f", {100 * more / plan.objective.seconds:+.2g} %" if plan.objective.seconds else ""
        sign = "-" if more < 0 else "+"
        added = f"{sign}{units.seconds(abs(more))}{share}"
        yield f"  {row.words}: {units.seconds(row.seconds)} ({added}), {units.size(row.peak)} per rank at the peak"
