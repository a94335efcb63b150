"""Efficiency: what a class of operators reaches of a device's peaks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Efficiency:
    """What a large kernel of one class of operators reaches.

    Args:
        arithmetic: share of the peak arithmetic.
        memory: share of the peak memory bandwidth.
        launch_seconds: the least time of an operator.
    """

    arithmetic: float = 0.7
    memory: float = 0.7
    launch_seconds: float = 0.0
