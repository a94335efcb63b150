"""Timetable: one total order of actions. Each rank runs those of its stages, in that order.

That one order exists is the proof that nothing waits for ever: the first unfinished action has all that it reads, also where a sender
waits for its receiver.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from autopar.errors import MismatchError
from autopar.pipeline.cutting import Stages
from autopar.solvers.pipeline.timetable import merge_lines

Part = Literal["forward", "backward", "weights"]
LETTERS: Mapping[Part, str] = {"forward": "F", "backward": "B", "weights": "W"}
"""The parts of a microbatch in a stage, in their order, each with its letter. Where a stage has ``weights``, its ``backward`` makes only
what the stage before it waits for."""
PARTS: Mapping[str, Part] = {letter: part for part, letter in LETTERS.items()}


class Action(NamedTuple):
    """One part of a microbatch in one stage."""

    stage: int
    part: Part
    microbatch: int

    def __str__(self) -> str:
        return f"{LETTERS[self.part]}{self.microbatch}"


def write_order(order: Sequence[Action], stage: int) -> str:
    """A stage's actions in words.

    >>> write_order([Action(0, "forward", 0), Action(1, "forward", 0), Action(0, "backward", 0)], 0)
    'F0 B0'
    """
    return " ".join(str(action) for action in order if action.stage == stage)


def write_turns(order: Sequence[Action], positions: int) -> tuple[str, ...]:
    """Of each position along the axis of stages, the stage of each of its actions, in order.

    >>> write_turns([Action(0, "forward", 0), Action(1, "forward", 0), Action(2, "forward", 0)], 2)
    ('0 2', '1')
    """
    return tuple(" ".join(str(one.stage) for one in order if one.stage % positions == position) for position in range(positions))


def read_order(lines: Sequence[str], turns: Sequence[str] = ()) -> tuple[Action, ...]:
    """The total order of the stages' own orders.

    Args:
        turns: where ranks run several stages, the stages whose turn it is, for each position (see ``write_turns``).

    Raises:
        MismatchError: a word that is no action; turns that are not those of the lines; a stage that waits for ever.
    """
    queues = [[_read(word, stage) for word in line.split()] for stage, line in enumerate(lines)]
    return merge_queues([_take_turns(line, queues, position, len(turns)) for position, line in enumerate(turns)] if turns else queues)


def merge_queues(queues: Sequence[Sequence[Action]]) -> tuple[Action, ...]:
    """One total order of the actions of each position: in turn each goes as far as it can.

    Raises:
        MismatchError: a stage that waits for ever.
    """
    last = max((action.stage for queue in queues for action in queue), default=0)
    found, waiting = merge_lines(queues, lambda action: _needs(action, last))
    if waiting:
        raise MismatchError(f"stage {waiting[0].stage} waits for ever before {waiting[0]}", "order forward before backward, stage by stage")
    return tuple(found)


def _take_turns(line: str, queues: Sequence[Sequence[Action]], position: int, positions: int) -> list[Action]:
    """The actions of the stages at a position, each when it is its turn."""
    mine = {str(stage): iter(queues[stage]) for stage in range(position, len(queues), positions)}
    found = [next(mine[word], None) if word in mine else None for word in line.split()]
    taken = [action for action in found if action is not None]
    if len(taken) < len(found) or any(next(rest, None) is not None for rest in mine.values()):
        message = f"the turns of position {position} are not those of the actions of stages {', '.join(mine)}"
        raise MismatchError(message, "name each stage once for each of its actions")
    return taken


def _needs(action: Action, last: int) -> Iterator[Action]:
    """The actions that must be over before one begins: those of the neighbours, whatever crosses. ``last`` is the last stage."""
    stage, part, number = action
    if part == "forward":
        if stage:
            yield Action(stage - 1, "forward", number)
        return
    yield Action(stage, "forward" if part == "backward" else "backward", number)
    if part == "backward" and stage < last:
        yield Action(stage + 1, "backward", number)


def _read(word: str, stage: int) -> Action:
    if word[:1] not in PARTS or not (word[1:].isascii() and word[1:].isdigit()):
        hint = "write F0 for forward of microbatch 0, B0 for its backward, W0 for its gradients of weights"
        raise MismatchError(f"{word[:20]!r} is no action of a timetable", hint)
    return Action(stage, PARTS[word[0]], int(word[1:]))


def problems_of(order: Sequence[Action], stages: Stages, microbatches: int) -> Iterator[str]:
    """What makes a total order illegal, in words; nothing for a legal one.

    Each action stands once; microbatches of each part of a stage rise; what an action reads is made by one that stands before it. Stages
    with an action for gradients of weights have one for each microbatch.
    """
    split = stages_split(order)
    wanted = {
        Action(stage, part, number)
        for stage in range(len(stages.graphs)) for part in LETTERS if part != "weights" or stage in split
        for number in range(microbatches)
    }  # fmt: skip
    if len(order) != len(set(order)) or set(order) != wanted:
        yield "not every action stands once"
        return
    place = {action: index for index, action in enumerate(order)}
    for action in order:
        if action.microbatch and place[action._replace(microbatch=action.microbatch - 1)] > place[action]:
            yield f"{action} of stage {action.stage} stands before the microbatch ahead of it"
        if action.part == "backward" and place[action._replace(part="forward")] > place[action]:
            yield f"{action} of stage {action.stage} stands before its forward"
        if action.part == "weights":
            if place[action._replace(part="backward")] > place[action]:
                yield f"{action} of stage {action.stage} stands before its backward"
            continue
        for one in stages.received(action.stage, action.part):
            if place[Action(one.source, one.half, action.microbatch)] > place[action]:
                yield f"{action} of stage {action.stage} reads {one.tensor}, which stage {one.source} sends later"


def stages_split(order: Sequence[Action]) -> frozenset[int]:
    """The stages that make gradients of weights in actions of their own."""
    return frozenset(action.stage for action in order if action.part == "weights")
