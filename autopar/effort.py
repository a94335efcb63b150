"""Effort: how much work a search may do. Work is counted and the same on every machine; the time limit only cuts off."""

from __future__ import annotations

from typing import Literal

from autopar.errors import UsageError

Effort = Literal["low", "normal", "high"]
"""A level of effort."""

EFFORTS: tuple[Effort, ...] = ("low", "normal", "high")
"""Every level, the least work first."""

DEFAULT_EFFORT: Effort = "normal"
"""The level when none is named."""


def check_effort(effort: str) -> Effort:
    """The level of that name. Raises UsageError: there is none.

    >>> check_effort("high")
    'high'
    """
    for known in EFFORTS:
        if effort == known:
            return known
    raise UsageError(f"unknown effort {effort!r}", f"use one of {', '.join(EFFORTS)}")
