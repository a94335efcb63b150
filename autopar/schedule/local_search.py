"""improve_order: local search over the order of a list and over who shares a call.

The passes before place instructions by rules. Here a move is judged by simulating the list, in microseconds (``kernels.moves``). It is
kept where the list takes no more seconds, and holds no more bytes than it may.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count

import numpy as np

from autopar.schedule import settings
from autopar.schedule.array_schedule import array_schedule, call_costs, lives_for
from autopar.schedule.bucketing import size
from autopar.schedule.collectives import Collective, Part
from autopar.schedule.instructions import Instruction
from autopar.schedule.legality import bytes_in_flight, is_legal
from autopar.schedule.ordering import start_and_wait, taken_by
from autopar.schedule.schedule import Schedule
from autopar.schedule.settings import DRAW_BITS, MOVES, MOVES_EACH, MOVES_WORK, PLAIN
from autopar.schedule.storages import resting_bytes
from autopar.schedule.tables import COMPILED, Order, descend


@dataclass(frozen=True)
class Improved:
    """The result of local search.

    Args:
        moves: the number that was judged.
    """

    schedule: Schedule
    moves: int


def _usual_moves(schedule: Schedule) -> int:
    """The number of moves of a list that are judged by default."""
    length = max(len(schedule.instructions), 1)
    return min(MOVES, MOVES_EACH * length, MOVES_WORK // length) // (1 if COMPILED else PLAIN)


def improve_order(schedule: Schedule, optimizer: str, limit: int, effort: int = 1, *, keep_program_order: bool = True) -> Improved:
    """The schedule in a faster order, or in one that holds less where it holds more than it may.

    It is a list after ``passes.PLACING``. Its limits grow with the bytes in flight and in buckets.

    Args:
        limit: bytes on a rank.
        effort: times as many moves as usual.
        keep_program_order: the operators have the captured order, and leave it only where no less is held: see
            ``kernels.moves.descend``.
    """
    if not schedule.machine.overlaps or not schedule.instructions:
        return Improved(schedule, 0)
    arrays, order, items = array_schedule(schedule)
    random = np.random.default_rng(0).integers(0, 2**DRAW_BITS, 1)
    budget, most = effort * _usual_moves(schedule), limit - resting_bytes(schedule, optimizer)
    weights, captured = np.cumsum(list(settings.MOVE_WEIGHTS.values())), int(keep_program_order)
    costs, lives = call_costs(arrays, order), lives_for(arrays, order)
    _, judged = descend(arrays, order, costs, lives, random, weights, budget, most, captured)
    found = rebuilt(schedule, order, items)
    return Improved(found if is_legal(found) else schedule, judged)


def rebuilt(schedule: Schedule, order: Order, items: Sequence[Instruction]) -> Schedule:
    """The list in an order."""
    parts = [part for call in schedule.calls for part in call.parts]
    known = {call.parts: call for call in schedule.calls}
    number = count(max(item.id for item in schedule.instructions) + 1)
    calls, made = dict[str, Collective](), dict[int, Instruction]()
    for head in np.flatnonzero(order.head == np.arange(len(parts))).tolist():
        shared = _bucket(order, parts, head)
        call = known.get(shared) or Collective(shared[0].target + (f"+{len(shared) - 1}" if len(shared) > 1 else ""), shared)
        first = items[2 * head]
        pair = start_and_wait(call, taken_by(call, schedule.machine), number)
        start, wait = (item._replace(microbatch=first.microbatch) for item in pair)
        calls[call.id], made[2 * head], made[2 * head + 1] = call, start, wait
    chosen = [made.get(place) or items[place] for place in order.items[: order.length[0]].tolist()]
    limits = replace(schedule.limits, bucket_bytes=max(schedule.limits.bucket_bytes, *map(size, calls.values()), 0))
    found = replace(schedule, instructions=tuple(chosen), collectives=calls, limits=limits)
    return replace(found, limits=replace(limits, ahead_bytes=max(limits.ahead_bytes, bytes_in_flight(found))))


def _bucket(order: Order, parts: Sequence[Part], head: int) -> tuple[Part, ...]:
    """The parts of a call."""
    found, slot = list[Part](), head
    while slot >= 0:
        found.append(parts[slot])
        slot = int(order.after[slot])
    return tuple(found)
