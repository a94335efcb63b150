"""Telemetry: what each phase of a search did to step and bound, and its work and CPU seconds. Each is a line of the log ``autopar``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import process_time

from autopar.effort import Meter

log = logging.getLogger("autopar")


@dataclass(frozen=True)
class PhaseRecord:
    """One phase that ran.

    Args:
        name: the phase's, after the models on which it ran: ``folded: baselines``.
        work: work seconds (``effort``).
        seconds: CPU seconds of this process.
        step_before, step_after: seconds of the incumbent's step; infinite without an incumbent.
        bound_before, bound_after: seconds of the bound.
    """

    name: str
    work: float
    seconds: float
    step_before: float
    step_after: float
    bound_before: float
    bound_after: float


@dataclass(frozen=True)
class Telemetry:
    """Records of phases, and the phases that are left out.

    Args:
        skip: names of the phases that are left out, for ablation.
        place: the models within which the search runs, in words; they precede each name.
        records: in order, of all searches for one plan.
    """

    meter: Meter
    skip: frozenset[str] = frozenset()
    place: tuple[str, ...] = ()
    records: list[PhaseRecord] = field(default_factory=list)

    def within(self, place: str) -> Telemetry:
        """The telemetry of a search on another model, with the same records."""
        return Telemetry(self.meter, self.skip, (*self.place, place), self.records)

    @contextmanager
    def phase(self, name: str, standing: Callable[[], tuple[float, float]]) -> Iterator[None]:
        """Records what the block does.

        Args:
            standing: gives the seconds of the incumbent's step (infinite without one that fits), and of the bound.
        """
        step, bound = standing()
        work, seconds = self.meter.spent, process_time()
        try:
            yield
        finally:
            now = standing()
            words = ": ".join((*self.place, name))
            spent = self.meter.spent - work, process_time() - seconds
            self.records.append(PhaseRecord(words, *spent, step, now[0], bound, now[1]))
            log.info("%s: step %.4g s, bound %.4g s; %.1f CPU seconds", words, now[0], now[1], spent[1])
