"""Timetable: one total order of actions. Each rank runs those of its stage, in that order.

That one order exists is the proof that nothing waits for ever: the first unfinished action has all that it reads, also where a sender
waits for its receiver.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from autopar.errors import MismatchError
from autopar.graph import Phase
from autopar.pipeline.cutting import Stages


class Action(NamedTuple):
    """Forward or backward of one microbatch in one stage."""

    stage: int
    half: Phase
    microbatch: int

    def __str__(self) -> str:
        return f"{'F' if self.half == 'forward' else 'B'}{self.microbatch}"


def write_order(order: Sequence[Action], stage: int) -> str:
    """A stage's actions in words.

    >>> write_order([Action(0, "forward", 0), Action(1, "forward", 0), Action(0, "backward", 0)], 0)
    'F0 B0'
    """
    return " ".join(str(action) for action in order if action.stage == stage)


def read_order(lines: Sequence[str]) -> tuple[Action, ...]:
    """The total order of the stages' own orders: in turn each stage goes as far as it can.

    Raises:
        MismatchError: a word that is no action; a stage that waits for ever.
    """
    queues = [[_read(word, stage) for word in line.split()] for stage, line in enumerate(lines)]
    done, found, at = set[Action](), list[Action](), [0] * len(queues)
    moved = True
    while moved:
        moved = False
        for stage, queue in enumerate(queues):
            while at[stage] < len(queue) and done.issuperset(_needs(queue[at[stage]], len(queues))):
                done.add(queue[at[stage]])
                found.append(queue[at[stage]])
                at[stage] += 1
                moved = True
    for stage, (queue, place) in enumerate(zip(queues, at, strict=True)):
        if place < len(queue):
            raise MismatchError(f"stage {stage} waits for ever before {queue[place]}", "order forward before backward, stage by stage")
    return tuple(found)


def _needs(action: Action, count: int) -> Iterator[Action]:
    """The actions that must be over before one begins: those of the neighbours, whatever crosses."""
    stage, half, number = action
    if half == "forward":
        if stage:
            yield Action(stage - 1, "forward", number)
        return
    yield Action(stage, "forward", number)
    if stage + 1 < count:
        yield Action(stage + 1, "backward", number)


def _read(word: str, stage: int) -> Action:
    if word[:1] not in ("F", "B") or not (word[1:].isascii() and word[1:].isdigit()):
        raise MismatchError(f"{word[:20]!r} is no action of a timetable", "write F0 for forward of microbatch 0, B0 for its backward")
    return Action(stage, "forward" if word[0] == "F" else "backward", int(word[1:]))


def problems_of(order: Sequence[Action], stages: Stages, microbatches: int) -> Iterator[str]:
    """What makes a total order illegal, in words; nothing for a legal one.

    Each action stands once; microbatches of each half of a stage rise; what an action reads is made by one that stands before it.
    """
    wanted = {Action(stage, half, number) for stage in range(len(stages.graphs)) for half in _HALVES for number in range(microbatches)}
    if len(order) != len(set(order)) or set(order) != wanted:
        yield "not every action stands once"
        return
    place = {action: index for index, action in enumerate(order)}
    for action in order:
        if action.microbatch and place[action._replace(microbatch=action.microbatch - 1)] > place[action]:
            yield f"{action} of stage {action.stage} stands before the microbatch ahead of it"
        if action.half == "backward" and place[action._replace(half="forward")] > place[action]:
            yield f"{action} of stage {action.stage} stands before its forward"
        for one in stages.received(action.stage, action.half):
            if place[Action(one.source, one.half, action.microbatch)] > place[action]:
                yield f"{action} of stage {action.stage} reads {one.tensor}, which stage {one.source} sends later"


_HALVES: tuple[Phase, Phase] = ("forward", "backward")
