"""The record of a search, as a plan keeps it: its phases in order, what each cost, and what each gained."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from autopar.effort import Effort
from autopar.rows import SearchPhase, SearchRecord


class PhaseRecord(Protocol):
    """One phase as the search records it; ``step_before`` is infinite before there is a plan."""

    @property
    def name(self) -> str: ...
    @property
    def work(self) -> float: ...
    @property
    def seconds(self) -> float: ...
    @property
    def step_before(self) -> float: ...
    @property
    def step_after(self) -> float: ...
    @property
    def bound_before(self) -> float: ...
    @property
    def bound_after(self) -> float: ...


def search_record(effort: Effort, cut: bool, trace: Sequence[PhaseRecord]) -> SearchRecord:
    """The record of a search.

    Args:
        cut: whether the time limit ended the search before its work was done.
        trace: the phases in the order they ran.
    """
    found = [phase.name for phase in trace if phase.step_after < phase.step_before]
    proved = [phase.name for phase in trace if phase.bound_after > phase.bound_before]
    return SearchRecord(
        effort=effort,
        cut=cut,
        found_by=found[-1] if found else None,
        proved_by=proved[-1] if proved else None,
        phases=tuple(map(_row, trace)),
    )


def _row(phase: PhaseRecord) -> SearchPhase:
    return SearchPhase(
        name=phase.name,
        work_seconds=phase.work,
        cpu_seconds=phase.seconds,
        step_seconds_before=_finite(phase.step_before),
        step_seconds_after=_finite(phase.step_after),
        bound_seconds_before=_finite(phase.bound_before),
        bound_seconds_after=_finite(phase.bound_after),
    )


def _finite(seconds: float) -> float | None:
    return max(seconds, 0.0) if math.isfinite(seconds) else None
