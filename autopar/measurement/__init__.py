"""Measures this machine as the ranks of a step see it -> Hardware: what ``autopar profile`` does.

Every rank runs the same measurements at the same time, because that is what a step is: ranks share cores, caches, memory and links. Fits
are ``autopar.cost_models.fitting``'s.

profiling    the profile from start to end
clock        seconds of a call, on a rank whose fellows compute as well
gpu_clock    device and host seconds of a call on a GPU, apart
device       the memory of a device, the most that products and copies reach
operators    times of the operators of the built-in models
rearrangements  a model of what those have little of: batch norm, sorts, changes of layout
links        times of collectives, and what they cost computation beside them
parameters   what a step costs for each parameter beside its instructions
hardware     from times to figures
writing      figures as a hardware file
"""

from __future__ import annotations

from autopar.measurement.hardware import Measured
from autopar.measurement.profiling import QUICK, Effort, measure
from autopar.measurement.writing import to_toml

__all__ = ["QUICK", "Effort", "Measured", "measure", "to_toml"]
