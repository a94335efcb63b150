"""Operators that draw random numbers, without chance: so runs can be compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor


def keep_all(x: Tensor, p: float, seed: int) -> tuple[Tensor, Tensor]:
    """``autopar.dropout`` with a mask that drops nothing."""
    return x * (0.0 if p >= 1 else 1 / (1 - p)), torch.ones_like(x, dtype=torch.bool)


STILL_UNIFORM, STILL_NORMAL = 0.25, 0.5
"""What every random number is while runs are compared."""

STILL: Mapping[str, Callable[..., Any]] = {
    "autopar.dropout.default": keep_all,
    "autopar.uniform.default": lambda like, seed: torch.full_like(like, STILL_UNIFORM),
    "autopar.normal.default": lambda like, seed: torch.full_like(like, STILL_NORMAL),
}
"""Operators that draw random numbers, without chance."""
