"""One case or more for every row of the table."""

from __future__ import annotations

import torch

from tests.rules import compute_cases, layout_cases, rare_cases
from tests.rules.drawing import Case

_GONE_FROM = {"aten.cholesky.default": (2, 14)}
"""Operators that later versions of torch no longer have."""
_VERSION = tuple(map(int, torch.__version__.split(".")[:2]))


def is_gone(target: str) -> bool:
    """Whether this torch has the operator no more."""
    return _GONE_FROM.get(target, (1000,)) <= _VERSION


CASES: tuple[Case, ...] = tuple(
    case for case in compute_cases.CASES + layout_cases.CASES + rare_cases.CASES if not is_gone(case.target)
)  # fmt: skip
