"""The passes in order: an assignment becomes the list that every rank runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from autopar.graph import Graph
from autopar.schedule.accumulating import accumulate
from autopar.schedule.assignment import Assignment
from autopar.schedule.bucketing import bucket
from autopar.schedule.freeing import free
from autopar.schedule.gap_filling import fill_gaps
from autopar.schedule.in_place import assign_in_place
from autopar.schedule.instructions import Limits
from autopar.schedule.legality import check_legal
from autopar.schedule.ordering import Prices, order
from autopar.schedule.prefetching import prefetch
from autopar.schedule.schedule import Schedule
from autopar.schedule.sharing import share
from cost_models import Machine

Passes = tuple[tuple[str, Callable[[Schedule], Schedule]], ...]

PLACING: Passes = (("fill_gaps", fill_gaps), ("bucket", bucket), ("prefetch", prefetch), ("accumulate", accumulate))
"""What gives everything its place in the list after ``share`` and ``order`` have made it, by name; enough to simulate it."""
ENDING: Passes = (("assign_in_place", assign_in_place), ("free", free))
"""What says where memory comes from and when it goes, of a list in which everything has its place."""
PASSES: Passes = (*PLACING, *ENDING)
"""All that is done under limits that are given."""
KEEPS_TO: Mapping[str, tuple[str, ...]] = {
    "fill_gaps": ("aside_bytes",),
    "bucket": ("bucket_bytes",),
    "prefetch": ("ahead_bytes", "held_bytes", "summed_bytes"),
    "accumulate": ("summed_bytes",),
}
"""The limits that each pass of ``PLACING`` reads."""


def ordered(graph: Graph, assignment: Assignment, machine: Machine, prices: Prices | None = None) -> Schedule:
    """What the passes begin with: equal reshards shared, everything in program order.

    Args:
        prices: see ``order``.

    Raises:
        AssertionError: an assignment that is not consistent.
    """
    return order(graph, share(assignment), machine, default_limits(machine), prices)


def run_passes(schedule: Schedule, passes: Passes = PASSES, *, checked: bool = False) -> Schedule:
    """The passes after ``order``, by the schedule's limits.

    Args:
        passes: those to run.
        checked: after each pass, its legality is checked; a search that tries many leaves it out and checks the one it keeps.

    Raises:
        ScheduleError: a pass that made something illegal, by its name.
    """
    if checked:
        check_legal(schedule, "order")
    for name, run in passes:
        schedule = run(schedule)
        if checked:
            check_legal(schedule, name)
    return schedule


class Placed:
    """What ``PLACING`` makes of one list under one limits after another: a pass runs anew only where a limit that it reads, or the list
    that it is given, is another.

    Args:
        first: see ``ordered``.
    """

    def __init__(self, first: Schedule) -> None:
        self.first = first
        self.known: dict[tuple[object, ...], Schedule] = {}

    def under(self, limits: Limits) -> Schedule:
        """The same as ``run_passes`` of the list with these limits and ``PLACING``."""
        schedule = self.first
        for name, run in PLACING:
            key = (id(schedule), name, *(getattr(limits, limit) for limit in KEEPS_TO[name]))
            if key not in self.known:
                self.known[key] = self._one(run(schedule.under(limits)))
            schedule = self.known[key]
        return schedule.under(limits)

    def _one(self, made: Schedule) -> Schedule:
        """An earlier list where that is equal: what is known of it, is of both."""
        return next((other for other in self.known.values() if other.instructions == made.instructions), made)


def make_schedule(graph: Graph, assignment: Assignment, machine: Machine, limits: Limits | None = None) -> Schedule:
    """The schedule of an assignment, its legality checked after each pass.

    Args:
        limits: what the passes keep to.

    Raises:
        ScheduleError: a pass that made something illegal, by its name. AssertionError: an assignment that is not consistent.
    """
    return run_passes(replace(ordered(graph, assignment, machine), limits=limits or default_limits(machine)), checked=True)


def default_limits(machine: Machine) -> Limits:
    """What is kept to when nothing else is said. Under the communication model nothing overlaps and nothing is joined."""
    return Limits() if machine.overlaps else Limits(0, 0, 0)
