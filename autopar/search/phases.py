"""Phases of a search as rows of a table: name, share of the work, condition, function. A loop runs them and records what each did."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from autopar.effort import Budget
from autopar.search.telemetry import Telemetry


class Standing(Protocol):
    """What a phase works on."""

    telemetry: Telemetry

    def standing(self) -> tuple[float, float]:
        """Step seconds of the incumbent and bound seconds."""
        ...

    def part(self, share: float) -> Budget:
        """A share of the work left."""
        ...


State = TypeVar("State", bound=Standing)


@dataclass(frozen=True)
class Phase(Generic[State]):
    """One phase.

    Args:
        name: of the idea; phases of one name are left out together (``skip``).
        share: of the work left, that it may spend.
        when: whether it applies now.
        run: does it within a budget.
    """

    name: str
    share: float
    when: Callable[[State], bool]
    run: Callable[[State, Budget], object]


def run_phases(phases: Iterable[Phase[State]], state: State) -> None:
    """Runs the phases that apply, one after another, and records each."""
    for phase in phases:
        if phase.name not in state.telemetry.skip and phase.when(state):
            with state.telemetry.phase(phase.name, state.standing):
                phase.run(state, state.part(phase.share))
