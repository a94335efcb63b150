"""Batches of changing length: a plan for each of a few lengths, with the same weights, and calls padded to the next of them.

planning    the plans, weights lying alike in all of them
compiled    the module that runs them
"""

from __future__ import annotations

from autopar.padded.compiled import compile_padded
from autopar.padded.planning import Padded, load_padded, plan_padded

__all__ = ["Padded", "compile_padded", "load_padded", "plan_padded"]
