"""The best plans by their prices, run on the ranks that are there: what ``autopar tune`` does.

tuning       the tune from start to end: plan on the first rank, measure on all, choose
contestants  a plan compiled with its optimizer, ready to step
racing       interleaved rounds of steps, and the peak memory of one
"""

from __future__ import annotations

from autopar.tuning.tuning import ROUNDS, tune_target

__all__ = ["ROUNDS", "tune_target"]
