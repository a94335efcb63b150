"""The errors users see: one sentence of what, where and which specs, and a last line ``hint: ...``.

Each class carries the exit status that the command line gives for it (design: 1 infeasible or failed,
2 wrong usage, 3 a model or file that cannot be handled, 4 time limit with no answer).
"""

from __future__ import annotations

from typing import Any


class AutoparError(Exception):
    """Base of every error raised for users.

    Args:
        message: what is wrong, where, and which shapes and specs.
        hint: what to try; printed as a last line ``hint: ...``.
    """

    exit_status = 3

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(f"{message}\nhint: {hint}")
        self.message = message
        self.hint = hint

    def __reduce__(self) -> tuple[Any, ...]:
        """Errors travel between ranks: torch sends those of a checkpoint to all of them."""
        return type(self), (self.message, self.hint), self.__dict__


class UsageError(AutoparError, ValueError):
    """A wrong argument: bad pin, mesh, hardware name or target (exit status 2)."""

    exit_status = 2


class NumberError(UsageError):
    """A number of microbatches that the step cannot be made of, where fewer may do. ``rows``: of one of them, or 0 where not known."""

    rows = 0


class SpecError(UsageError):
    """A sharding spec that cannot be read or does not fit its tensor (exit status 2)."""


class RuleError(AutoparError, ValueError):
    """A sharding rule that cannot be read or does not fit an operator's shapes (exit status 3)."""


class FileError(AutoparError):
    """A plan, hardware or problem file that cannot be handled (exit status 3)."""


class CaptureError(AutoparError):
    """A model whose graph cannot be captured (exit status 3)."""


class ScheduleError(AutoparError):
    """A schedule that cannot be run: a pass made it wrong, or a plan file was edited; names the instruction (exit status 3)."""


class MismatchError(AutoparError):
    """A plan that does not fit the model, mesh or torch it is used with (exit status 3)."""


class InfeasibleError(AutoparError):
    """No plan satisfies the memory limit and the pins (exit status 1). ``least``: bytes of a rank that a plan is known to need, or 0."""

    exit_status = 1
    least = 0


class VerificationError(AutoparError):
    """A check or verification that failed, or a rank that died (exit status 1)."""

    exit_status = 1


class TimeLimitError(AutoparError):
    """The time limit passed with no answer (exit status 4)."""

    exit_status = 4
