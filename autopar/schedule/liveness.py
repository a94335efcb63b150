"""What lives when: the peak bytes of a rank under a schedule.

Every instruction takes and gives back what ``Collective`` and the views among operators say; parameters, buffers and optimizer states are
there throughout. Of several microbatches the last holds most: it has the sums of gradients beside it and makes of them what leaves.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from heapq import nsmallest
from itertools import accumulate
from typing import NamedTuple

from autopar.graph import DTYPE_BYTES
from autopar.schedule.freeing import last_needs, staying, storage_bytes
from autopar.schedule.schedule import Schedule
from cost_models import optimizer_bytes

NAMED = 10
"""So many of the largest items at the peak are named."""


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank at the moment of the peak; ``biggest`` names the largest items there, ``at`` what runs at the peak."""

    peak: int
    parameters: int
    gradients: int
    optimizer: int
    activations: int
    temporaries: int
    at: str
    biggest: tuple[tuple[str, int], ...]

    @property
    def resting(self) -> int:
        """What is there throughout: parameters and optimizer states."""
        return self.parameters + self.optimizer


class Lifetime(NamedTuple):
    """What takes memory on a rank beside what rests: its name, its bytes, and the first and last instruction during which it is there, from
    -1, before all of them, to their number, after them."""

    name: str
    bytes: int
    begin: int
    end: int


def memory(schedule: Schedule, optimizer: str) -> Memory:
    """Peak over forward, backward and the optimizer's step. Every value goes after the last instruction that needs it, whether the list
    says so already (``free``) or not."""
    parameters, states = held_throughout(schedule), _states(schedule, optimizer)
    leaving = {schedule.storage[value] for output, value in schedule.outputs if output.kind == "gradient"}
    gradients = (leaving | set(schedule.sums)) - set(parameters)
    lives = [life for life in lifetimes(schedule) if life.name not in parameters]
    levels = _levels(schedule, lives)
    best = max(levels)
    index = levels.index(best)
    at_peak = {life.name: life.bytes for life in lives if life.begin <= index <= life.end}
    staged = sum(size for name, size in at_peak.items() if name.startswith(STAGING))
    grads = sum(size for name, size in at_peak.items() if name in gradients)
    where = schedule.instructions[index].of if index < len(schedule.instructions) else "the optimizer's step"
    biggest = nsmallest(NAMED, ((-size, name) for name, size in {**at_peak, **parameters}.items()))
    return Memory(
        best + resting(schedule, optimizer), sum(parameters.values()), grads, states, best - grads - staged, staged, where,
        tuple((name, -size) for size, name in biggest),
    )  # fmt: skip


def held_throughout(schedule: Schedule) -> dict[str, int]:
    """The parameters, buffers and constants, with their bytes on a rank."""
    kinds = ("parameter", "buffer", "constant")
    return {item.tensor: schedule.local_bytes(item.tensor) for item in schedule.graph.inputs if item.kind in kinds}


def resting(schedule: Schedule, optimizer: str) -> int:
    """Bytes of a rank that are there throughout: those, and the optimizer's states."""
    return sum(held_throughout(schedule).values()) + _states(schedule, optimizer)


def held(schedule: Schedule, optimizer: str) -> list[int]:
    """Bytes of a rank while each instruction runs, in their order: parameters and optimizer states with all that lives."""
    states = _states(schedule, optimizer)
    return [level + states for level in _levels(schedule, lifetimes(schedule))[:-1]]


def lifetimes(schedule: Schedule) -> list[Lifetime]:
    """When each storage, each buffer of a collective in flight and each workspace is there."""
    root, last, count = schedule.storage, last_needs(schedule), len(schedule.instructions)
    entering = _entering(schedule)
    begins, ends = dict.fromkeys(entering, -1), dict[str, int]()
    staged, found = dict[str, int](), list[Lifetime]()
    for index, item in enumerate(schedule.instructions):
        kind = item.kind
        call = schedule.collectives[item.of] if kind == "start" or kind == "wait" else None
        if call is None or kind == "wait" or not call.unpacks:
            for value in item.writes:
                begins.setdefault(root[value], index)
        if call is None:
            workspace = schedule.operations[item.of].strategy.workspace if kind == "run" else 0
            if workspace:
                found.append(Lifetime(STAGING + item.of, workspace, index, index))
        elif kind == "start":
            staged[call.id] = index
        elif call.staging_bytes:
            found.append(Lifetime(STAGING + call.id, call.staging_bytes, staged[call.id], index))
    for value, index in last.items():
        storage = root[value]
        if index > ends.get(storage, -1):
            ends[storage] = index
    for value in staying(schedule):
        ends[root[value]] = count
    for name, begin in begins.items():
        found.append(Lifetime(name, entering[name] if begin < 0 else storage_bytes(schedule, name), begin, ends.get(name, count)))
    return found


def _levels(schedule: Schedule, lives: Iterable[Lifetime]) -> list[int]:
    """Bytes while each instruction runs, and after all of them."""
    changes = [0] * (len(schedule.instructions) + 2)
    for life in lives:
        changes[max(life.begin, 0)] += life.bytes
        changes[life.end + 1] -= life.bytes
    return list(accumulate(changes))[:-1]


def _states(schedule: Schedule, optimizer: str) -> int:
    """Bytes of the optimizer's states."""
    graph = schedule.graph
    trained = ((name, graph.tensors[name].dtype) for name in graph.stepped)
    return sum(optimizer_bytes(optimizer, schedule.local_bytes(name) // DTYPE_BYTES[dtype], dtype) for name, dtype in trained)


def between(schedule: Schedule, optimizer: str) -> int:
    """Bytes of a rank between forward and backward: what rests, what came in, and what forward makes for backward or for the caller. In no
    order is less held at the peak, so that what ``ordered`` makes tells it before any pass."""
    root = schedule.storage
    made = {value for item in schedule.instructions if item.half == "forward" for value in item.writes}
    wanted = {value for item in schedule.instructions if item.half == "backward" for value in item.reads}
    wanted.update(value for _, value in schedule.outputs)
    entering = _entering(schedule)
    kept = {root[value] for value in made & wanted} - entering.keys()
    return _states(schedule, optimizer) + sum(entering.values()) + sum(storage_bytes(schedule, name) for name in kept)


def _entering(schedule: Schedule) -> dict[str, int]:
    """What is there from the beginning of the last microbatch on: what came in, of cut inputs for all microbatches, and the sums."""
    graph = schedule.graph
    found = {item.tensor: graph.parts(item.tensor) * schedule.local_bytes(item.tensor) for item in graph.inputs}
    return found | {name: schedule.local_bytes(name) for name in schedule.sums}


STAGING = "staging of "
"""Names the buffers of a collective in flight, and what an operator holds beside its results while it runs."""
