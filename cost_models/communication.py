"""Collectives alone: operators and the optimizer take no time. The literature's known optima are stated under this model."""

from __future__ import annotations

from .hardware import Hardware
from .operator import Operator


class Communication:
    """Everything that a rank does alone is free."""

    overlaps = False
    times_operators = False

    def operator_seconds(self, operator: Operator, hardware: Hardware) -> float:
        return 0.0

    def optimizer_seconds(self, optimizer: str, elements: int, dtype: str, hardware: Hardware) -> float:
        return 0.0
