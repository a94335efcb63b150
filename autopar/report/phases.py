"""The record of a search as text: what each phase cost, and what it gained in step and bound."""

from __future__ import annotations

from collections.abc import Iterator

from autopar.errors import FileError
from autopar.pipeline_plan import PipelinePlan
from autopar.plan import Plan
from autopar.report import units
from autopar.report.tables import CUT, Table
from autopar.rows import SearchPhase, SearchRecord


def search_summary(plan: Plan, columns: int | None = None) -> str:
    """Which phase found the plan, which proved its bound, and the table of all phases.

    Raises:
        FileError: the plan has no record of its search.
    """
    return "\n".join(_summary(recorded_search(plan), columns))


def pipeline_search_summary(plan: PipelinePlan, columns: int | None = None) -> str:
    """The same of each stage's search, whose step is of one microbatch. Stages that share a search stand together.

    Raises:
        FileError: a stage has no record of its search.
    """
    stages = dict[SearchRecord, list[str]]()
    for number, search in enumerate(pipeline_searches(plan)):
        stages.setdefault(search, []).append(str(number))
    parts = [
        (f"{'stage' if len(numbers) == 1 else 'stages'} {', '.join(numbers)}, one microbatch", *_summary(search, columns))
        for search, numbers in stages.items()
    ]
    return "\n\n".join("\n".join(lines) for lines in parts)


def pipeline_searches(plan: PipelinePlan) -> list[SearchRecord]:
    """The record of each stage's search. Raises FileError: a stage has none."""
    return [recorded_search(stage.plan, f"stage {number}") for number, stage in enumerate(plan.stages)]


def recorded_search(plan: Plan, what: str = "the plan") -> SearchRecord:
    """The record of a plan's search. Raises FileError: it has none."""
    if plan.search is None:
        raise FileError(f"{what} has no record of its search", "plan the model again with this version of autopar")
    return plan.search


def _summary(search: SearchRecord, columns: int | None) -> Iterator[str]:
    yield from (*_facts(search), "", *phases(search).lines(columns))


def phases(search: SearchRecord) -> Table:
    """A row a phase, in the order they ran."""
    rows = [
        (
            phase.name,
            f"{phase.work_seconds:.3g}",
            f"{phase.cpu_seconds:.3g}",
            _change(phase.step_seconds_before, phase.step_seconds_after),
            _change(phase.bound_seconds_before, phase.bound_seconds_after),
            ", ".join(_gains(phase)) or "-",
        )
        for phase in search.phases
    ]
    return Table(("phase", "work s", "CPU s", "step", "bound", "gained"), tuple(rows), frozenset({"work s", "CPU s"}))


def _facts(search: SearchRecord) -> Iterator[str]:
    work = sum(phase.work_seconds for phase in search.phases)
    seconds = sum(phase.cpu_seconds for phase in search.phases)
    yield f"effort {search.effort}: {work:.3g} s of counted work, done in {seconds:.3g} CPU s"
    yield f"plan found by {search.found_by or 'an earlier search'}"
    yield f"bound proved by {search.proved_by or 'the cheapest choices, before any phase'}"
    if search.cut:
        yield f"search: {CUT}"


def _change(before: float | None, after: float | None) -> str:
    """``- -> 410 ms`` where there was none before; the figure alone where it stayed."""
    old, new = ("-" if value is None else units.seconds(value) for value in (before, after))
    return new if before == after else f"{old} -> {new}"


def _gains(phase: SearchPhase) -> Iterator[str]:
    """The relative change of step and bound, where the phase made one."""
    for what, before, after in (
        ("step", phase.step_seconds_before, phase.step_seconds_after),
        ("bound", phase.bound_seconds_before, phase.bound_seconds_after),
    ):
        if after is None or before == after:
            continue
        if not before:
            yield f"first {'plan' if what == 'step' else 'bound'}"
        else:
            yield f"{what} {100 * (after - before) / before:+.3g} %"
