"""The record of a search, as a plan keeps it: its phases in order, what each cost, and what each gained."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from autopar.effort import Effort
from autopar.rows import SearchPhase, SearchRecord

if TYPE_CHECKING:
    from autopar.search.telemetry import PhaseRecord

CLOSE = 1e-6
"""Relative difference up to which a phase's step or bound is the plan's: passes after the phases round."""


def search_record(
    effort: Effort, cut: bool, trace: Sequence[PhaseRecord], seconds: float, bound_seconds: float, microbatches: int = 1
) -> SearchRecord:
    """The record of a search.

    Args:
        cut: whether the time limit ended the search before its work was done.
        trace: the phases in the order they ran; their seconds are those of one microbatch.
        seconds, bound_seconds: the plan's objective and its bound.
    """
    phases = tuple(_row(phase, microbatches) for phase in trace)
    return SearchRecord(
        effort=effort, cut=cut, found_by=_found_by(phases, seconds), proved_by=_proved_by(phases, bound_seconds), phases=phases
    )


def _found_by(phases: Sequence[SearchPhase], seconds: float) -> str | None:
    """The first phase that came down to the plan's step; None where none improved it."""
    gains = [
        (phase.step_seconds_after, phase.name)
        for phase in phases
        if phase.step_seconds_after is not None and phase.step_seconds_after < (phase.step_seconds_before or math.inf)
    ]
    reached = max(seconds, min((after for after, _ in gains), default=0.0)) * (1 + CLOSE)
    return next((name for after, name in gains if after <= reached), None)


def _proved_by(phases: Sequence[SearchPhase], bound_seconds: float) -> str | None:
    """The first phase that came up to the plan's bound; None where it was there before any phase."""
    gains = [
        (phase.bound_seconds_after, phase.name)
        for phase in phases
        if phase.bound_seconds_after is not None and phase.bound_seconds_after > (phase.bound_seconds_before or 0.0)
    ]
    reached = min(bound_seconds, max((after for after, _ in gains), default=0.0)) * (1 - CLOSE)
    return next((name for after, name in gains if after >= reached), None)


def _row(phase: PhaseRecord, microbatches: int) -> SearchPhase:
    return SearchPhase(
        name=phase.name,
        work_seconds=phase.work,
        cpu_seconds=phase.seconds,
        step_seconds_before=_finite(phase.step_before * microbatches),
        step_seconds_after=_finite(phase.step_after * microbatches),
        bound_seconds_before=_finite(phase.bound_before * microbatches),
        bound_seconds_after=_finite(phase.bound_after * microbatches),
    )


def _finite(seconds: float) -> float | None:
    return max(seconds, 0.0) if math.isfinite(seconds) else None
