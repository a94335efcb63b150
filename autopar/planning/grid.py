"""Plans over a grid: settings of a model, numbers of devices, memory limits.

A model is captured once for each combination of settings. A mesh's choices, prices and plans under one memory limit serve the next, so more
memory never costs more.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeVar

from autopar.errors import AutoparError, CaptureError, InfeasibleError, TimeLimitError, UsageError
from autopar.graph import Graph
from autopar.options import AUTO, PlanOptions, check_number
from autopar.planning.capturing import captures_of
from autopar.planning.session import PlanWithin, open_session
from autopar.sweeping import Point, Settings, Sweep
from autopar.target import Target

if TYPE_CHECKING:
    from autopar.importer import Captures

Result = TypeVar("Result")
Model = TypeVar("Model")

Place = tuple[int, int, int]
"""A point of a grid: the numbers of its settings, its devices and its memory limit."""


@dataclass(frozen=True)
class Grid:
    """The points of a sweep: every combination of these values.

    Args:
        memory_limits: bytes per rank.
    """

    settings: tuple[Settings, ...]
    devices: tuple[int, ...]
    memory_limits: tuple[int, ...]

    def __post_init__(self) -> None:
        """Raises UsageError: there are no points."""
        axes = (("numbers of devices", self.devices), ("memory limits", self.memory_limits), ("combinations of settings", self.settings))
        for what, values in axes:
            if not values:
                raise UsageError(f"there are no {what} to plan for", "give at least one")

    @property
    def places(self) -> list[Place]:
        """Every point in order: settings, then devices, then memory limits."""
        return list(itertools.product(range(len(self.settings)), range(len(self.devices)), range(len(self.memory_limits))))


@dataclass(frozen=True)
class SweptModel:
    """The model of a sweep: a function of its settings, or a captured Graph.

    Args:
        options: of every plan; the number of devices is the grid's.
    """

    target: Graph | Callable[..., Any]
    options: PlanOptions

    def capture(self, settings: Settings) -> tuple[Target, Captures | None]:
        """The model of these settings, and its graphs, the first of which is captured here."""
        if isinstance(self.target, Graph):
            return Target(self.target, ()), None
        target, options = Target.made(self.target, settings), self.options
        captures = captures_of(target, mode=options.mode, compute_dtype=options.compute_dtype, pins=options.pins)
        captures.of(1 if options.microbatches == AUTO else check_number(options.microbatches))
        return target, captures

    def open(self, captured: tuple[Target, Captures | None], devices: int) -> PlanWithin:
        """The session that plans the model for that number of devices."""
        target, captures = captured
        return open_session(target, replace(self.options, devices=devices), captures).plan


def plan_sweep(target: Graph | Callable[..., Any], options: PlanOptions, grid: Grid, done: Callable[[Point], None]) -> Sweep:
    """The plans of a whole grid within the time limit. See ``plan_grid``."""
    for devices in grid.devices:
        replace(options, devices=devices)  # refuses a wrong number before the first plan
    swept = SweptModel(target, options)
    points = plan_grid(grid, swept.capture, swept.open, options.deadline, done)
    own_name = "graph" if isinstance(target, Graph) else str(getattr(target, "__name__", type(target).__name__))
    return Sweep(options.name or own_name, options.mode, points)


def combinations(settings: Mapping[str, Sequence[Any]]) -> tuple[dict[str, Any], ...]:
    """Every choice of one value for each key, the last key's changing first.

    Raises:
        UsageError: no list of values.

    >>> combinations({"batch": [8, 16], "seq": [128]})
    ({'batch': 8, 'seq': 128}, {'batch': 16, 'seq': 128})
    """
    for key, values in settings.items():
        if isinstance(values, str) or not isinstance(values, Iterable):
            raise UsageError(f"the setting {key} has {values!r} in place of its values", f"give a list: {{{key!r}: [{values!r}]}}")
    return tuple(dict(zip(settings, values, strict=True)) for values in itertools.product(*settings.values()))


def plan_grid(
    grid: Grid,
    capture: Callable[[Settings], Model],
    open_session: Callable[[Model, int], PlanWithin],
    deadline: float,
    done: Callable[[Point], None],
) -> tuple[Point, ...]:
    """Every point, the time until the deadline shared among those that are left. Ctrl-C ends it with the points so far.

    Args:
        capture: the model of these settings.
        open_session: opens a model's session for a number of devices.
        done: called with each point.

    Raises:
        UsageError, KeyboardInterrupt: before there was a plan. Another error, and a UsageError later, is the point's ``error``.
    """
    found: dict[Place, Point] = {}
    try:
        for place, point, interrupted in _visit(grid, capture, open_session, deadline, found):
            found[place] = point
            done(point)
            if interrupted:
                break
    except KeyboardInterrupt:
        if not _has_plan(found):
            raise
    return tuple(found[place] for place in grid.places if place in found)


def _visit(
    grid: Grid,
    capture: Callable[[Settings], Model],
    open_session: Callable[[Model, int], PlanWithin],
    deadline: float,
    found: Mapping[Place, Point],
) -> Iterator[tuple[Place, Point, bool]]:
    """Every point, and whether Ctrl-C ended its search; of one session the least memory first, whose plans serve the others."""
    for first, settings in enumerate(grid.settings):
        model = _attempt(found, capture, settings)
        for second, devices in enumerate(grid.devices):
            plan_within = model if isinstance(model, AutoparError) else _attempt(found, open_session, model, devices)
            for third, memory_limit in sorted(enumerate(grid.memory_limits), key=lambda item: item[1]):
                now = perf_counter()
                ends = now + max(deadline - now, 0.0) / (len(grid.places) - len(found))
                planned = plan_within if isinstance(plan_within, AutoparError) else _attempt(found, plan_within, memory_limit, ends)
                place = first, second, third
                if isinstance(planned, AutoparError):
                    yield place, Point(settings, devices, memory_limit, None, planned), False
                else:
                    yield place, Point(settings, devices, memory_limit, planned.plan), planned.interrupted


def _attempt(found: Mapping[Place, Point], make: Callable[..., Result], *arguments: Any) -> Result | AutoparError:
    """The result, or why there is none."""
    try:
        return make(*arguments)
    except (InfeasibleError, TimeLimitError, CaptureError) as error:
        return error
    except UsageError as error:
        if not _has_plan(found):
            raise
        return error


def _has_plan(found: Mapping[Place, Point]) -> bool:
    return any(point.plan is not None for point in found.values())
