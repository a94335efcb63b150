"""What an operator costs on one rank: the roofline of arithmetic, memory traffic and launch (Williams, Waterman and Patterson 2009).

The efficiencies and the launch time are the hardware file's, by class of operator. Where the file gives none they are autoparallel's
(``compute_estimation.py``: 0.7 of peak arithmetic, 0.7 of peak bandwidth), the best public constants for large kernels.
"""

from __future__ import annotations

from .hardware import Hardware
from .memory import find_optimizer
from .operator import Operator


class Roofline:
    """flops / (efficiency * peak), bytes / (efficiency * bandwidth) and the launch: their maximum where the next launch overlaps with the
    work (a GPU's stream), else their sum (a CPU). What does no work, a view, takes a launch only where launches add up."""

    overlaps = True
    times_operators = True

    def operator_seconds(self, operator: Operator, hardware: Hardware) -> float:
        """``float32`` runs at the float32 peak; ``tf32`` must be asked for by name."""
        efficiency = hardware.efficiency(operator.family, operator.name)
        peaks = hardware.peak(operator.dtype), hardware.memory_bandwidth
        count = operator.launches
        return count * efficiency.seconds(operator.flops / count, operator.bytes_moved / count, *peaks, overlaps=hardware.launch_overlaps)

    def optimizer_seconds(self, optimizer: str, elements: int, dtype: str, hardware: Hardware) -> float:
        """The bytes that the step moves, at the memory's bandwidth; a launch for each parameter where launches add up."""
        moved = find_optimizer(optimizer).bytes_moved(dtype)
        efficiency = hardware.efficiency("optimizer", optimizer.partition(":")[0].partition("-")[0])
        seconds = moved * elements / (efficiency.memory * hardware.memory_bandwidth)
        return seconds if hardware.launch_overlaps or not moved else seconds + efficiency.launch_seconds
