"""What searches are asked and given in tests: a generous request, and budgets of work."""

from __future__ import annotations

import math
from typing import Any

from autopar.effort import Budget, Meter
from autopar.search.driver.state import SearchRequest
from autopar.search.ilp.overlap import LearnedOverlap, OverlapStats
from autopar.search.telemetry import Telemetry


def budget(seconds: float, time_limit: float = math.inf) -> Budget:
    """So many work seconds, with a meter of their own."""
    return Budget(Meter(time_limit), seconds)


def asked(limit: int, *, work: float = 3600.0, time_limit: float = math.inf, **more: Any) -> SearchRequest:
    """A request for a plan that fits in ``limit`` bytes, without baselines or recomputation.

    Args:
        work: work seconds.
        more: other fields of ``SearchRequest``.
    """
    given = budget(work, time_limit)
    options: dict[str, Any] = {
        "optimizer": "adamw", "gap": 1e-6, "seed": 0, "progress": None, "baselines": False, "recompute": False,
        "telemetry": Telemetry(given.meter),
    }  # fmt: skip
    return SearchRequest(limit=limit, budget=given, **(options | more))


def uniform(waited: float, slowdown: float) -> LearnedOverlap:
    """Prices under which the same share of every collective is waited for, and none share a call."""
    places = LearnedOverlap.first(slowdown).beliefs
    return LearnedOverlap(dict.fromkeys(places, OverlapStats(waited, 1.0)), slowdown)
