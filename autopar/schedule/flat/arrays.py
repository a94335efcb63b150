"""The arrays of a list: what stays as it is whatever the order of its instructions and whichever calls share a bucket, asked once.

Each part of a collective is a *slot*, whether it is a call of its own or shares one. Its start has number ``2 * slot``, its wait the next;
all other instructions have the numbers behind those. Of slots that share a call one is the *leader*, and its start and wait are the
call's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from autopar.rules import stores, why_once
from autopar.schedule.bucketing import JOINED
from autopar.schedule.collectives import Collective, Part
from autopar.schedule.freeing import staying
from autopar.schedule.instructions import COMPUTE, Instruction
from autopar.schedule.liveness import held_throughout, resting
from autopar.schedule.reusing import made_for_good, may_take
from autopar.schedule.schedule import Schedule
from cost_models import Machine
from cost_models.collectives import KINDS
from solvers.arrays import Floats, Ints, offsets

LARGE = 2**40
"""Bytes of which nothing but their number counts."""
ALONE = -1
"""The class of what never shares a call."""


class Rows(NamedTuple):
    """Some numbers for each of a count: those of ``one`` are ``entries[begins[one] : begins[one + 1]]``."""

    begins: Ints
    entries: Ints


class Slots(NamedTuple):
    """What is known of each slot.

    Args:
        classes: those of one class may share a call; ``ALONE``.
        latency, beyond: seconds of a call of it alone, in its latency and what it takes more.
        launch, slope: seconds of copies in a buffer or out of one: the least, and for each byte.
        sent, came, target: bytes as it travels, as it arrives, and of its target.
        packs, unpacks: 1 where a call of it alone copies its sources into a buffer, and its targets out of one.
        gathers, reduces: 1 for an all-gather, and for an all-reduce.
        late: 1 where nobody waits for it.
        storage, source: of its target where that does not lie in a buffer with others, and of its source.
        in_place: 1 where a call of it alone reduces its source where it lies.
    """

    classes: Ints
    latency: Floats
    beyond: Floats
    launch: Floats
    slope: Floats
    sent: Ints
    came: Ints
    target: Ints
    packs: Ints
    unpacks: Ints
    gathers: Ints
    reduces: Ints
    late: Ints
    storage: Ints
    source: Ints
    in_place: Ints


class Items(NamedTuple):
    """What is known of each instruction, by number.

    Args:
        half: 1 for those of backward.
        first: the microbatch from which it runs.
        works: 1 for what operators do.
        seconds: of those.
        links: those it holds, as bits: of a start its call's.
        before, after: the instructions that it must follow and precede.
        needs: the storages that are needed until then.
        makes: and those that begin to be there; of calls their targets'.
        takes: the storages that its result may lie over, in the order in which they are asked.
        workspace: bytes while it runs.
    """

    half: Ints
    first: Ints
    works: Ints
    seconds: Floats
    links: Ints
    before: Rows
    after: Rows
    needs: Rows
    makes: Rows
    takes: Rows
    workspace: Ints


class Storages(NamedTuple):
    """The memory that values lie in, as long as nothing is written over.

    Args:
        bytes: of each.
        entered, stays: 1 for those that are there from the beginning, and for those that are never given back.
        resting: bytes that are there throughout.
    """

    bytes: Ints
    entered: Ints
    stays: Ints
    resting: int


class Flat(NamedTuple):
    """A list.

    Args:
        flying: of each slot the slots whose targets its start may read in flight.
        rounds: pairs of a microbatch, and for how many what runs up to it is run.
        link_count: how many links there are.
        slowdown, overlaps: the hardware's ``overlap_slowdown`` and ``launch_overlaps``.
    """

    items: Items
    slots: Slots
    storages: Storages
    flying: Rows
    rounds: Ints
    link_count: int
    slowdown: float
    overlaps: bool


class Order(NamedTuple):
    """The order of a list and who shares a call: what moves change.

    Args:
        items: the numbers of what runs, the first ``length[0]`` of them.
        leader: of each slot the one whose call it shares.
        following: of each slot the next that shares its call, -1 behind the last.
    """

    items: Ints
    length: Ints
    leader: Ints
    following: Ints


def flat(schedule: Schedule, optimizer: str) -> tuple[Flat, Order, list[Instruction]]:
    """The arrays of a list in which everything has its place, and nothing says yet where memory comes from and when it goes; the order
    that it has; and the instructions by number, of slots those of their calls."""
    parts = [(call, part) for call in schedule.calls for part in call.parts]
    slots = {part.target: number for number, (_, part) in enumerate(parts)}
    leaders = {call.id: slots[call.parts[0].target] for call in schedule.calls}
    items, order = [Instruction(-1, "free", "forward")] * (2 * len(parts)), list[int]()
    for item in schedule.instructions:
        if item.kind in ("start", "wait"):
            waits = item.kind == "wait"
            for part in schedule.collectives[item.of].parts:
                items[2 * slots[part.target] + waits] = item
            order.append(2 * leaders[item.of] + waits)
        else:
            order.append(len(items))
            items.append(item)
    made = _Arrays(schedule, optimizer, items, slots)
    room = np.zeros(len(items), dtype=np.int64)
    room[: len(order)] = order
    leader, following = np.arange(len(parts)), np.full(len(parts), -1, dtype=np.int64)
    for call in schedule.calls:
        shared = [slots[part.target] for part in call.parts]
        leader[shared] = shared[0]
        following[shared[:-1]] = shared[1:]
    return made.flat(parts), Order(room, np.array([len(order)]), leader, following), items


def ints(values: Iterable[float]) -> Ints:
    return np.array(list(values), dtype=np.int64)


def rows(found: Iterable[Iterable[int]]) -> Rows:
    lists = [list(row) for row in found]
    return Rows(offsets([len(row) for row in lists]), ints(one for row in lists for one in row))


class _Arrays:
    """The arrays in the making.

    Args:
        items: by number.
        slots: by target.
    """

    def __init__(self, schedule: Schedule, optimizer: str, items: Sequence[Instruction], slots: Mapping[str, int]) -> None:
        self.schedule, self.optimizer, self.items, self.slots = schedule, optimizer, items, slots
        self.ends = [(part.source, part.target) for call in schedule.calls for part in call.parts]
        self.root = schedule.stored(apart=True)
        self.place = {name: number for number, name in enumerate(dict.fromkeys(self.root.values()))}

    def flat(self, parts: Sequence[tuple[Collective, Part]]) -> Flat:
        schedule, items = self.schedule, self.items
        hardware = schedule.machine.hardware
        links = sorted({stream for item in items for stream in item.streams if stream != COMPUTE})
        before = self._before()
        after: list[list[int]] = [[] for _ in items]
        for number, earlier in enumerate(before):
            for other in earlier:
                after[other].append(number)
        works = [item.kind in ("run", "add") for item in items]
        return Flat(
            Items(
                ints(item.half == "backward" for item in items), ints(item.microbatch for item in items), ints(works),
                np.array([item.seconds * work for item, work in zip(items, works, strict=True)]),
                ints(sum(1 << links.index(link) for link in item.streams if link != COMPUTE) for item in items), rows(before), rows(after),
                rows(map(self._needs, range(len(items)))), rows(map(self._makes, range(len(items)))), rows(map(self._takes, items)),
                ints(map(self._workspace, items)),
            ),
            self._slots(parts), self._storages(), rows([self.slots[part.source]] if part.source in self.slots else [] for _, part in parts),
            ints(number for times, some in schedule.rounds for number in (max((item.microbatch for item in some), default=0), times)),
            len(links), hardware.overlap_slowdown, hardware.launch_overlaps,
        )  # fmt: skip

    def _slots(self, parts: Sequence[tuple[Collective, Part]]) -> Slots:
        machine, classes, copying = self.schedule.machine, dict[object, int](), dict[str, tuple[float, float]]()
        table = []
        for slot, (call, part) in enumerate(parts):
            item, alone = self.items[2 * slot], Collective(part.target, (part,), call.in_place)
            key = item.half, item.stage, item.microbatch, call.kind, call.axes, call.reduction, call.dtype, call.late
            latency = machine.latency_seconds(call.kind, call.axes)
            if call.dtype not in copying:
                copying[call.dtype] = _copying(machine, call.dtype)
            table.append((
                classes.setdefault(key, len(classes)) if call.kind in JOINED else ALONE, latency, max(part.step.seconds - latency, 0.0),
                *copying[call.dtype], part.sent_bytes, part.came_bytes, part.target_bytes, alone.packs, alone.unpacks,
                KINDS[call.kind].role == "gather", KINDS[call.kind].in_place, part.late, self.place[self.root[part.target]],
                self.place[self.root[part.source]], call.in_place,
            ))  # fmt: skip
        columns = zip(*table, strict=True) if table else [()] * len(Slots._fields)
        floats = {"latency", "beyond", "launch", "slope"}
        dtypes = [np.float64 if name in floats else np.int64 for name in Slots._fields]
        return Slots._make(np.array(column, dtype=dtype) for column, dtype in zip(columns, dtypes, strict=True))

    def _storages(self) -> Storages:
        schedule, graph = self.schedule, self.schedule.graph
        parameters = held_throughout(schedule)
        entered = {item.tensor: graph.parts(item.tensor) * schedule.local_bytes(item.tensor) for item in graph.inputs}
        entered |= {name: schedule.local_bytes(name) for name in schedule.sums}
        kept = {self.root[value] for value in staying(schedule) if value in self.root}
        sizes = [0 if name in parameters else entered[name] if name in entered else schedule.values[name].bytes for name in self.place]
        comes, stays = ints(name in entered for name in self.place), ints(name in kept for name in self.place)
        return Storages(ints(sizes), comes, stays, resting(schedule, self.optimizer))

    def _values(self, number: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """What an instruction reads and writes; of a call what the slot does."""
        if number >= 2 * len(self.ends):
            return self.items[number].reads, self.items[number].writes
        source, target = self.ends[number // 2]
        return (() if number % 2 else (source,)), (target,)

    def _lie(self, values: Iterable[str]) -> list[int]:
        return list(dict.fromkeys(self.place[self.root[value]] for value in values))

    def _needs(self, number: int) -> list[int]:
        reads, writes = self._values(number)
        return self._lie((*reads, *writes))

    def _makes(self, number: int) -> list[int]:
        return self._lie(self._values(number)[1])

    def _takes(self, item: Instruction) -> list[int]:
        schedule, maker = self.schedule, self.maker
        mine = [value for value in may_take(schedule, item) if value in maker and self.root[value] == value]
        return [self.place[value] for value in mine if made_for_good(schedule, maker[value], item)]

    @cached_property
    def maker(self) -> Mapping[str, Instruction]:
        """The operator that makes each value."""
        return {value: item for item in self.items if item.kind == "run" for value in item.writes}

    def _workspace(self, item: Instruction) -> int:
        return self.schedule.operations[item.of].strategy.workspace if item.kind == "run" else 0

    def _before(self) -> list[list[int]]:
        """For each instruction those that it must follow: who makes what it reads, and starts what it waits for; of memory that is changed
        where it lies, who needs it as it was, or as it is then; and of what nobody may run twice, the one before."""
        changes = [self._changes(item) for item in self.items]
        mutable = {storage for storage in changes if storage is not None}
        made, flying, last, since = dict[str, int](), dict[str, int](), dict[str, int](), dict[str, list[int]]()
        once, found = -1, list[list[int]]([] for _ in self.items)
        for number in self._in_order():
            item, earlier = self.items[number], set[int]()
            reads, writes = self._values(number)
            for value in reads:
                if item.kind == "start" and value in flying:
                    earlier.add(flying[value])
                elif value in made:
                    earlier.add(made[value])
            if item.kind == "wait":
                earlier.add(number - 1)
            sources = (self.ends[number // 2][0],) if item.kind == "wait" else ()
            for storage in {self.root[value] for value in (*reads, *writes, *sources)} & mutable:
                if storage in last:
                    earlier.add(last[storage])
                since.setdefault(storage, []).append(number)
            changed = changes[number]
            if changed is not None:
                earlier.update(since[changed])
                last[changed], since[changed] = number, [number]
            if item.kind == "run" and why_once(self.schedule.operations[item.of].op):
                earlier.update([once] if once >= 0 else ())
                once = number
            (flying if item.kind == "start" else made).update(dict.fromkeys(writes, number))
            found[number] = sorted(earlier - {number})
        return found

    def _changes(self, item: Instruction) -> str | None:
        """The storage that an instruction changes where it lies."""
        if item.kind == "run" and stores(self.schedule.operations[item.of].op):
            return self.root[item.reads[0]]
        return self.root[item.over] if item.over else None

    def _in_order(self) -> Iterator[int]:
        """The numbers of the instructions as they stand in the list, of each call those of all its slots."""
        other = 2 * len(self.ends)
        for item in self.schedule.instructions:
            if item.kind in ("start", "wait"):
                for part in self.schedule.collectives[item.of].parts:
                    yield 2 * self.slots[part.target] + (item.kind == "wait")
            else:
                yield other
                other += 1


def _copying(machine: Machine, dtype: str) -> tuple[float, float]:
    """Seconds of copies, the least and for each byte."""
    least, large = machine.copy_seconds(1, dtype), machine.copy_seconds(LARGE, dtype)
    if machine.hardware.launch_overlaps:
        return least, large / LARGE
    slope = (large - least) / (LARGE - 1)
    return least - slope, slope
