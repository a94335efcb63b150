"""The timetable: for each device the order of its operations, what makes orders legal, and the one total order behind them.

An operation is a kind (F, B or W) and a chunk. The n-th of an operation in a device's order is microbatch n, so that transfers of a
boundary arrive in the order in which they are sent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from ..errors import ProblemError
from .problem import Mode, PipelineProblem

One = TypeVar("One")


@dataclass(frozen=True, order=True)
class Operation:
    """A kind of work, ``F``, ``B`` or ``W``, of a chunk.

    >>> str(Operation("F", 2)), Operation.parse("B10")
    ('F2', Operation(kind='B', chunk=10))
    """

    kind: str
    chunk: int

    def __str__(self) -> str:
        return f"{self.kind}{self.chunk}"

    @staticmethod
    def parse(text: str) -> Operation:
        """Read ``F0``. Raises ProblemError for other text."""
        if text[:1] not in ("F", "B", "W") or not (text[1:].isascii() and text[1:].isdigit()):
            raise ProblemError(f"{text[:20]!r} is no operation", "write the kind F, B or W and the chunk, such as F0")
        return Operation(text[0], int(text[1:]))


@dataclass(frozen=True, order=True)
class Action:
    """An operation for one microbatch."""

    kind: str
    chunk: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.chunk}.{self.microbatch}"


@dataclass(frozen=True)
class PipelinePlan:
    """An answer: layers of each chunk in model order [n], the mode of each layer [L], the order of each device [p]."""

    cut: tuple[int, ...]
    modes: tuple[int, ...]
    orders: tuple[tuple[Operation, ...], ...]

    def chunk_costs(self, problem: PipelineProblem) -> tuple[Mode, ...]:
        """Seconds and bytes of each chunk, summed over its layers, shape [n]."""
        begin, costs = 0, []
        for layers in self.cut:
            chosen = [problem.costs[at][self.modes[at]] for at in range(begin, begin + layers)]
            costs.append(sum(chosen, Mode()))
            begin += layers
        return tuple(costs)


def parse_orders(lines: list[str]) -> tuple[tuple[Operation, ...], ...]:
    """Orders from one text a device.

    >>> [len(line) for line in parse_orders(["F0 F0 B0 B0", "F1 B1 F1 B1"])]
    [4, 4]
    """
    return tuple(tuple(map(Operation.parse, line.split())) for line in lines)


def numbered(line: tuple[Operation, ...]) -> list[Action]:
    """A device's order with the microbatch of each operation."""
    seen: Counter[Operation] = Counter()
    actions = []
    for operation in line:
        actions.append(Action(operation.kind, operation.chunk, seen[operation]))
        seen[operation] += 1
    return actions


def needs(problem: PipelineProblem, action: Action) -> list[Action]:
    """The actions that an action reads from."""
    c, n = action.chunk, action.microbatch
    if action.kind == "F":
        return [Action("F", c - 1, n)] if c > 0 else []
    if action.kind == "W":
        return [Action("B", c, n)]
    return [Action("F", c, n), *([Action("B", c + 1, n)] if c < problem.total_chunks - 1 else [])]


def merge_orders(problem: PipelineProblem, plan: PipelinePlan) -> tuple[list[Action], list[Action]]:
    """A total order that holds each device's order, and the actions that devices wait for ever to begin: none for legal orders.

    That such an order exists proves that no device waits for ever, also where a sender waits for its receiver: the first unfinished action
    has all that it needs.
    """
    return merge_lines([numbered(line) for line in plan.orders], partial(needs, problem))


def merge_lines(lines: Sequence[Sequence[One]], needed: Callable[[One], Iterable[One]]) -> tuple[list[One], list[One]]:
    """Merge lines, each in turn as far as what is ``needed`` allows, into one order, and the first that wait for ever."""
    at, done, total, moved = [0] * len(lines), set[One](), list[One](), True
    while moved:
        moved = False
        for number, line in enumerate(lines):
            while at[number] < len(line) and done.issuperset(needed(line[at[number]])):
                total.append(line[at[number]])
                done.add(line[at[number]])
                at[number] += 1
                moved = True
    return total, [line[place] for line, place in zip(lines, at, strict=True) if place < len(line)]


Violations = Iterator[str]


def check_legal(problem: PipelineProblem, plan: PipelinePlan) -> PipelinePlan:
    """Checks a plan and returns it. Raises ProblemError with the first predicate of ``PREDICATES`` that does not hold."""
    for rule, predicate in PREDICATES:
        for what in predicate(problem, plan):
            raise ProblemError(what, f"the rule is: {rule}")
    return plan


def _whole_cut(problem: PipelineProblem, plan: PipelinePlan) -> Violations:
    layers, chunks = len(problem.layers), problem.total_chunks
    if len(plan.cut) != chunks or sum(plan.cut) != layers or min(plan.cut, default=0) < 1:
        yield f"the cut {list(plan.cut)} does not lay {layers} layers into {chunks} chunks"


def _known_modes(problem: PipelineProblem, plan: PipelinePlan) -> Violations:
    if len(plan.modes) != len(problem.layers):
        yield f"there are {len(plan.modes)} modes for {len(problem.layers)} layers"
    for number, (mode, modes) in enumerate(zip(plan.modes, problem.layers, strict=False)):
        if not 0 <= mode < len(modes):
            yield f"layer {number} has {len(modes)} modes, mode {mode} is none of them"


def _each_once(problem: PipelineProblem, plan: PipelinePlan) -> Violations:
    if len(plan.orders) != problem.devices:
        yield f"there are {len(plan.orders)} orders for {problem.devices} devices"
    for device, line in enumerate(plan.orders):
        counts = Counter(line)
        for chunk in range(problem.total_chunks):
            for kind in problem.kinds:
                wanted = problem.microbatches if problem.places[chunk] == device else 0
                found = counts.pop(Operation(kind, chunk), 0)
                if found != wanted:
                    yield f"device {device} runs {kind}{chunk} {found} times, not {wanted}"
        for other in counts:
            yield f"device {device} runs {other}, which is no operation of this problem"


def _forward_first(problem: PipelineProblem, plan: PipelinePlan) -> Violations:
    for device, line in enumerate(plan.orders):
        done = set[Action]()
        for action in numbered(line):
            before = {"B": "F", "W": "B"}.get(action.kind)
            if before is not None and Action(before, action.chunk, action.microbatch) not in done:
                yield f"device {device} runs {action} before its {before}"
            done.add(action)


def _one_order(problem: PipelineProblem, plan: PipelinePlan) -> Violations:
    _, waiting = merge_orders(problem, plan)
    if waiting:
        yield f"the orders wait for one another for ever, {' and '.join(map(str, waiting))} among them"


def _within_limit(problem: PipelineProblem, plan: PipelinePlan) -> Violations:
    costs = plan.chunk_costs(problem)
    for device, line in enumerate(plan.orders):
        held = sum(cost.rest for cost, place in zip(costs, problem.places, strict=True) if place == device)
        for action in (None, *numbered(line)):
            if action is not None and action.kind == "F" and problem.training:
                held += costs[action.chunk].held
            if problem.limit is not None and held > 2 * problem.most_bytes - problem.limit:
                yield f"device {device} holds {held:g} bytes at {action or 'rest'}, more than {problem.limit:g}"
            if action is not None and action.kind == problem.kinds[-1] and problem.training:
                held -= costs[action.chunk].held


PREDICATES: tuple[tuple[str, Callable[[PipelineProblem, PipelinePlan], Violations]], ...] = (
    ("the cut gives each chunk at least one layer, and lays all of them", _whole_cut),
    ("each layer has one of its modes", _known_modes),
    ("each device runs each of its operations once a microbatch, and no other", _each_once),
    ("F of a chunk and microbatch comes before B, and B before W", _forward_first),
    ("there is one total order of which each device's order is a part", _one_order),
    ("no device holds more than the limit at any time", _within_limit),
)
"""What makes a plan legal; later ones may assume earlier ones."""
