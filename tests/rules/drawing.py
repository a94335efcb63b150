"""A case: an operator, its arguments, and the whole rule it must get.

Tensors are drawn when a case is run: ``F`` float64, ``P`` positive, ``I`` integers below ``high``, ``B`` booleans.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Draw:
    """A random tensor to be drawn."""

    kind: str
    shape: tuple[int, ...]
    high: int = 0

    def tensor(self) -> torch.Tensor:
        match self.kind:
            case "float64":
                return torch.randn(self.shape, dtype=torch.float64)
            case "float32":
                return torch.randn(self.shape)
            case "complex128":
                return torch.randn(self.shape, dtype=torch.complex128)
            case "positive":
                return torch.rand(self.shape, dtype=torch.float64) + 0.5
            case "integer":
                return torch.randint(0, self.high, self.shape)
            case _:
                return torch.rand(self.shape) < 0.5


def F(*shape: int) -> Draw:
    return Draw("float64", shape)


def F32(*shape: int) -> Draw:
    return Draw("float32", shape)


def C(*shape: int) -> Draw:
    return Draw("complex128", shape)


def P(*shape: int) -> Draw:
    return Draw("positive", shape)


def I(high: int, *shape: int) -> Draw:  # noqa: E743
    return Draw("integer", shape, high)


def B(*shape: int) -> Draw:
    return Draw("bool", shape)


@dataclass(frozen=True)
class Case:
    """``arguments`` is a tuple with ``Draw`` for tensors, or a function that makes them (for gradients of a forward run)."""

    target: str
    arguments: tuple[Any, ...] | Callable[[], tuple[Any, ...]]
    rule: str
    kwargs: dict[str, Any] = field(default_factory=dict)
    random: bool = False

    def drawn(self) -> list[Any]:
        """The arguments with tensors, the same at every call."""
        torch.manual_seed(0)
        return drawn(self.arguments() if callable(self.arguments) else self.arguments)

    def __str__(self) -> str:
        return f"{self.target}: {self.rule}"


def drawn(argument: Any) -> Any:
    match argument:
        case Draw():
            return argument.tensor()
        case list() | tuple():
            return [drawn(item) for item in argument]
        case _:
            return argument
