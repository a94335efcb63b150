"""How much may be in flight when, where memory is short: what is left under a ceiling beside the list that starts everything late."""

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
        late: the schedule with every collective just before its first reader, or just after what it is made from where nobody reads it.
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
        """Room for a call that starts before anchor ``begin`` instead of just before its reader, the anchor ``end``, whose buffers are held
        so much longer: also beside what else is made for that reader. False where there is none.

        Args:
            trailing: calls in flight at ``begin`` that nobody waits for.
        """
        whole = call.taken_bytes
        if self.left[begin : end + 1].min() < whole or self.left[begin] < whole + _beside(trailing):
            return False
        self.left[begin : end + 1] -= whole
        return True

    def allows(self, trailing: Iterable[Collective], anchor: int) -> bool:
        """Whether calls whose results nobody reads may be in flight at an anchor, where they could have been waited for."""
        return bool(_beside(trailing) <= self.left[anchor])


def _beside(calls: Iterable[Collective]) -> int:
    """What calls hold in flight beside their results."""
    return sum(call.staging_bytes + (call.source_bytes if call.reads_in_flight else 0) for call in calls)
