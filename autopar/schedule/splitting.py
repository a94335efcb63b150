"""A stage's backward in two parts, so that the stage before it waits for the first alone.

``split_backward``: the *input part* makes what is sent, the gradients of what the stage received. The *weight part* is the rest: gradients
of weights, their sums over microbatches, and what is done with these once a step.

``defer_once``: all of backward in its order, and behind it the *once part*: what is done once a step. The last microbatch sends before it.

Parts are runs of one list, so all that holds of a list holds of them.
"""

from __future__ import annotations

from dataclasses import replace

from autopar.errors import ScheduleError
from autopar.schedule.in_place import clear_in_place
from autopar.schedule.instructions import Instruction
from autopar.schedule.legality import bytes_in_flight, check_legal
from autopar.schedule.passes import ENDING, run_passes
from autopar.schedule.schedule import Schedule


def split_backward(schedule: Schedule) -> Schedule:
    """The schedule with the input part of backward before the weight part, each in the order that it had.

    Results are written over others anew, and values freed where they are read last now.

    Raises:
        ScheduleError: the new order is not legal.
    """
    items = [item for item in clear_in_place(schedule).instructions if item.kind != "free"]
    early = _input_part(schedule, items)
    forward = [item for item in items if item.half == "forward"]
    backward = [item for item in items if item.half != "forward"]
    order = (*forward, *(item for item in backward if item in early), *(item for item in backward if item not in early))
    made = _reordered(schedule, order, "split_backward")
    find_weight_part(made)
    return made


def defer_once(schedule: Schedule) -> Schedule:
    """The schedule with what backward does once a step behind the rest, each in the order that it had; itself where nothing is sent.

    Results are written over others anew, and values freed where they are read last now.

    Raises:
        ScheduleError: the new order is not legal.
    """
    wanted = {value for output, value in schedule.outputs if output.is_sent}
    if not any(item.half != "forward" and not wanted.isdisjoint(item.writes) for item in schedule.instructions):
        return schedule
    items = [item for item in clear_in_place(schedule).instructions if item.kind != "free"]
    late = [item for item in items if item.microbatch > 0]
    return _reordered(schedule, (*(item for item in items if item.microbatch <= 0), *late), "defer_once") if late else schedule


def find_once_part(schedule: Schedule) -> int:
    """The index of the first instruction of the once part; the number of instructions where something else stands behind that."""
    items = schedule.instructions
    begin = next((index for index, item in enumerate(items) if item.microbatch > 0), len(items))
    return begin if all(item.microbatch > 0 for item in items[begin:]) else len(items)


def _reordered(schedule: Schedule, order: tuple[Instruction, ...], after: str) -> Schedule:
    """The schedule with its instructions in another order, without frees so far. Calls may be in flight as that needs."""
    made = replace(schedule, instructions=order)
    made = replace(made, limits=replace(made.limits, ahead_bytes=max(made.limits.ahead_bytes, bytes_in_flight(made))))
    return check_legal(run_passes(made, ENDING), after)


def find_weight_part(schedule: Schedule) -> int:
    """The index of the first instruction of the weight part: of backward, the first that is not for what is sent.

    Raises:
        ScheduleError: what is sent needs an instruction behind it, or a call that is under way then.
    """
    items = schedule.instructions
    early = _input_part(schedule, items)
    backward = [index for index, item in enumerate(items) if item.half != "forward"]
    begin = next((index for index in backward if items[index].kind != "free" and items[index] not in early), len(items))
    for item in items[begin:]:
        if item in early:
            message = f"instruction {item.id} ({item.kind} of {item.of}) leads to what is sent and stands among gradients of weights"
            raise ScheduleError(message, "plan again with order='zero-bubble'")
    return begin


def _input_part(schedule: Schedule, items: list[Instruction] | tuple[Instruction, ...]) -> set[Instruction]:
    """The instructions of backward that lead to what is sent; of a call its start and its wait."""
    wanted = {value for output, value in schedule.outputs if output.is_sent}
    calls, found = set[str](), set[Instruction]()
    for item in reversed(items):
        if item.half == "forward" or item.kind == "free":
            continue
        if (item.kind == "start" and item.of in calls) or not wanted.isdisjoint(item.writes):
            found.add(item)
            wanted.update(item.reads)
            if item.kind in ("start", "wait"):
                calls.add(item.of)
    return found | {item for item in items if item.kind == "wait" and item.of in calls}  # one that only another start reads in flight too
