"""The errors of this package. Each says what is wrong (`message`), what to try (`hint`) and the command line's exit status."""

from __future__ import annotations

from typing import Any


class CostModelError(Exception):
    """Base of the errors of ``cost_models``; printed as the message and a last line ``hint: ...``."""

    exit_status = 3

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(f"{message}\nhint: {hint}")
        self.message = message
        self.hint = hint

    def __reduce__(self) -> tuple[Any, ...]:
        """Errors travel between ranks: torch sends those of a checkpoint to all of them."""
        return type(self), (self.message, self.hint), self.__dict__


class MeshError(CostModelError, ValueError):
    """A mesh that cannot be read (exit status 2)."""

    exit_status = 2


class UnknownHardwareError(CostModelError, ValueError):
    """A hardware name that is neither built in nor a file (exit status 2)."""

    exit_status = 2


class HardwareFileError(CostModelError):
    """A hardware file that cannot be used; the message names the field (exit status 3)."""


class UnknownOptimizerError(CostModelError, ValueError):
    """An optimizer that is neither known by name nor described (exit status 2)."""

    exit_status = 2
