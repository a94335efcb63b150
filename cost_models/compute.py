"""What an operator costs on one rank: the roofline of arithmetic, memory traffic and kernel launch.

The efficiencies are autoparallel's (``compute_estimation.py``: 0.7 of peak arithmetic, 0.7 of peak bandwidth),
the best public constants for large kernels; the launch time comes with the hardware.
"""

from __future__ import annotations

from cost_models.hardware import Hardware

ARITHMETIC_EFFICIENCY = 0.7
"""The share of peak arithmetic that a large kernel reaches."""

MEMORY_EFFICIENCY = 0.7
"""The share of peak memory bandwidth that a large kernel reaches."""


def roofline(flops: float, bytes_moved: float, dtype: str, hardware: Hardware) -> float:
    """Seconds of one kernel: max(flops / (efficiency * peak), bytes / (efficiency * bandwidth), launch); 0 when it does nothing.

    Args:
        flops: floating-point operations on one rank.
        bytes_moved: bytes read and written on one rank.
        dtype: of the operands. ``float32`` runs at the float32 peak; ``tf32`` must be asked for by name.
        hardware: the device.
    """
    if not flops and not bytes_moved:
        return 0.0
    arithmetic = flops / (ARITHMETIC_EFFICIENCY * hardware.peak(dtype))
    return max(arithmetic, memory_seconds(bytes_moved, hardware), hardware.kernel_launch_seconds)


def memory_seconds(bytes_moved: float, hardware: Hardware) -> float:
    """Seconds to move ``bytes_moved`` to and from a device's memory."""
    return bytes_moved / (MEMORY_EFFICIENCY * hardware.memory_bandwidth)
