"""Difference: one place where a plan is not what it says; and when two figures count as the same."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

TOLERANCE = 1e-9
"""Relative difference allowed between seconds in the file and seconds recomputed: the order of a sum may differ."""


@dataclass(frozen=True)
class Difference:
    """One place where the plan is not what it says: ``where`` in the file, and ``what`` is wrong.

    ``runs``: the plan can be run all the same; what is wrong is a price, a count or the order of a listing.
    """

    where: str
    what: str
    runs: bool = False

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


def close(given: float, right: float) -> bool:
    return math.isclose(given, right, rel_tol=TOLERANCE, abs_tol=1e-18)


def seconds(where: str, given: float, right: float) -> Iterator[Difference]:
    """A price that is not as recomputed."""
    if not close(given, right):
        yield Difference(where, f"{given:.10g} in the plan, {right:.10g} recomputed", runs=True)


def count(where: str, given: int, right: int) -> Iterator[Difference]:
    """A count that is not as recomputed."""
    if given != right:
        yield Difference(where, f"{given} in the plan, {right} recomputed", runs=True)
