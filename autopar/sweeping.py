"""Sweep: plans over a grid of settings of a model, numbers of devices and memory limits."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autopar.display import render
from autopar.errors import AutoparError, InfeasibleError
from autopar.plan import Plan

Settings = Mapping[str, Any]
"""One value for each setting of a model, by name."""


@dataclass(frozen=True)
class Point:
    """One plan of a sweep.

    Args:
        settings: what the model was made with.
        memory_limit: bytes per rank.
        plan: None where there is none, for the reason that ``error`` gives.
    """

    settings: Settings
    devices: int
    memory_limit: int
    plan: Plan | None
    error: AutoparError | None = None

    @property
    def fits(self) -> bool | None:
        """Whether a plan fits in the memory; None where that is not known."""
        return True if self.plan is not None else False if isinstance(self.error, InfeasibleError) else None

    def row(self) -> dict[str, object]:
        """The point as a row of JSON."""
        found: dict[str, object] = {
            "settings": dict(self.settings), "devices": self.devices, "memory_limit_bytes_per_rank": self.memory_limit,
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
        """One line a point."""
        return render("Sweep.to_csv", self)

    def to_svg(self) -> str:
        """A drawing of step and memory against the devices or, where these are all the same, what else differs."""
        return render("Sweep.to_svg", self)

    def __str__(self) -> str:
        return render("Sweep.__str__", self)

    def _repr_svg_(self) -> str:
        return self.to_svg()
