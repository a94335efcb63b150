"""A pipeline's plan as one self-contained HTML page: the timetable, the stages, and each stage's own plan to open."""

from __future__ import annotations

from html import escape

from autopar.pipeline_plan import PipelinePlan, StagePlan
from autopar.report import units
from autopar.report.markup import document, now, section, table_html, tiles
from autopar.report.page import SCRIPTS, body
from autopar.report.pipeline import baselines, overview, stages
from autopar.report.pipeline_timetable import pipeline_svg
from autopar.report.planning_command import planning_command, unsaid
from autopar.report.tables import Table
from autopar.report.utilisation import pipeline_utilisation, utilisation_tile


def pipeline_html(plan: PipelinePlan) -> str:
    """The whole page as text, dated today.

    Raises:
        MismatchError: orders in which a stage waits for ever. FileError: a stage's schedule that cannot be simulated.
    """
    title = f"autopar plan: {plan.model.target}"
    picture = f"<div class='wide picture' tabindex=0 role=region aria-label=timetable>{pipeline_svg(plan)}</div>"
    opened = "".join(_stage(number, stage) for number, stage in enumerate(plan.stages))
    sections = [
        ("Timetable", picture), ("Stages", table_html(stages(plan), name="stages") + opened),
        *(("Pipelines by hand", table_html(table, name="baselines")) for table in baselines(plan)),
        ("Particulars", table_html(_particulars(plan), header=False, name="particulars")),
    ]  # fmt: skip
    shown = "\n".join(section(name, text) for name, text in sections)
    return document(title, f"<h1>{escape(title)}</h1>{_tiles(plan)}{shown}", SCRIPTS)


def _tiles(plan: PipelinePlan) -> str:
    objective, peak, limit = plan.objective, plan.peak_memory_bytes_per_rank, plan.memory_limit_bytes_per_rank
    used = units.percent(peak / limit) if limit else "all"
    busiest = max(sum(stage.busy_seconds for stage in plan.stages[number :: plan.positions]) for number in range(plan.positions))
    idle = 1 - busiest / objective.seconds if objective.seconds else 0.0
    gap = objective.status if objective.gap == 0 else f"gap {units.percent(objective.gap)}"
    return tiles((
        (units.seconds(objective.seconds), "a step"),
        (gap, f"no pipeline on this mesh takes less than {units.seconds(objective.bound_seconds)}"),
        (units.size(peak), f"per rank in the fullest stage, {used} of the limit of {units.size(limit)}"),
        (units.percent(idle), f"of the step in which even the busiest {'rank' if plan.chunks > 1 else 'stage'} is idle"),
        *utilisation_tile(pipeline_utilisation(plan)),
        (f"{len(plan.stages)} stages", f"{plan.microbatches} microbatches"),
        (" x ".join(f"{name}={size}" for name, size in plan.mesh.items()), f"mesh on {plan.hardware.get('name')}"),
    ))  # fmt: skip


def _stage(number: int, stage: StagePlan) -> str:
    """The stage's own plan, closed until the reader opens it."""
    begins = stage.first_module or "the beginning"
    title = f"Stage {number}, from {begins}: {units.seconds(stage.busy_seconds)} busy, {units.size(stage.peak_memory_bytes_per_rank)}"
    return f"<details class=stage><summary>{escape(title)}</summary>{body(stage.plan)}</details>"


def _particulars(plan: PipelinePlan) -> Table:
    made = plan.created_by
    table = overview(plan)
    rows = [*table.rows, ("made by", f"autopar {made.autopar}, torch {made.torch}, prices of {made.cost_model}")]
    command = planning_command(plan)
    if command:
        cut = ",".join(plan.cut)
        order = f" --order {plan.order_asked}" if plan.order != "auto" else ""
        rows += [("planned again by", f"{command}{f' --stages {cut}' if cut else ''}{order}"), ("", unsaid(plan))]
    return Table(table.header, (*rows, ("page of", now())), table.right)
