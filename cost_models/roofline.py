"""What an operator costs on one rank: the roofline of arithmetic, memory traffic and launch (Williams, Waterman and Patterson 2009).

The efficiencies and the launch time are the hardware file's, by class of operator. Where the file gives none they are autoparallel's
(``compute_estimation.py``: 0.7 of peak arithmetic, 0.7 of peak bandwidth), the best public constants for large kernels.
"""

from __future__ import annotations

from cost_models.hardware import Hardware
from cost_models.memory import DTYPE_BYTES, OPTIMIZERS
from cost_models.operator import Operator


class Roofline:
    """max(flops / (efficiency * peak), bytes / (efficiency * bandwidth), launch); 0 for what does nothing."""

    def operator_seconds(self, operator: Operator, hardware: Hardware) -> float:
        """``float32`` runs at the float32 peak; ``tf32`` must be asked for by name."""
        if not operator.flops and not operator.bytes_moved:
            return 0.0
        return _seconds(operator.family, operator.flops, operator.bytes_moved, operator.dtype, hardware)

    def optimizer_seconds(self, optimizer: str, elements: int, dtype: str, hardware: Hardware) -> float:
        """The bytes that the step moves, at the memory's bandwidth."""
        moved = OPTIMIZERS[optimizer].accesses * elements * DTYPE_BYTES[dtype]
        return moved / (hardware.efficiency("optimizer").memory * hardware.memory_bandwidth)


def _seconds(family: str, flops: float, moved: float, dtype: str, hardware: Hardware) -> float:
    efficiency = hardware.efficiency(family)
    arithmetic = flops / (efficiency.arithmetic * hardware.peak(dtype))
    return max(arithmetic, moved / (efficiency.memory * hardware.memory_bandwidth), efficiency.launch_seconds)
