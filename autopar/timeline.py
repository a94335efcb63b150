"""The simulated timeline of one step: a compute stream and a communication stream. No torch.

The model: operators run on the compute stream in program order, each as soon as what it reads is there; collectives run on the
communication stream in program order, each as soon as its source is there, so that gathers of weights run ahead and reductions of
gradients trail behind the operators around them. An operator with collectives inside holds both streams. Streams do not slow each other
down, and gathering ahead is not limited by memory, so the time is a lower estimate; ``objective.seconds`` has no overlap at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from autopar.plan import CollectivePlan, OpPlan, Plan, ReshardPlan

Stream = Literal["compute", "communication", "both"]


@dataclass(frozen=True)
class Task:
    """One piece of work: the values it waits for, the values it makes, its stream and its seconds."""

    name: str
    stream: Stream
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    seconds: float
    phase: str = "forward"


@dataclass(frozen=True)
class Slot:
    """A task with its place in time, in seconds."""

    task: Task
    begin: float
    end: float


def simulate(tasks: Iterable[Task]) -> tuple[Slot, ...]:
    """When each task runs, in the given order on each stream.

    >>> slots = simulate([Task("gather", "communication", (), ("w",), 2.0), Task("mm", "compute", ("x", "w"), ("y",), 3.0)])
    >>> slots[-1].begin, slots[-1].end
    (2.0, 5.0)
    """
    ready: dict[str, float] = {}
    free = {"compute": 0.0, "communication": 0.0}
    slots = []
    for task in tasks:
        streams = ("compute", "communication") if task.stream == "both" else (task.stream,)
        begin = max([ready.get(value, 0.0) for value in task.reads], default=0.0)
        if task.seconds > 0.0:
            begin = max(begin, *(free[stream] for stream in streams))
            free.update(dict.fromkeys(streams, begin + task.seconds))
        end = begin + task.seconds
        ready.update(dict.fromkeys(task.writes, end))
        slots.append(Slot(task, begin, end))
    return tuple(slots)


def makespan(tasks: Iterable[Task]) -> float:
    """Seconds until the last task ends."""
    return max((slot.end for slot in simulate(tasks)), default=0.0)


def instructions(plan: Plan) -> Iterator[OpPlan | ReshardPlan]:
    """Operators and reshards in execution order: forward first; each reshard just before the operator it is made for, or just after
    the operator whose result it takes out; what it is made from before it."""
    rows = {row.value: row for row in plan.reshards}
    before: dict[str, list[ReshardPlan]] = {}
    for row in plan.reshards:
        before.setdefault(row.before, []).append(row)
    producer = {entry.tensor: op.name for op in plan.ops for entry in op.outputs}
    leaving: dict[str, list[ReshardPlan]] = {}
    for index, (_, _, output) in enumerate(plan.leaving):
        leaving.setdefault(producer.get(output.tensor, ""), []).extend(before.get(f"output:{index}", ()))
    done: set[str] = set()

    def made(row: ReshardPlan) -> Iterator[ReshardPlan]:
        if row.value not in done:
            done.add(row.value)
            if row.source in rows:
                yield from made(rows[row.source])
            yield row

    for row in leaving.get("", ()):
        yield from made(row)
    for phase in ("forward", "backward"):
        for op in plan.ops:
            if op.phase == phase:
                for row in before.get(op.name, ()):
                    yield from made(row)
                yield op
                for row in leaving.get(op.name, ()):
                    yield from made(row)


def plan_tasks(plan: Plan) -> Iterator[Task]:
    """The tasks of a plan, one for each collective and operator."""
    moves: dict[str, list[CollectivePlan]] = {}
    inside: dict[str, float] = {}
    for row in plan.collectives:
        if row.value is None:
            inside[row.before] = inside.get(row.before, 0.0) + row.seconds
        else:
            moves.setdefault(row.value, []).append(row)
    for item in instructions(plan):
        if isinstance(item, OpPlan):
            reads = tuple(entry.value or entry.tensor for entry in item.inputs)
            yield op_task(
                item.name, item.phase, reads, tuple(entry.tensor for entry in item.outputs), item.seconds, inside.get(item.name, 0.0)
            )
        else:
            steps = [(row.kind, row.seconds) for row in moves.get(item.value, ())]
            yield from move_tasks(item.tensor, item.phase, item.source, item.value, steps)


def op_task(name: str, phase: str, reads: tuple[str, ...], writes: tuple[str, ...], seconds: float, inside: float) -> Task:
    """An operator; ``inside`` is the seconds of its own collectives."""
    return Task(name, "both" if inside else "compute", reads, writes, seconds + inside, phase)


def move_tasks(tensor: str, phase: str, source: str, value: str, steps: Sequence[tuple[str, float]]) -> Iterator[Task]:
    """A reshard as a chain of collectives (kind, seconds); without any it is a free slice."""
    if not steps:
        yield Task(f"slice {tensor}", "compute", (source,), (value,), 0.0, phase)
    for number, (kind, seconds) in enumerate(steps):
        read = source if number == 0 else f"{value}#{number}"
        write = value if number == len(steps) - 1 else f"{value}#{number + 1}"
        yield Task(f"{kind} {tensor}", "communication", (read,), (write,), seconds, phase)
