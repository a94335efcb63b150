"""The orders that a user may ask for, and those of them that are written down instead of searched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

from autopar.errors import UsageError
from autopar.pipeline_plan import OrderName

ORDERS: tuple[OrderName, ...] = get_args(OrderName)


def check_order(name: str) -> OrderName:
    """The order of that name. Raises UsageError: there is none."""
    if name.split(":")[0] == "interleaved":
        raise UsageError("a rank runs one stage, so orders that interleave several are not there", f"use one of {', '.join(ORDERS)}")
    found = next((order for order in ORDERS if order == name), None)
    if found is None:
        raise UsageError(f"unknown order {name!r}", f"use one of {', '.join(ORDERS)}")
    return found


def write_lines(name: OrderName, stages: int, microbatches: int) -> Sequence[str]:
    """Each stage's actions in the order ``gpipe`` or ``1f1b``.

    >>> write_lines("1f1b", 2, 3)
    ['F0 F1 B0 F2 B1 B2', 'F0 B0 F1 B1 F2 B2']
    """
    lines = []
    for stage in range(stages):
        ahead = in_flight_of(name, stage, stages, microbatches)
        words = [f"F{number}" for number in range(ahead)]
        for number in range(microbatches):
            words += [f"B{number}"] + [f"F{number + ahead}"] * (number + ahead < microbatches)
        lines.append(" ".join(words))
    return lines


def in_flight_of(name: OrderName, stage: int, stages: int, microbatches: int) -> int:
    """Microbatches in flight for which a stage is planned to have room: of 1F1B one more than the stages behind it, of GPipe all."""
    return microbatches if name == "gpipe" else min(stages - stage, microbatches)
