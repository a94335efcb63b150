"""What was measured of a machine: the efficiency of each class of operators, and how far the measurements lie from the fits."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Efficiency:
    """What a class of operators reaches of a device's peaks. A share above 1 is what a cache does for small tensors.

    Args:
        arithmetic: share of the peak arithmetic.
        memory: share of the peak memory bandwidth.
        launch_seconds: of one operator, whatever its size.
    """

    arithmetic: float = 0.7
    memory: float = 0.7
    launch_seconds: float = 0.0


@dataclass(frozen=True)
class Residual:
    """How well a fit explains what was measured.

    Args:
        points: how many were measured.
        median: of the relative errors, |predicted / measured - 1|.
        largest: of the relative errors.
    """

    points: int
    median: float
    largest: float
