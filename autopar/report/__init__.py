"""Plans for people: terminal tables, a self-contained HTML page, a chrome trace of the simulated timeline.

terminal           a plan as text
tables             the tables of text and page
phases             the phases of the search, and what each gained
page               the HTML page
markup             what pages are made of: document, sections, tables, tiles, bars
mesh_picture       the mesh on the page: nodes, and the part that each rank holds
layer_details      what the page tells of one layer
utilisation        MFU
planning_command   the command that plans the same again
pipeline           a pipeline's plan as text
pipeline_page      a pipeline's plan as an HTML page
pipeline_timetable its timetable as a picture and a trace
picture            the step and the layers as one SVG, for documents
colours            what colour is what in drawings
timeline           the simulated step, a row a stream
trace              the same for chrome://tracing and Perfetto
parallelism_words  names for the parallelism of each layer: column parallel, FSDP
memory_timeline    memory of a rank over the step
frontier           a ladder of memory limits
plot               axes, curves and points as SVG
curve              a sweep over devices, limits and settings
units              seconds, bytes and counts as people read them

Each is imported on first use: tables need no simulation.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from autopar.errors import AutoparError, FileError
from autopar.plan import Plan

if TYPE_CHECKING:
    from autopar.pareto import Ladder
    from autopar.pipeline_plan import PipelinePlan

__all__ = [
    "chrome_trace", "fragment", "html", "ladder_html", "ladder_summary", "ladder_svg", "pipeline_html", "pipeline_summary", "pipeline_svg",
    "pipeline_trace", "summary", "svg",
]  # fmt: skip


def summary(plan: Plan, columns: int | None = None) -> str:
    """The plan's overview, baselines, tensors and collectives as plain text."""
    from autopar.report import terminal

    return terminal.summary(plan, columns)


def html(plan: Plan) -> str:
    """The plan as one self-contained page. Raises FileError: a schedule that cannot be simulated."""
    from autopar.report import page

    with _followed():
        return page.html(plan)


def fragment(plan: Plan) -> str:
    """The plan in a notebook: a part of a page, styled within itself."""
    from autopar.report import page

    return page.fragment(plan)


def svg(plan: Plan) -> str:
    """The plan as one still picture. Raises FileError: a schedule that cannot be simulated."""
    from autopar.report import picture

    with _followed():
        return picture.svg(plan)


def chrome_trace(plan: Plan) -> str:
    """The simulated step for chrome://tracing and Perfetto, as JSON. Raises FileError: a schedule that cannot be simulated."""
    from autopar.report import trace

    with _followed():
        return trace.chrome_trace(plan)


def pipeline_summary(plan: PipelinePlan, columns: int | None = None) -> str:
    """A pipeline's plan as plain text: the step and its bound, then a row a stage."""
    from autopar.report import pipeline

    return pipeline.pipeline_summary(plan, columns)


def pipeline_html(plan: PipelinePlan) -> str:
    """A pipeline's plan as one page. Raises FileError: a schedule or an order that cannot be followed."""
    from autopar.report import pipeline_page

    with _followed():
        return pipeline_page.pipeline_html(plan)


def pipeline_svg(plan: PipelinePlan) -> str:
    """A pipeline's timetable as a picture. Raises MismatchError: orders in which a stage waits for ever."""
    from autopar.report import pipeline_timetable

    return pipeline_timetable.pipeline_svg(plan)


def pipeline_trace(plan: PipelinePlan) -> str:
    """A pipeline's timetable for chrome://tracing and Perfetto, as JSON. Raises MismatchError: orders in which a stage waits for ever."""
    from autopar.report import pipeline_timetable

    return pipeline_timetable.pipeline_trace(plan)


def ladder_summary(ladder: Ladder, columns: int | None = None) -> str:
    """A ladder of memory limits as plain text, a row a limit."""
    from autopar.report import frontier

    return frontier.frontier(ladder, columns)


def ladder_html(ladder: Ladder) -> str:
    """A ladder of memory limits as one page."""
    from autopar.report import frontier

    return frontier.frontier_html(ladder)


def ladder_svg(ladder: Ladder) -> str:
    """A ladder of memory limits as a drawing of the step over the memory."""
    from autopar.report import frontier

    return frontier.frontier_svg(ladder)


@contextmanager
def _followed() -> Iterator[None]:
    """Turns failures to follow the schedule into FileError: an edited file names what is not there, or ends too early."""
    try:
        yield
    except (LookupError, StopIteration, ArithmeticError, ValueError) as error:
        if isinstance(error, AutoparError):
            raise
        hint = "autopar check lists all that is wrong with the plan; undo the edit, or plan again"
        raise FileError(f"the plan's schedule cannot be followed: {type(error).__name__}: {error}", hint) from error
