"""A schedule as arrays, for ``kernels``. They are made once for a list; moves then change its order in microseconds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import numpy as np

from autopar.cost_models import Machine
from autopar.cost_models.collectives import CALLS, TRANSFERS
from autopar.rules import stores, why_once
from autopar.schedule.bucketing import bucket_class
from autopar.schedule.collectives import Collective
from autopar.schedule.instructions import BEFORE_ALL, COMPUTE, Instruction
from autopar.schedule.schedule import Schedule
from autopar.schedule.settings import ALONE, LARGE_COPY
from autopar.schedule.storages import entering, held_throughout, made_for_good, may_take, staying
from autopar.schedule.tables import (
    ArraySchedule,
    CallCosts,
    CallTable,
    ClockTable,
    InstructionTable,
    Lives,
    Order,
    Rows,
    StorageTable,
    peak_bytes,
    price_calls,
)  # fmt: skip
from autopar.solvers.arrays import Ints, offsets


class Storages(NamedTuple):
    """When the storages of a list are there.

    Args:
        names: by number: of a value, or of the collective whose buffer it is.
    """

    names: tuple[str, ...]
    lives: Lives


def array_schedule(schedule: Schedule) -> tuple[ArraySchedule, Order, list[Instruction]]:
    """The arrays of a list after ``passes.PLACING``, its order, and its instructions by number: of a slot, those of its call."""
    made = _Arrays(schedule)
    return made.arrays(in_place=True, moves=True), made.order, made.items


def storages_of(schedule: Schedule, *, in_place: bool = False) -> Storages:
    """When the storages of a list are there. Parameters, buffers and constants always are, and count no bytes.

    Args:
        in_place: memory is taken over where it may be, whatever the list says.
    """
    made = _Arrays(schedule)
    arrays, order = made.arrays(in_place=in_place, moves=False), made.order
    lives = lives_for(arrays, order)
    peak_bytes(arrays, order, call_costs(arrays, order), lives)
    makes = arrays.items.makes
    for at in np.flatnonzero(lives.over[: order.length[0]] >= 0).tolist():
        result, home = makes.entries[makes.begins[order.items[at]]], lives.lies[lives.over[at]]
        lives.lies[result], lives.ends[home] = home, lives.ends[result]
    names = list(made.place)
    for call in schedule.calls:
        if not call.unpacks and not call.in_place:
            names[made.place[made.root[call.parts[0].target]]] = call.id
    return Storages(tuple(names), lives)


def call_costs(arrays: ArraySchedule, order: Order) -> CallCosts:
    """The costs of the calls of an order."""
    slots, storages = len(order.head), len(arrays.storages.bytes)
    costs = CallCosts._make([*np.zeros((2, slots)), *np.zeros((6, slots), dtype=np.int64), np.arange(storages)])
    price_calls(arrays, order, costs)
    return costs


def lives_for(arrays: ArraySchedule, order: Order) -> Lives:
    """Room for the lives of a list's storages."""
    storages, length = len(arrays.storages.bytes), len(order.items)
    by_storage, by_place, numbers = (np.zeros(shape, dtype=np.int64) for shape in ((5, storages), (4, length + 1), (2, 1)))
    return Lives(*by_storage, *by_place, *numbers)


def ints(values: Iterable[float]) -> Ints:
    return np.array(list(values), dtype=np.int64)


def slowing_links(links: Sequence[str]) -> int:
    """The links that slow operators while they are busy, as bits: devices copy to their host and back beside their cores."""
    return sum(1 << number for number, link in enumerate(links) if link not in TRANSFERS)


def rows(found: Iterable[Iterable[int]]) -> Rows:
    lists = [list(row) for row in found]
    return Rows(offsets([len(row) for row in lists]), ints(chain.from_iterable(lists)))


class _Arrays:
    """The arrays in the making.

    Args:
        items: by number.
        slots: by target.
        root: of each value the one whose memory it lies in, each part of a bucket apart.
        place: the number of each storage.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.parts = [(call, part) for call in schedule.calls for part in call.parts]
        self.slots = {part.target: slot for slot, (_, part) in enumerate(self.parts)}
        heads = {call.id: self.slots[call.parts[0].target] for call in schedule.calls}
        self.items, order = list(schedule.instructions[:1]) * (2 * len(self.parts)), list[int]()
        for item in schedule.instructions:
            if item.kind == "start" or item.kind == "wait":
                waits = item.kind == "wait"
                for part in schedule.collectives[item.of].parts:
                    self.items[2 * self.slots[part.target] + waits] = item
                order.append(2 * heads[item.of] + waits)
            else:
                order.append(len(self.items))
                self.items.append(item)
        length = np.zeros(len(self.items), dtype=np.int64)
        length[: len(order)] = order
        head, after = np.arange(len(self.parts)), np.full(len(self.parts), -1, dtype=np.int64)
        for call in schedule.calls:
            shared = [self.slots[part.target] for part in call.parts]
            head[shared] = shared[0]
            after[shared[:-1]] = shared[1:]
        self.order = Order(length, ints([len(order)]), head, after)
        self.root = schedule.stored(apart=True)
        self.place = {name: number for number, name in enumerate(dict.fromkeys(self.root.values()))}

    def arrays(self, *, in_place: bool, moves: bool) -> ArraySchedule:
        """The tables.

        Args:
            in_place: with the values that a result may be written over.
            moves: with the columns that only the clock and moves read.
        """
        items, nothing = self.items, Rows(np.zeros(len(self.items) + 1, dtype=np.int64), ints([]))
        before = self._before() if moves else []
        after: list[list[int]] = [[] for _ in before]
        for number, earlier in enumerate(before):
            for other in earlier:
                after[other].append(number)
        needs, makes = self._memory()
        segment = {each: number for number, each in enumerate(self.schedule.segments)}
        table = InstructionTable(
            ints(segment[item.segment] for item in items) if moves else ints([]),
            rows(before), rows(after), rows(needs), rows(makes), rows(map(self._takes, items)) if in_place else nothing,
            ints(self.schedule.operations[item.of].workspace if item.kind == "run" else 0 for item in items),
        )  # fmt: skip
        rounds = self.schedule.rounds if moves else ()
        pairs = ((max((item.microbatch for item in some), default=0), times) for times, some in rounds)
        clock = self._clock(self.items if moves else [])
        return ArraySchedule(clock, table, self._calls(priced=moves), self._storages(), ints(chain.from_iterable(pairs)))

    def _clock(self, items: Sequence[Instruction]) -> ClockTable:
        links = sorted({stream for item in items for stream in item.streams if stream != COMPUTE})
        bits = {stream: sum(1 << links.index(link) for link in links if link in stream.split("+")) for stream in {i.stream for i in items}}
        works = [item.kind in ("run", "add") for item in items]
        return ClockTable(
            ints(item.microbatch for item in items), ints(works),
            np.array([item.seconds * work for item, work in zip(items, works, strict=True)]),
            ints(bits[item.stream] for item in items), ints(part.late for _, part in self.parts),
            ints(item.launches or 0 for item in items), ints(item.reads_back or False for item in items),
            rows([self.slots[part.source]] if part.source in self.slots else [] for _, part in self.parts),
            len(links), slowing_links(links), *self.schedule.machine.clock,
        )  # fmt: skip

    def _calls(self, *, priced: bool) -> CallTable:
        """See ``CallTable``; without latencies and seconds of copies unless priced."""
        machine, classes, copying = self.schedule.machine, dict[object, int](), dict[str, tuple[float, float]]()
        table, kinds = [], {name: (kind.role == "gather", kind.in_place) for name, kind in CALLS.items()}
        for slot, (call, part) in enumerate(self.parts):
            gathers, reduces = kinds[call.kind]
            alone = call if len(call.parts) == 1 else Collective(part.target, (part,), call.in_place)
            key = bucket_class(self.items[2 * slot], call) if priced else None
            latency = machine.latency_seconds(call.kind, call.axes) if priced else 0.0
            if call.dtype not in copying:
                copying[call.dtype] = _copying(machine, call.dtype) if priced else (0.0, 0.0)
            table.append((
                ALONE if key is None else classes.setdefault(key, len(classes)), latency, max(part.step.seconds - latency, 0.0),
                *copying[call.dtype], part.sent_bytes, part.came_bytes, part.target_bytes, alone.packs, alone.unpacks,
                gathers, reduces, self.place[self.root[part.target]],
                self.place[self.root[part.source]], call.in_place, part.laid_kernels, part.put_kernels,
            ))  # fmt: skip
        columns = zip(*table, strict=True) if table else [()] * len(CallTable._fields)
        floats = {"latency", "beyond", "launch", "slope"}
        dtypes = [np.float64 if name in floats else np.int64 for name in CallTable._fields]
        return CallTable._make(np.array(column, dtype=dtype) for column, dtype in zip(columns, dtypes, strict=True))

    def _storages(self) -> StorageTable:
        schedule, parameters, comes = self.schedule, held_throughout(self.schedule), entering(self.schedule)
        kept = {self.root[value] for value in staying(schedule) if value in self.root}
        sizes = [0 if name in parameters else comes[name] if name in comes else schedule.values[name].bytes for name in self.place]
        return StorageTable(ints(sizes), ints(name in comes for name in self.place), ints(name in kept for name in self.place))

    def _values(self, number: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The values that an instruction reads and writes; of a call, those of the slot."""
        if number >= 2 * len(self.parts):
            return self.items[number].reads, self.items[number].writes
        _, part = self.parts[number // 2]
        return (() if number % 2 else (part.source,)), (part.target,)

    def _memory(self) -> tuple[list[list[int]], list[list[int]]]:
        """For each instruction the storages that it needs, and the storages that it makes."""
        lies = {value: self.place[storage] for value, storage in self.root.items()}
        needs, makes = list[list[int]](), list[list[int]]()
        for _, part in self.parts:
            target = lies[part.target]
            needs += [lies[part.source], target], [target]
            makes += [target], [target]
        for item in self.items[2 * len(self.parts) :]:
            made = [lies[value] for value in item.writes]
            makes.append(made)
            needs.append([lies[value] for value in item.reads] + made)
        return needs, makes

    def _takes(self, item: Instruction) -> list[int]:
        schedule, maker = self.schedule, self.maker
        mine = [value for value in may_take(schedule, item) if value in maker and self.root[value] == value]
        return [self.place[value] for value in mine if made_for_good(schedule, maker[value], item)]

    @cached_property
    def maker(self) -> Mapping[str, Instruction]:
        """The operator that makes each value."""
        return {value: item for item in self.items if item.kind == "run" for value in item.writes}

    def _before(self) -> list[list[int]]:
        """For each instruction those that it must follow.

        They make its sources, or start its call. Readers of memory that is changed in place stand before the change, readers of the
        new value behind it. Operators that must not run twice keep their order, and so does what runs before the first microbatch.
        """
        changes = [self._changes(item) for item in self.items]
        mutable = {storage for storage in changes if storage is not None}
        made, flying, last, since = dict[str, int](), dict[str, int](), dict[str, int](), dict[str, list[int]]()
        once, found = -1, list[list[int]]([] for _ in self.items)
        first, ended, latest = self.items[0] if self.items else None, -1, -1
        for number in self._in_order():
            item, earlier = self.items[number], set[int]()
            if item.microbatch == BEFORE_ALL:
                if item is not first:
                    first, ended = item, latest
                earlier.update([ended] if ended >= 0 else ())
                latest = number
            reads, writes = self._values(number)
            for value in reads:
                if item.kind == "start" and value in flying:
                    earlier.add(flying[value])
                elif value in made:
                    earlier.add(made[value])
            if item.kind == "wait":
                earlier.add(number - 1)
            sources = (self.parts[number // 2][1].source,) if item.kind == "wait" else ()
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
        """The numbers of the instructions in the order of the list; a call stands for all its slots."""
        other = 2 * len(self.parts)
        for item in self.schedule.instructions:
            if item.kind in ("start", "wait"):
                for part in self.schedule.collectives[item.of].parts:
                    yield 2 * self.slots[part.target] + (item.kind == "wait")
            else:
                yield other
                other += 1


def _copying(machine: Machine, dtype: str) -> tuple[float, float]:
    """Seconds of copies, the least and for each byte."""
    least, large = machine.copy_seconds(1, dtype), machine.copy_seconds(LARGE_COPY, dtype)
    if machine.hardware.launch_overlaps:
        return least, large / LARGE_COPY
    slope = (large - least) / (LARGE_COPY - 1)
    return least - slope, slope
