"""free: every value goes as soon as nobody reads it any more."""

from __future__ import annotations

from autopar.schedule.instructions import Instruction, Schedule


def free(schedule: Schedule) -> Schedule:
    """The schedule with a ``free`` after each instruction that is the last to need something, numbered from 0.

    What came in and what leaves is never freed. A call that does not copy its sources needs them until it was waited for.
    """
    last: dict[str, int] = {}
    kept = {item.tensor for item in schedule.graph.inputs} | {value for _, value in schedule.outputs}
    for index, item in enumerate(schedule.instructions):
        for value in item.reads:
            last[value] = index
        for value in item.writes:
            last[value] = index
        if item.kind == "wait":
            call = schedule.collectives[item.of]
            if not call.packs:
                last.update((part.source, index) for part in call.parts)
    ending: dict[int, list[str]] = {}
    for value, index in last.items():
        if value not in kept:
            ending.setdefault(index, []).append(value)
    alive: dict[str, int] = {}
    root = schedule.storage
    for value in last:
        alive[root[value]] = alive.get(root[value], 0) + 1
    found: list[Instruction] = []
    numbered = Instruction._make
    for index, item in enumerate(schedule.instructions):
        found.append(numbered((len(found), *item[1:])))
        if index in ending:
            values = tuple(ending[index])
            back = 0
            for value in values:
                alive[root[value]] -= 1
                if not alive[root[value]]:
                    back += storage_bytes(schedule, root[value])
            found.append(Instruction(len(found), "free", item.phase, reads=values, bytes=back, microbatch=item.microbatch))
    return schedule.freed(tuple(found))


def storage_bytes(schedule: Schedule, root: str) -> int:
    """Bytes of a storage: of the value of that name, or of a collective's buffer."""
    call = schedule.collectives.get(root)
    return call.target_bytes if call is not None and not call.unpacks else schedule.values[root].bytes
