"""CostModel: the interface. Seconds of an operator and of the optimizer's step on one rank; collectives are the links' business.

One more model is one file with an implementation, and its name in ``cost_models.registry``.
"""

from __future__ import annotations

from typing import Protocol

from .hardware import Hardware
from .operator import Operator


class CostModel(Protocol):
    """Prices work on one rank. Implementations are stateless: what differs between machines is in the hardware file."""

    @property
    def overlaps(self) -> bool:
        """Whether collectives run beside operators and share calls: the objective is a simulated step, not a sum."""
        ...

    @property
    def times_operators(self) -> bool:
        """Whether operators take time. Where they take none, computing everything on every rank must be ruled out."""
        ...

    def operator_seconds(self, operator: Operator, hardware: Hardware) -> float:
        """Seconds of ``operator`` on one device, without the collectives inside it."""
        ...

    def optimizer_seconds(self, optimizer: str, elements: int, dtype: str, hardware: Hardware) -> float:
        """Seconds of the step of ``optimizer`` on one parameter of which the rank holds ``elements`` elements of ``dtype``."""
        ...
