"""Sweep: plans over a grid of settings of a model, numbers of devices and memory limits.

A graph is captured once for each combination of settings, and what a mesh's search has enumerated, priced and found under one limit serves
the next: more memory never costs more.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, TypeVar

from autopar.errors import AutoparError, CaptureError, InfeasibleError, TimeLimitError, UsageError
from autopar.pareto import Made, Within
from autopar.plan import Plan

Settings = Mapping[str, Any]
Tried = TypeVar("Tried")
Model = TypeVar("Model")


@dataclass(frozen=True)
class Point:
    """One plan of a sweep.

    Args:
        settings: what the model was made with.
        memory_bytes: the limit a rank.
        plan: None where there is none, for the reason that ``error`` gives.
    """

    settings: Settings
    devices: int
    memory_bytes: int
    plan: Plan | None
    error: AutoparError | None = None

    @property
    def fits(self) -> bool | None:
        """Whether a plan fits in the memory; None where that is not known."""
        return True if self.plan is not None else False if isinstance(self.error, InfeasibleError) else None

    def row(self) -> dict[str, object]:
        """As JSON."""
        found: dict[str, object] = {
            "settings": dict(self.settings), "devices": self.devices, "memory_limit_bytes_per_rank": self.memory_bytes,
            "feasible": self.plan is not None,
        }  # fmt: skip
        if self.plan is None:
            return {**found, "message": self.error.message if self.error else ""}
        return {
            **found, "mesh": self.plan.mesh, "objective_seconds": self.plan.objective.seconds, "gap": self.plan.objective.gap,
            "status": self.plan.objective.status, "step_seconds": self.plan.predicted.step_seconds,
            "peak_memory_bytes_per_rank": self.plan.predicted.peak_memory_bytes_per_rank,
            "received_bytes_per_rank": self.plan.predicted.received_bytes_per_rank, "microbatches": self.plan.microbatches,
        }  # fmt: skip


@dataclass(frozen=True)
class Sweep:
    """The points in the order they were asked for: settings, then devices, then limits. ``print`` gives a table."""

    target: str
    mode: str
    points: tuple[Point, ...]

    def to_json(self) -> str:
        rows = [point.row() for point in self.points]
        return json.dumps({"target": self.target, "mode": self.mode, "rows": rows}, indent=1) + "\n"

    def to_csv(self) -> str:
        from autopar.report.curve import csv_table

        return csv_table(self)

    def to_svg(self) -> str:
        """A drawing of step and memory against the devices or, where these are all the same, what else differs."""
        from autopar.report.curve import drawing

        return drawing(self)

    def __str__(self) -> str:
        from autopar.report.curve import table

        return "\n".join(table(self).lines())

    def _repr_svg_(self) -> str:
        return self.to_svg()


def combinations(settings: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Every choice of one value for each key, the last key's changing first.

    Raises:
        UsageError: no list of values.

    >>> combinations({"batch": [8, 16], "seq": [128]})
    [{'batch': 8, 'seq': 128}, {'batch': 16, 'seq': 128}]
    """
    for key, values in settings.items():
        if isinstance(values, str) or not isinstance(values, Iterable):
            raise UsageError(f"the setting {key} has {values!r} in place of its values", f"give a list: {{{key!r}: [{values!r}]}}")
    return [dict(zip(settings, values, strict=True)) for values in itertools.product(*settings.values())]


def walk(
    choices: Sequence[Settings], counts: Sequence[int], limits: Sequence[int], model_of: Callable[[Settings], Model],
    planner: Callable[[Model, int], Within], ends: float, done: Callable[[Point], None],
) -> tuple[Point, ...]:  # fmt: skip
    """Every point, the time until ``ends`` shared among those that are left. Ctrl-C ends it with what is there.

    Args:
        planner: for a model and a number of devices what plans within a limit.
        done: called with each point.

    Raises:
        UsageError, KeyboardInterrupt: before there was a plan. What else goes wrong, and a UsageError later, is the point's ``error``.
    """
    found: dict[tuple[int, int, int], Point] = {}
    wanted = list(itertools.product(range(len(choices)), range(len(counts)), range(len(limits))))

    def tried(make: Callable[..., Tried], *given: Any) -> Tried | AutoparError:
        """What is made, or why it cannot be."""
        try:
            return make(*given)
        except (InfeasibleError, TimeLimitError, CaptureError) as error:
            return error
        except UsageError as error:
            if not planned():
                raise
            return error

    def planned() -> bool:
        return any(point.plan for point in found.values())

    def visit() -> Iterator[Made | None]:
        for first, chosen in enumerate(choices):
            model = tried(model_of, chosen)
            for second, count in enumerate(counts):
                within = model if isinstance(model, AutoparError) else tried(planner, model, count)
                for third, limit in sorted(enumerate(limits), key=lambda item: item[1]):
                    now = perf_counter()
                    share = max(ends - now, 0.0) / (len(wanted) - len(found))
                    made = within if isinstance(within, AutoparError) else tried(within, limit, now + share)
                    plan, error = (None, made) if isinstance(made, AutoparError) else (made.plan, None)
                    found[first, second, third] = Point(chosen, count, limit, plan, error)
                    done(found[first, second, third])
                    yield None if isinstance(made, AutoparError) else made

    try:
        for made in visit():
            if made is not None and made.interrupted:
                break
    except KeyboardInterrupt:
        if not planned():
            raise
    return tuple(found[at] for at in wanted if at in found)
