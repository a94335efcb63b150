"""Difference: one place where a plan is not what it says; and when two figures count as the same."""

from __future__ import annotations

import math
from dataclasses import dataclass

TOLERANCE = 1e-6
"""Relative difference allowed between seconds in the file and seconds recomputed: the order of a sum may differ."""


@dataclass(frozen=True)
class Difference:
    """One place where the plan is not what it says: ``where`` in the file, and ``what`` is wrong."""

    where: str
    what: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


def close(given: float, right: float) -> bool:
    return math.isclose(given, right, rel_tol=TOLERANCE, abs_tol=1e-15)
