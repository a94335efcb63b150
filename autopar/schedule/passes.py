"""The passes in order: an assignment becomes the list that every rank runs."""

from __future__ import annotations

from collections.abc import Callable

from autopar.graph import Graph
from autopar.schedule.assignment import Assignment
from autopar.schedule.bucketing import bucket
from autopar.schedule.filling import fill
from autopar.schedule.freeing import free
from autopar.schedule.instructions import Limits, Schedule
from autopar.schedule.legality import check_legal
from autopar.schedule.ordering import order
from autopar.schedule.prefetching import prefetch
from autopar.schedule.sharing import share
from cost_models import Machine

PASSES: tuple[tuple[str, Callable[[Schedule], Schedule]], ...] = (
    ("fill", fill), ("bucket", bucket), ("prefetch", prefetch), ("free", free),
)
"""What is done to the list after ``share`` and ``order`` have made it, by name."""


def make_schedule(
    graph: Graph, assignment: Assignment, machine: Machine, limits: Limits | None = None, *, checked: bool = True
) -> Schedule:  # fmt: skip
    """The schedule of an assignment.

    Args:
        limits: what the passes keep to.
        checked: after each pass, its legality is checked; a search that tries many leaves it out and checks the one it keeps.

    Raises:
        ScheduleError: a pass that made something illegal, by its name. AssertionError: an assignment that is not consistent.
    """
    schedule = order(graph, share(assignment), machine, limits or default_limits(machine))
    if checked:
        check_legal(schedule, "order")
    for name, run in PASSES:
        schedule = run(schedule)
        if checked:
            check_legal(schedule, name)
    return schedule


def default_limits(machine: Machine) -> Limits:
    """What is kept to when nothing else is said. Under the communication model nothing overlaps and nothing is joined."""
    return Limits(0, 0) if machine.cost_model == "communication" else Limits()
