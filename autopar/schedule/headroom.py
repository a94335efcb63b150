"""Headroom: bytes that may be in flight at each operator where memory is short, beside the list that starts everything late."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from autopar.schedule.collectives import Collective
from autopar.schedule.in_place import assign_in_place
from autopar.schedule.liveness import held
from autopar.schedule.schedule import Schedule
from autopar.schedule.windows import anchors


class Headroom:
    """Bytes left at each anchor: while it runs, and since the one before it.

    Args:
        late: the schedule with every collective just before its first reader, or just after its source where nobody reads it.
        ceiling: bytes that a rank may hold, without the optimizer's states.
    """

    def __init__(self, late: Schedule, ceiling: int) -> None:
        late = assign_in_place(late)
        self.left = np.full(len(anchors(late)) + 1, ceiling, dtype=np.int64)
        place, levels = len(self.left) - 1, held(late, "none")
        for item, level in zip(reversed(late.instructions), reversed(levels), strict=True):
            if item.kind == "run":
                place -= 1
            self.left[place] = min(self.left[place], ceiling - level)

    def reserve(self, call: Collective, begin: int, end: int, trailing: Iterable[Collective]) -> bool:
        """Takes room for a call that starts early, from anchor ``begin`` to its reader, the anchor ``end``; False where there is none.

        Args:
            trailing: calls in flight at ``begin`` whose results nobody reads.
        """
        whole = call.taken_bytes
        if self.left[begin : end + 1].min() < whole or self.left[begin] < whole + _beside(trailing):
            return False
        self.left[begin : end + 1] -= whole
        return True

    def allows(self, trailing: Iterable[Collective], anchor: int) -> bool:
        """Whether there is room at an anchor for calls whose results nobody reads."""
        return bool(_beside(trailing) <= self.left[anchor])


def _beside(calls: Iterable[Collective]) -> int:
    """Bytes that calls hold in flight beside their results."""
    return sum(call.staging_bytes + (call.source_bytes if call.reads_in_flight else 0) for call in calls)
