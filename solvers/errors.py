"""The error of this package that users see."""

from __future__ import annotations


class ProblemError(ValueError):
    """A problem that cannot be solved as given: one line that names the place, then a line ``hint: ...``."""

    def __init__(self, what: str, hint: str) -> None:
        super().__init__(f"{what}\nhint: {hint}")
        self.what, self.hint = what, hint


class TooLargeError(ProblemError):
    """Costs or usages whose sum integers do not hold."""
