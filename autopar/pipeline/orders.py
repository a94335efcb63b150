"""The orders that a user may ask for, and those of them that are written down instead of searched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, get_args

from autopar.errors import UsageError
from autopar.pipeline.timetable import Action, Part
from autopar.pipeline_plan import OrderName

ORDERS: tuple[OrderName, ...] = get_args(OrderName)
MOST_CHUNKS = 64
"""Stages of a rank, at most: no model has layers for more."""


class Order(NamedTuple):
    """An order that is asked for, and the stages that each rank then runs."""

    name: OrderName
    chunks: int = 1


def parse_order(text: str) -> Order:
    """The order of that name; ``interleaved:3`` has three stages a rank, ``interleaved`` two.

    Raises:
        UsageError: there is none.
    """
    word, colon, number = text.partition(":")
    found = next((order for order in ORDERS if order == word), None)
    if found is None or (colon and found != "interleaved"):
        raise UsageError(f"unknown order {text!r}", f"use one of {', '.join(ORDERS)}; interleaved:3 has three stages a rank")
    if colon and not (number.isascii() and number.isdecimal() and 2 <= int(number) <= MOST_CHUNKS):
        message = f"the order {text!r} has no number of stages a rank from 2 to {MOST_CHUNKS}"
        raise UsageError(message, "write interleaved:2, or 1f1b for one stage a rank")
    return Order(found, int(number) if colon else 2 if found == "interleaved" else 1)


def write_lines(name: OrderName, stages: int, microbatches: int) -> Sequence[str]:
    """Each stage's actions in the order ``gpipe`` or ``1f1b``, one stage a rank.

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


def interleave(positions: int, chunks: int, microbatches: int) -> list[list[Action]]:
    """The actions of each position in Megatron-LM's interleaved order: rounds of as many microbatches as positions, chunk by chunk.

    The source is Narayanan et al., 2021, section 2.2: position d runs ``2 (p - d - 1) + (v - 1) p`` actions of forward ahead.

    Args:
        positions: p. Stage s is at position s mod p.
        chunks: v, stages of a position.
        microbatches: m. What a round has beyond them is left out.

    >>> [str(action) for action in interleave(2, 2, 2)[1]]
    ['F0', 'F1', 'F0', 'B0', 'F1', 'B1', 'B0', 'B1']
    """
    found, total = list[list[Action]](), chunks * positions * -(-microbatches // positions)

    def action(part: Part, position: int, number: int) -> Action:
        turn, place = divmod(number, positions * chunks)
        chunk = place // positions if part == "forward" else chunks - 1 - place // positions
        return Action(chunk * positions + position, part, turn * positions + place % positions)

    for position in range(positions):
        ahead = min(2 * (positions - position - 1) + (chunks - 1) * positions, total)
        line = [action("forward", position, number) for number in range(ahead)]
        for number in range(total):
            line += [action("forward", position, number + ahead)] * (number + ahead < total)
            line.append(action("backward", position, number))
        found.append([one for one in line if one.microbatch < microbatches])
    return found


def in_flight_of(name: OrderName, stage: int, stages: int, microbatches: int) -> int:
    """Microbatches in flight for which a stage is planned to have room: of 1F1B one more than the stages behind it, of GPipe all.

    Where ranks run several stages each, the last of all runs one backward after each forward; each stage before it has one more in flight.
    """
    return microbatches if name == "gpipe" else min(stages - stage, microbatches)
