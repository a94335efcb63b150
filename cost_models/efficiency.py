"""What was measured of a machine: the efficiency of each class of operators, and how far the measurements lie from the fits."""

from __future__ import annotations

from dataclasses import dataclass

NOTHING = 1e6
"""Efficiency of a term that the measurements do not show, so that it costs nothing."""


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

    def seconds(self, flops: float, bytes_moved: float, peak: float, bandwidth: float, *, overlaps: bool) -> float:
        """Of an operator on a device with these peaks, operations and bytes a second.

        Args:
            overlaps: a device that does all at once (a GPU): the longest of the two and the launch counts, and no work takes no time.
                Else a core does one after the other, packs a product's operands before it multiplies them, and the three add up.
        """
        arithmetic, memory = flops / (self.arithmetic * peak), bytes_moved / (self.memory * bandwidth)
        if not overlaps:
            return self.launch_seconds + arithmetic + memory
        work = max(arithmetic, memory)
        return max(work, self.launch_seconds) if work else 0.0


@dataclass(frozen=True)
class Residual:
    """How well a fit explains what was measured.

    Args:
        points: how many were measured.
        median: of the relative errors, |predicted / measured - 1|.
        largest: of the relative errors.
        percentile_90: of the relative errors; None in older files.
    """

    points: int
    median: float
    largest: float
    percentile_90: float | None = None
