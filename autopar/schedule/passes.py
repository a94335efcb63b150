"""The passes in order: an assignment becomes the list that every rank runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from autopar.cost_models import Machine
from autopar.graph import Graph
from autopar.schedule.accumulating import accumulate
from autopar.schedule.assignment import Assignment
from autopar.schedule.bucketing import bucket
from autopar.schedule.early_reduction import reduce_early
from autopar.schedule.freeing import free
from autopar.schedule.gap_filling import fill_gaps
from autopar.schedule.in_place import assign_in_place
from autopar.schedule.instructions import Limits
from autopar.schedule.legality import check_legal
from autopar.schedule.ordering import Prices, order
from autopar.schedule.prefetching import prefetch
from autopar.schedule.schedule import Schedule
from autopar.schedule.sharing import share

Passes = tuple[tuple[str, Callable[[Schedule], Schedule]], ...]

PLACING: Passes = (("fill_gaps", fill_gaps), ("bucket", bucket), ("prefetch", prefetch), ("accumulate", accumulate))
"""The passes that place every instruction of the list of ``order``, by name; it can be simulated then."""
ENDING: Passes = (("assign_in_place", assign_in_place), ("free", free))
"""The passes that say where memory comes from and when it goes."""
PASSES: Passes = (*PLACING, *ENDING)
"""All passes, in order."""
KEEPS_TO: Mapping[str, tuple[str, ...]] = {
    "fill_gaps": ("aside_bytes",),
    "bucket": ("bucket_bytes",),
    "prefetch": ("ahead_bytes", "held_bytes", "summed_bytes"),
    "accumulate": ("summed_bytes",),
}
"""The limits that each pass of ``PLACING`` reads."""


def ordered(graph: Graph, assignment: Assignment, machine: Machine, prices: Prices | None = None) -> Schedule:
    """The list that the passes begin with: equal reshards shared, gradients reduced in two reshards where they are summed, all in program
    order.

    Args:
        prices: see ``order``.

    Raises:
        AssertionError: an assignment that is not consistent.
    """
    prices = prices or Prices(graph, machine)
    return order(graph, reduce_early(graph, share(assignment), prices), machine, default_limits(machine), prices)


def run_passes(schedule: Schedule, passes: Passes = PASSES, *, checked: bool = False) -> Schedule:
    """The passes after ``order``, by the schedule's limits.

    Args:
        checked: legality is checked after each pass. A search that tries many lists checks only the one it keeps.

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
    """The results of ``PLACING`` under several limits. A pass runs anew only where its list, or a limit that it reads, has changed.

    Args:
        first: see ``ordered``.
    """

    def __init__(self, first: Schedule) -> None:
        self.first = first
        self.known: dict[tuple[object, ...], Schedule] = {}

    def under(self, limits: Limits) -> Schedule:
        """The list after ``PLACING`` under some limits."""
        schedule = self.first
        for name, run in PLACING:
            key = (id(schedule), name, *(getattr(limits, limit) for limit in KEEPS_TO[name]))
            if key not in self.known:
                self.known[key] = self._one(run(schedule.under(limits)))
            schedule = self.known[key]
        return schedule.under(limits)

    def _one(self, made: Schedule) -> Schedule:
        """An earlier list where that is equal, with all that is known of it."""
        return next((other for other in self.known.values() if other.instructions == made.instructions), made)


def make_schedule(graph: Graph, assignment: Assignment, machine: Machine, limits: Limits | None = None) -> Schedule:
    """The schedule of an assignment, its legality checked after each pass.

    Args:
        limits: of the passes; ``default_limits`` when not given.

    Raises:
        ScheduleError: a pass that made something illegal, by its name. AssertionError: an assignment that is not consistent.
    """
    return run_passes(replace(ordered(graph, assignment, machine), limits=limits or default_limits(machine)), checked=True)


def default_limits(machine: Machine) -> Limits:
    """The limits where none are given. Under the communication model nothing overlaps and no calls are joined."""
    return Limits() if machine.overlaps else Limits(0, 0, 0)
