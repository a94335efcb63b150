"""Phases of a search as rows of a table: name, share of the work, condition, function. A loop runs and records them."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from autopar.effort import Budget
from autopar.search.telemetry import Telemetry


class FailedPhaseWarning(UserWarning):
    """A phase of the search ended in a contradiction of its own; the plan before it stands."""


class PhaseState(Protocol):
    """The state that a phase works on."""

    telemetry: Telemetry
    budget: Budget

    def standing(self) -> tuple[float, float]:
        """Step seconds of the incumbent, and bound seconds."""
        ...


State = TypeVar("State", bound=PhaseState)


@dataclass(frozen=True)
class Phase(Generic[State]):
    """One phase.

    Args:
        name: of the idea. Phases of one name are left out together (``skip``).
        when: whether it applies now.
        run: runs it within a budget.
        share: of the work left, for the budget. A phase that may spend all of it need not read its budget.
    """

    name: str
    when: Callable[[State], bool]
    run: Callable[[State, Budget], object]
    share: float = 1.0


def run_phases(phases: Iterable[Phase[State]], state: State) -> None:
    """Runs the phases that apply, in order, and records each.

    A phase in which an assertion fails leaves the plan before it, with a warning; without a plan the assertion goes on.
    """
    for phase in phases:
        if phase.name not in state.telemetry.skip and phase.when(state):
            try:
                with state.telemetry.phase(phase.name, state.standing):
                    phase.run(state, state.budget.share(phase.share))
            except AssertionError as error:
                if not math.isfinite(state.standing()[0]):
                    raise
                text = f"the phase {phase.name!r} of the search failed, and the plan before it stands: {error}"
                warnings.warn(f"{text}\nhint: report the model and these words", FailedPhaseWarning, stacklevel=2)
