"""Measures this machine as the ranks of a step see it -> Hardware: what ``autopar profile`` does.

Every rank runs the same measurements at the same time, because that is what a step is: ranks share cores, caches, memory and links. Fits
are ``cost_models.fitting``'s.
"""

from __future__ import annotations

from autopar.measurement.hardware import Measured
from autopar.measurement.profiling import QUICK, Effort, measure
from autopar.measurement.writing import to_toml

__all__ = ["QUICK", "Effort", "Measured", "measure", "to_toml"]
