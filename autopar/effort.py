"""Effort: how much work a search may do, counted alike on every machine; the time limit only cuts off.

Work is counted in *work seconds*: units that repeat exactly (table entries, scheduled instructions, judged moves, solver steps) times the
CPU seconds that one of them takes on a server core. OR-tools calls the same a deterministic time. What a search finds depends on work
alone, as long as the time limit does not cut it; ``Meter.cut`` says if it did.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from time import perf_counter, process_time
from typing import Final, Literal

from autopar.errors import AutoparError, UsageError

Effort = Literal["low", "normal", "high"]
"""A level of effort."""

EFFORTS: tuple[Effort, ...] = ("low", "normal", "high")
"""Every level, the least work first."""

DEFAULT_EFFORT: Effort = "normal"
"""The level when none is named."""


WORK_SECONDS: Final[Mapping[Effort, float]] = {"low": 15.0, "normal": 45.0, "high": 240.0}
"""Work seconds that one search may spend. Set on Llama-3-8B in 7 GiB, 8x8, which uses all of ``normal``."""

GRACE_SHARE, GRACE_SECONDS = 0.05, 0.25
"""Share of the time limit, and seconds, beyond it in which a search may still come to its first plan."""

LEAST_CPU_SECONDS = 0.5
"""CPU seconds of a search before which the share of the machine that it gets is not known."""

MOST_ENDING = 0.5
"""The largest share of the time limit that is kept for recording and writing the plan."""


_ending: ContextVar[tuple[float, AutoparError] | None] = ContextVar("ending", default=None)
"""The deadline of what runs, of ``perf_counter``, and the error for it."""


@contextmanager
def within(deadline: float, error: AutoparError) -> Iterator[None]:
    """Inside it ``check_deadline`` raises the error once the deadline, of ``perf_counter``, has passed."""
    token = _ending.set((deadline, error))
    try:
        yield
    finally:
        _ending.reset(token)


def check_deadline() -> None:
    """For steps that count no work. Raises the error of ``within``: its deadline has passed."""
    ending = _ending.get()
    if ending is not None and perf_counter() >= ending[0]:
        raise ending[1]


def check_effort(effort: str) -> Effort:
    """The level of that name. Raises UsageError: there is none.

    >>> check_effort("high")
    'high'
    """
    for known in EFFORTS:
        if effort == known:
            return known
    raise UsageError(f"unknown effort {effort!r}", f"use one of {', '.join(EFFORTS)}")


class Meter:
    """The work that one search has done, and the clock that cuts it off.

    Args:
        time_limit: seconds from now on at which the search is cut off.
        ending_seconds: CPU seconds of what the time limit holds after the search. On a busy machine they take longer.
    """

    def __init__(self, time_limit: float, ending_seconds: float = 0.0) -> None:
        self.began, self._cpu_began, self._ending_seconds = perf_counter(), process_time(), ending_seconds
        self.time_limit = time_limit
        self.spent = 0.0
        """Work seconds."""
        self.cut = False
        """Whether the time limit cut the search off."""
        self.has_plan = False
        """Whether there is a plan that fits; until then the time limit has a grace."""

    def charge(self, seconds: float) -> None:
        """Counts work seconds that were spent."""
        self.spent += seconds

    @property
    def seconds(self) -> float:
        """Wall-clock seconds since the search began."""
        return perf_counter() - self.began

    @property
    def seconds_left(self) -> float:
        """Wall-clock seconds until the time limit, with its grace while there is no plan; negative after it."""
        grace = 0.0 if self.has_plan else GRACE_SHARE * self.time_limit + GRACE_SECONDS
        seconds = self.seconds
        slowness = max(seconds / max(process_time() - self._cpu_began, LEAST_CPU_SECONDS), 1.0)
        return self.time_limit + grace - seconds - min(self._ending_seconds * slowness, MOST_ENDING * self.time_limit)

    def used_up(self) -> tuple[str, str]:
        """What to say where a search ends without a plan, and the hint: the time limit cut it, or its work is used up."""
        if self.cut:
            return f"no plan was found in {self.time_limit:.3g} s", "allow more time (--time-limit), or fewer choices by pins"
        return "no plan was found with this effort", "allow more work (--effort high), or fewer choices by pins"

    @property
    def expired(self) -> bool:
        """Whether the time limit has passed. Once it has, all budgets are used up."""
        if not self.cut and self.seconds_left <= 0:
            self.cut = True
        return self.cut


@dataclass(frozen=True)
class Budget:
    """A part of a search's work.

    Args:
        ends: the meter's ``spent`` at which it is used up.
    """

    meter: Meter
    ends: float

    @property
    def left(self) -> float:
        """Work seconds left; 0 when the time limit cut the search off."""
        return 0.0 if self.meter.expired else max(self.ends - self.meter.spent, 0.0)

    @property
    def over(self) -> bool:
        return self.left <= 0.0

    def share(self, part: float) -> Budget:
        """That share of what is left."""
        return self.at_most(part * self.left)

    def at_most(self, seconds: float) -> Budget:
        """Up to so many work seconds from now on."""
        return Budget(self.meter, min(self.ends, self.meter.spent + seconds))

    def at_least(self, seconds: float) -> Budget:
        """The same, or that many work seconds where less is left."""
        return Budget(self.meter, max(self.ends, self.meter.spent + seconds))

    def charge(self, seconds: float) -> None:
        self.meter.charge(seconds)


def unlimited() -> Budget:
    """A budget that is never used up, for work outside a search."""
    return Budget(Meter(float("inf")), float("inf"))
