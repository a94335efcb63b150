"""What lives when: the peak bytes of a rank under a schedule.

Every instruction takes and gives back what ``Collective`` and the views among operators say; parameters, buffers and optimizer states are
there throughout. Of several microbatches the last holds most: it has the sums of gradients beside it and makes of them what leaves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import nsmallest

from autopar.graph import DTYPE_BYTES
from autopar.schedule.freeing import storage_bytes
from autopar.schedule.instructions import Schedule
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


def memory(schedule: Schedule, optimizer: str) -> Memory:
    """Peak over forward, backward and the optimizer's step."""
    graph = schedule.graph
    parameters = {i.tensor: schedule.local_bytes(i.tensor) for i in graph.inputs if i.kind in ("parameter", "buffer", "constant")}
    trained = [(name, graph.tensors[name].dtype) for name in graph.stepped]
    states = sum(optimizer_bytes(optimizer, schedule.local_bytes(name) // DTYPE_BYTES[dtype], dtype) for name, dtype in trained)
    leaving = {schedule.storage[value] for output, value in schedule.outputs if output.kind == "gradient"}
    gradients = (leaving | set(schedule.sums)) - set(parameters)
    entering = {name: size for name, size in _entering(schedule).items() if name not in parameters}
    changes = list(_changes(schedule))
    live, total = dict(entering), sum(entering.values())
    levels = []
    for _, taken, given in changes:
        if taken:
            live |= taken
            total += sum(taken.values())
        levels.append(total)
        for root in given:
            total -= live.pop(root)
    levels.append(total)
    best = max(levels)
    index, at_peak = levels.index(best), entering
    for number, taken, given in changes[: index + 1]:
        at_peak |= taken
        for root in given if number < index else ():
            del at_peak[root]
    held = sum(size for root, size in at_peak.items() if root.startswith(STAGING))
    grads = sum(size for root, size in at_peak.items() if root in gradients)
    resting = sum(parameters.values())
    where = schedule.instructions[index].of if 0 <= index < len(schedule.instructions) else "the optimizer's step"
    biggest = nsmallest(NAMED, ((-size, name) for name, size in {**at_peak, **parameters}.items()))
    return Memory(
        best + resting + states, resting, grads, states, sum(at_peak.values()) - grads - held, held, where,
        tuple((name, -size) for size, name in biggest),
    )  # fmt: skip


def held(schedule: Schedule, optimizer: str) -> list[int]:
    """Bytes of a rank while each instruction runs, in their order: parameters and optimizer states with all that lives."""
    graph = schedule.graph
    trained = [(name, graph.tensors[name].dtype) for name in graph.stepped]
    total = sum(optimizer_bytes(optimizer, schedule.local_bytes(name) // DTYPE_BYTES[dtype], dtype) for name, dtype in trained)
    live = _entering(schedule)
    total += sum(live.values())
    found = []
    for _, taken, given in _changes(schedule):
        live |= taken
        total += sum(taken.values())
        found.append(total)
        total -= sum(live.pop(root) for root in given)
    return found


def between(schedule: Schedule, optimizer: str) -> int:
    """Bytes of a rank between forward and backward: what rests, what came in, and what forward makes for backward or for the caller. In no
    order is less held at the peak, so that what ``ordered`` makes tells it before any pass."""
    graph, root = schedule.graph, schedule.storage
    trained = [(name, graph.tensors[name].dtype) for name in graph.stepped]
    states = sum(optimizer_bytes(optimizer, schedule.local_bytes(name) // DTYPE_BYTES[dtype], dtype) for name, dtype in trained)
    made = {value for item in schedule.instructions if item.half == "forward" for value in item.writes}
    wanted = {value for item in schedule.instructions if item.half == "backward" for value in item.reads}
    wanted.update(value for _, value in schedule.outputs)
    entering = _entering(schedule)
    kept = {root[value] for value in made & wanted} - entering.keys()
    return states + sum(entering.values()) + sum(storage_bytes(schedule, name) for name in kept)


def _entering(schedule: Schedule) -> dict[str, int]:
    """What is there from the beginning of the last microbatch on: what came in, of cut inputs for all microbatches, and the sums."""
    graph = schedule.graph
    found = {item.tensor: graph.parts(item.tensor) * schedule.local_bytes(item.tensor) for item in graph.inputs}
    return found | {name: schedule.local_bytes(name) for name in schedule.sums}


STAGING = "staging of "
"""Names the buffers of a collective in flight, and what an operator holds beside its results while it runs."""


def _changes(schedule: Schedule) -> Iterator[tuple[int, dict[str, int], list[str]]]:
    """For each instruction: its index, the storages it takes with their bytes, and those given back after it."""
    root = schedule.storage
    alive = dict.fromkeys(_entering(schedule), 1)
    seen: set[str] = set(schedule.sums)
    for index, item in enumerate(schedule.instructions):
        taken: dict[str, int] = {}
        given: list[str] = []
        for value in item.reads if item.kind == "free" else ():
            alive[root[value]] -= 1
            if not alive[root[value]]:
                given.append(root[value])
        call = schedule.collectives[item.of] if item.kind in ("start", "wait") else None
        for value in () if item.kind == "start" and call is not None and call.unpacks else item.writes:
            if value not in seen:
                seen.add(value)
                alive[root[value]] = alive.get(root[value], 0) + 1
                if alive[root[value]] == 1:
                    taken[root[value]] = storage_bytes(schedule, root[value])
        if item.kind == "run" and schedule.operations[item.of].strategy.workspace:
            taken[STAGING + item.of] = schedule.operations[item.of].strategy.workspace
            given.append(STAGING + item.of)
        if call is not None and call.staging_bytes:
            if item.kind == "start":
                taken[STAGING + call.id] = call.staging_bytes
            else:
                given.append(STAGING + call.id)
        yield index, taken, given
