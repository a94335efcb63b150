"""The shortest step of a small graph, by trying every plan of the search's space and every list that a plan can run as.

Nothing here is shared with what is tested but the space itself (the model's nodes and finite edges, what choices stand for, and the steps
of a reshard). Time is as ``autopar.schedule.simulation`` says it in words.

What is tried: for every combination of choices, every order of operators and starts that the data allow, forward before backward, and
every set of collectives that may share a call, and every place of waits, which take the time of their copies. Slices, and waits without
copies, stand as late as their readers allow, since all times grow with one another. What is left out cannot be the shortest:

- plans whose operators alone, or collectives on one link alone, take longer than the best step so far, phase by phase;
- the longer of two ways to have started the same things, when it is later in everything that follows.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from heapq import nsmallest
from itertools import combinations
from operator import add, itemgetter, le
from typing import NamedTuple

import numpy as np

from autopar import pricing
from autopar.cost_models import Machine
from autopar.graph import Graph, Phase
from autopar.rules import is_alias
from autopar.schedule import Assignment, Layout, Schedule
from autopar.schedule.deferred_loss import may_be_deferred, most_deferred_bytes
from autopar.schedule.instructions import Value
from autopar.schedule.ordering import steps_of
from autopar.search.ilp.decode import decode_site
from autopar.search.ilp.model import Model, Site
from autopar.sharding import ShardingSpec, Strategy

PHASES: tuple[Phase, ...] = ("forward", "backward")
SHARED_CALLS = ("all_reduce", "all_gather", "reduce_scatter")
"""The kinds of which several may be one call."""
EQUAL = 1e-9
"""Relative difference that rounding may make."""
PROMISING = 8
"""States of each size that are looked at before all are."""


# time -------------------------------------------------------------------------------------------------------------------------------


def operator_ends(begin: float, seconds: float, busy: float, slowdown: float) -> float:
    """An operator begins at ``begin``; until ``busy`` some link is, and it runs at ``1 - slowdown`` of its speed."""
    beside = max(busy - begin, 0.0)
    if seconds <= beside * (1.0 - slowdown):
        return begin + (seconds / (1.0 - slowdown) if seconds else 0.0)
    return begin + beside + (seconds - beside * (1.0 - slowdown))


def schedule_seconds(schedule: Schedule) -> float:
    """The step of a schedule but for the optimizer, by the list alone."""
    hardware, issue = schedule.machine.hardware, schedule.machine.issue_seconds
    now, host = 0.0, 0.0
    link_free: dict[str, float] = defaultdict(float)
    arrival: dict[str, float] = defaultdict(float)
    ends: dict[str, float] = {}
    for item in schedule.instructions:
        links = [name for name in item.stream.split("+") if name not in ("", "compute")]
        kernels = item.launches or 0
        host = max(host, now) if item.reads_back and issue else host
        issued, host = host + issue * min(kernels, 1), host + issue * kernels
        if item.kind == "wait":
            now = now if item.late else max(now, ends[item.of])
        if item.kind in ("run", "wait") and kernels:
            now = max(now, issued)
        if item.kind == "start":
            arrived = max(now, host if kernels else 0.0, *(arrival[value] for value in item.reads))
            ends[item.of] = max(arrived, *(link_free[name] for name in links)) + item.seconds
            link_free.update(dict.fromkeys(links, ends[item.of]))
            arrival.update(dict.fromkeys(item.writes, ends[item.of]))
            now = now if hardware.launch_overlaps else arrived
        elif item.kind == "run" and links:
            now = max(now, *(link_free[name] for name in links)) + item.seconds
            link_free.update(dict.fromkeys(links, now))
        elif item.kind in ("run", "wait"):
            now = operator_ends(now, item.seconds, max(link_free.values(), default=0.0), hardware.overlap_slowdown)
            now = max(now, host + item.seconds / kernels) if kernels > 1 else now
    return max(now, *ends.values()) if ends else now


# one phase --------------------------------------------------------------------------------------------------------------------------


class Copying(NamedTuple):
    """What a collective copies: bytes of its source and its target on a rank as they travel, and whether it must even when it is alone;
    ``filled``: with unequal parts among them all are copied. ``reduces``: it is an all-reduce, which packs unless it is in place."""

    source: float = 0.0
    target: float = 0.0
    packs: bool = False
    unpacks: bool = False
    unpacks_shared: bool = False
    dtype: str = "float32"
    filled: bool = False
    reduces: bool = False


class Task(NamedTuple):
    """An operator, a collective or a local step, of one phase.

    Args:
        reads: numbers of the tasks of the phase that make what it reads.
        latency: of a collective, the part of its seconds that a shared call pays once.
        call: what collectives have in common that may share a call; of those that never do, a thing of its own.
    """

    kind: str
    seconds: float = 0.0
    reads: tuple[int, ...] = ()
    links: tuple[str, ...] = ()
    latency: float = 0.0
    call: object = None
    copying: Copying = Copying()


Tasks = tuple[Task, ...]


@dataclass(frozen=True)
class Rules:
    """How time passes on a machine: ``copy`` gives seconds for so many bytes of a dtype."""

    slowdown: float
    overlaps: bool
    copy: Callable[[float, str], float]

    def copies(self, group: Sequence[Task]) -> float:
        """Seconds that the wait for one call takes."""
        first, shared = group[0].copying, len(group) > 1
        filled = any(task.copying.filled for task in group)
        packs = first.packs or shared or filled
        unpacks = first.unpacks or (shared and first.unpacks_shared) or filled
        copied = sum(task.copying.source * packs + task.copying.target * unpacks for task in group)
        return self.copy(copied, first.dtype) if copied else 0.0


def at_least(tasks: Tasks) -> float:
    """Seconds that no order of ``tasks`` beats: operators one after another, or one link's collectives with as few calls as can be."""
    links: dict[str, float] = defaultdict(float)
    paid: dict[tuple[object, str], float] = {}
    for task in tasks:
        for link in task.links:
            links[link] += task.seconds - task.latency
            if task.kind == "call":
                paid[task.call, link] = min(task.latency, paid.get((task.call, link), math.inf))
    for (_, link), latency in paid.items():
        links[link] += latency
    return max(sum(task.seconds for task in tasks if task.kind == "run"), *links.values(), _longest_chain(tasks))


def _longest_chain(tasks: Tasks) -> float:
    ends: list[float] = []
    for task in tasks:
        ends.append(task.seconds + max((ends[number] for number in task.reads), default=0.0))
    return max(ends, default=0.0)


def shortest(tasks: Tasks, rules: Rules, limit: float) -> float:
    """The least seconds in which ``tasks`` can be over; infinite when that is more than ``limit``.

    A state is what has been done (operators run, collectives started and waited for, as sets of bits, and which calls still have to be
    waited for) and when: the operators' clock, when each link is free, when each collective that still matters ends. Of states in which
    the same has been done only those stay that are earlier than all others in something, and that can be over in time. A few promising
    ones come first: no state stays that cannot be over before what they come to.
    """
    if not tasks:
        return 0.0
    search = _Lists(tasks, rules)
    search.run(limit, PROMISING)
    search.run(limit)
    return search.best if search.best <= limit else math.inf


Times = tuple[float, ...]


class Done(NamedTuple):
    """Bits of what has begun and of what was waited for, and the calls that take time to wait for and were not."""

    begun: int
    waited: int
    open: frozenset[tuple[int, ...]]

    @property
    def size(self) -> int:
        return self.begun.bit_count() + self.waited.bit_count()


class _Lists:
    """What can come next, and when it is over. Times are the clock, one for each link, one for each task."""

    def __init__(self, tasks: Tasks, rules: Rules) -> None:
        self.tasks, self.rules = tasks, rules
        self.links = sorted({link for task in tasks for link in task.links})
        self.width = 1 + len(self.links)
        self.movable = [number for number, task in enumerate(tasks) if task.kind != "cut"]
        self.there, self.flying = _needs(tasks)
        self.readers = [
            sum(1 << other for other in self.movable if number in self.there[other] | self.flying[other]) for number in range(len(tasks))
        ]
        self.everything = sum(1 << number for number in self.movable)
        self.best = math.inf
        self.chain = _chains(tasks, self.there, self.flying)
        self._copies: dict[tuple[int, ...], float] = {}
        self._rests: dict[Done, tuple[float, ...]] = {}

    def run(self, limit: float, most: int | None = None) -> None:
        """Makes ``best`` the least seconds, where they are no more than ``limit``; those of some list where only the ``most`` promising
        states of each size are looked at."""
        sizes: dict[int, dict[Done, list[Times]]] = {0: {Done(0, 0, frozenset()): [(0.0,) * (self.width + len(self.tasks))]}}
        while sizes:
            found = [(self.at_least(done, times), done, times) for done, known in sizes.pop(min(sizes)).items() for times in known]
            for seconds, done, times in found if most is None else nsmallest(most, found, key=itemgetter(0)):
                if seconds <= min(limit, self.best):
                    for after, moments in self.next(done, times):
                        if self.at_least(after, moments) <= min(limit, self.best):
                            _keep(sizes.setdefault(after.size, {}).setdefault(after, []), moments)

    def at_least(self, done: Done, times: Times) -> float:
        """Seconds after which all is over at the earliest."""
        if done not in self._rests:
            self._rests[done] = self._rest(done)
        return max(map(add, times, self._rests[done]))

    def _rest(self, done: Done) -> tuple[float, ...]:
        """Seconds that follow at least: after the clock all operators and copies, and the longest chain; after each link's last call its
        others."""
        left = [number for number in self.movable if not done.begun >> number & 1]
        compute = sum(self.tasks[number].seconds for number in left if self.tasks[number].kind == "run") + sum(map(self.copies, done.open))
        calls = (sum(self.tasks[n].seconds - self.tasks[n].latency for n in left if link in self.tasks[n].links) for link in self.links)
        return max([compute, *(self.chain[number] for number in left)]), *calls

    def copies(self, group: tuple[int, ...]) -> float:
        """``Rules.copies``, remembered."""
        if group not in self._copies:
            self._copies[group] = self.rules.copies([self.tasks[number] for number in group])
        return self._copies[group]

    def next(self, done: Done, times: Times) -> Iterator[tuple[Done, Times]]:
        if done.begun == self.everything and not done.open:
            self.best = min(self.best, max(times[: self.width]))
            return
        for group in done.open:
            yield self._wait(done, group, times)
        blocked = {number for group in done.open for number in group}
        ready = [
            number
            for number in self.movable
            if not done.begun >> number & 1
            and all(done.begun >> other & 1 and other not in blocked for other in self.there[number])
            and all(done.begun >> other & 1 for other in self.flying[number])
        ]
        for group in _together(self.tasks, ready):
            yield self._begin(done, group, times)

    def _wait(self, done: Done, group: tuple[int, ...], times: Times) -> tuple[Done, Times]:
        found = list(times)
        begin = max(times[0], times[self.width + group[0]])
        found[0] = operator_ends(begin, self.copies(group), max(times[1 : self.width], default=0.0), self.rules.slowdown)
        after = Done(done.begun, done.waited | sum(1 << number for number in group), done.open - {group})
        return after, self._settled(found, after)

    def _begin(self, done: Done, group: tuple[int, ...], times: Times) -> tuple[Done, Times]:
        found, width = list(times), self.width
        now = max([times[0], *(times[width + other] for number in group for other in self.there[number])])
        first = self.tasks[group[0]]
        held = [1 + self.links.index(link) for link in first.links]
        waiting = done.open
        if first.kind == "run":
            if held:
                found[0] = max([now, *(times[place] for place in held)]) + first.seconds
            else:
                found[0] = operator_ends(now, first.seconds, max(times[1:width], default=0.0), self.rules.slowdown)
            for place in (*held, width + group[0]):
                found[place] = found[0]
        else:
            arrived = max([now, *(times[width + other] for number in group for other in self.flying[number])])
            begin = max([arrived, *(times[place] for place in held)])
            end = begin + first.latency + sum(self.tasks[number].seconds - first.latency for number in group)
            for place in (*held, *(width + number for number in group)):
                found[place] = end
            found[0] = now if self.rules.overlaps else arrived
            if self.copies(group):
                waiting = waiting | {group}
        after = Done(done.begun | sum(1 << number for number in group), done.waited, waiting)
        return after, self._settled(found, after)

    def _settled(self, times: list[float], done: Done) -> Times:
        """What lies in the past is as good as now; so is what nobody reads or waits for any more."""
        now, width = times[0], self.width
        open_ = {number for group in done.open for number in group}
        for place in range(1, width):
            times[place] = max(times[place], now)
        for number, readers in enumerate(self.readers):
            matters = done.begun >> number & 1 and (readers & ~done.begun or number in open_)
            times[width + number] = max(times[width + number], now) if matters else now
        return tuple(times)


def _needs(tasks: Tasks) -> tuple[list[set[int]], list[set[int]]]:
    """For each task what must be there before it, and what may be on its way: a start reads collectives in flight, a slice does not."""
    there: list[set[int]] = []
    flying: list[set[int]] = []
    for task in tasks:
        direct = {number for number in task.reads if task.kind == "call" and tasks[number].kind == "call"}
        found: set[int] = set()
        for number in set(task.reads) - direct:
            found |= {number} if tasks[number].kind != "cut" else there[number]
        there.append(found)
        flying.append(direct - found)
    return there, flying


def _chains(tasks: Tasks, there: Sequence[set[int]], flying: Sequence[set[int]]) -> list[float]:
    """For each task the seconds from its begin to the end of all that waits for it."""
    found = [task.seconds for task in tasks]
    for number in reversed(range(len(tasks))):
        for other in there[number] | flying[number]:
            found[other] = max(found[other], tasks[other].seconds + found[number])
    return found


def _together(tasks: Tasks, ready: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """What can come next: one task, or several collectives as one call."""
    yield from ((number,) for number in ready)
    alike: dict[object, list[int]] = defaultdict(list)
    for number in ready:
        if tasks[number].kind == "call":
            alike[tasks[number].call].append(number)
    for group in alike.values():
        for size in range(2, len(group) + 1):
            yield from combinations(group, size)


def _keep(known: list[tuple[float, ...]], state: tuple[float, ...]) -> None:
    if any(all(map(le, one, state)) for one in known):
        return
    known[:] = [one for one in known if not all(map(le, state, one))]
    known.append(state)


# one plan ---------------------------------------------------------------------------------------------------------------------------


Made = tuple[str, str, ShardingSpec, ShardingSpec, Phase]


@dataclass(frozen=True)
class Way:
    """How one tensor gets from who makes it to who reads it.

    Args:
        made: reshards: value, source value, spec before, spec after, phase.
        reads: reader, input position, value read.
    """

    tensor: str
    made: frozenset[Made]
    reads: frozenset[tuple[str, int, str]]


def way_of(tensor: str, spec: ShardingSpec, layouts: Sequence[Layout], reads: Mapping[tuple[str, int], str]) -> Way:
    """Reshards by what they are, not by name: equal ones of one phase are one."""
    name = {tensor: tensor}
    specs = {tensor: spec}
    made = set()
    waiting = {layout.value: layout for layout in layouts}

    def place(layout: Layout) -> None:
        if layout.value not in name:
            if layout.source in waiting:
                place(waiting[layout.source])
            source = name[layout.source]
            value = f"{source} > {layout.phase} {layout.spec}"
            name[layout.value], specs[value] = value, layout.spec
            made.add((value, source, specs[source], layout.spec, layout.phase))

    for layout in layouts:
        place(layout)
    return Way(tensor, frozenset(made), frozenset((reader, position, name[value]) for (reader, position), value in reads.items()))


@dataclass
class Timing:
    """Plans of one graph on one machine, timed."""

    graph: Graph
    machine: Machine
    _steps: dict[object, tuple[Task, ...]] = field(default_factory=dict)
    _best: dict[Tasks, tuple[float, float]] = field(default_factory=dict)
    _waited: dict[tuple[Way, Made, bool], Tasks] = field(default_factory=dict)

    @cached_property
    def _deferrable(self) -> frozenset[str]:
        return frozenset(may_be_deferred(self.graph))

    @cached_property
    def _most_deferred_bytes(self) -> float:
        return most_deferred_bytes(self.graph)

    @cached_property
    def rules(self) -> Rules:
        hardware = self.machine.hardware
        return Rules(hardware.overlap_slowdown, hardware.launch_overlaps, self.machine.copy_seconds)

    def steps(self, tensor: str, source: ShardingSpec, target: ShardingSpec) -> tuple[Task, ...]:
        """The steps of a reshard, without what they read."""
        key = tensor, source, target
        if key not in self._steps:
            layout = Layout("", tensor, tensor, target, "forward", "")
            tasks = []
            for part in steps_of(layout, Value(tensor, source, 0), self.graph, self.machine):
                step = part.step
                if step.is_collective:
                    links, latency = self.machine.links(step.axes), self.machine.latency_seconds(step.kind, step.axes)
                    alike = (step.kind, step.axes, step.reduction) if step.kind in SHARED_CALLS else (tensor, source, target, len(tasks))
                    packs, gathers = step.kind == "all_reduce" or part.cuts_inside, step.kind == "all_gather"
                    reduces = step.kind == "all_reduce"
                    copying = Copying(part.sent_bytes, part.came_bytes, packs, part.joins_inside, gathers, part.dtype, part.filled, reduces)
                    tasks.append(Task("call", step.seconds, (), links, latency, alike, copying))
                else:
                    tasks.append(Task("cut"))
            self._steps[key] = tuple(tasks) or (Task("cut"),)
        return self._steps[key]

    def reshard(self, way: Way, item: Made, own: bool) -> Iterator[Task]:
        """The steps of one of a way's reshards, all-reduces in place where they may be: what is reduced is not read by anybody else.

        Args:
            own: whether its source is memory of its own, made in the same phase.
        """
        _, source, before, after, _ = item
        alone = own and self._readers(way, source) == 1
        for number, task in enumerate(self.steps(way.tensor, before, after)):
            in_place = task.kind == "call" and task.copying.reduces and (alone or number > 0)
            yield task._replace(copying=task.copying._replace(packs=False)) if in_place else task

    def _waited_for(self, way: Way, item: Made, alone: bool) -> Tasks:
        """The steps of one of a way's reshards, but for what is late; remembered.

        Args:
            alone: whether its source may be memory of its own.
        """
        key = way, item, alone
        if key not in self._waited:
            value, source, _, _, phase = item
            own = alone and self._own(way, source, phase)
            self._waited[key] = () if self._late(way, value) else tuple(self.reshard(way, item, own))
        return self._waited[key]

    def _readers(self, way: Way, value: str) -> int:
        """How many reshards, operators and outputs read a value."""
        taken = {(reader, position) for reader, position, _ in way.reads}
        direct = [(op.name, position, tensor) for op in self.graph.ops for position, tensor in enumerate(op.inputs)]
        direct += [(f"output:{index}", 0, output.tensor) for index, output in enumerate(self.graph.outputs)]
        named = sum(item[1] == value for item in way.made) + sum(read == value for *_, read in way.reads)
        return named + sum(tensor == value == way.tensor and (reader, position) not in taken for reader, position, tensor in direct)

    def _late(self, way: Way, value: str) -> bool:
        """Whether a reshard leads to the loss alone: it is under way until that is read, beside whatever follows, and is not counted; but
        where everything is in sequence."""
        if self.machine.cost_model == "communication":
            return False
        readers = {reader for reader, _, read in way.reads if read == value}
        made = [item[0] for item in way.made if item[1] == value]
        if not readers <= self._deferrable or not (readers or made) or not all(self._late(way, other) for other in made):
            return False
        spec = next(item[3] for item in way.made if item[0] == value)
        return pricing.local_bytes(self.graph.tensors[way.tensor], spec, self.machine) <= self._most_deferred_bytes

    def _own(self, way: Way, source: str, phase: Phase) -> bool:
        """Whether a value is memory of its own, made in a phase."""
        op = self.graph.producer.get(source)
        if source == way.tensor:
            return op is not None and op.phase == phase and not is_alias(op)
        return any(item[0] == source and item[4] == phase and item[2] != item[3] for item in way.made)

    def operator(self, name: str, strategy: Strategy) -> Task:
        op = self.graph.op[name]
        key = name, strategy
        if key not in self._steps:
            inner = [self.machine.links(pricing.whole_axes(item.axes, self.machine)) for item in strategy.inner]
            seconds = pricing.compute_seconds(op, self.graph.tensors, strategy, self.machine)
            seconds += pricing.inner_seconds(strategy, self.machine)
            self._steps[key] = (Task("run", seconds, (), tuple(sorted({link for links in inner for link in links}))),)
        return self._steps[key][0]

    def tasks(self, phase: Phase, strategies: Mapping[str, Strategy], ways: Sequence[Way]) -> Tasks:
        """What is to be done in a phase, each task after what it reads. A local step that need not wait for a collective is left out."""
        found: list[Task] = []
        number: dict[str, int] = {}
        made = {item[0]: (way, item) for way in ways for item in way.made if item[4] == phase}
        reads = {(reader, position): value for way in ways for reader, position, value in way.reads}

        def make(value: str) -> None:
            if value in made and value not in number:
                way, item = made[value]
                source = item[1]
                make(source)
                last, producer = number.get(source), self.graph.producer.get(source)
                alone = producer is None or not strategies[producer.name].inner
                for task in self._waited_for(way, item, alone):
                    if task.kind == "call" or (last is not None and found[last].kind == "call"):
                        found.append(task._replace(reads=() if last is None else (last,)))
                        last = len(found) - 1
                if last is not None:
                    number[value] = last

        for op in self.graph.ops:
            if op.phase == phase:
                values = [reads.get((op.name, position), tensor) for position, tensor in enumerate(op.inputs)]
                for value in values:
                    make(value)
                before = tuple(sorted({number[value] for value in values if value in number}))
                task = self.operator(op.name, strategies[op.name])
                found.append(task._replace(reads=before))
                number.update(dict.fromkeys(op.outputs, len(found) - 1))
        for value in sorted(made):
            make(value)
        return tuple(found)

    def part(self, way: Way, phase: Phase) -> tuple[object, ...]:
        """What a way does in a phase, whatever the values are called: its steps, and which of them makes what each operator reads."""
        found: list[object] = []
        number: dict[str, int] = {}
        made = {item[0]: item for item in way.made if item[4] == phase}

        def make(value: str) -> None:
            if value in made and value not in number:
                source = made[value][1]
                make(source)
                last = number.get(source)
                for task in self._waited_for(way, made[value], True):
                    if task.kind == "call" or last is not None:
                        found.append((task, last))
                        last = len(found) - 1
                if last is not None:
                    number[value] = last

        for value in sorted(made):
            make(value)
        readers = [item for item in sorted(way.reads) if item[0] in self.graph.op and self.graph.op[item[0]].phase == phase]
        return (*found, tuple((reader, position, number[value]) for reader, position, value in readers if value in number))

    def shortest(self, tasks: Tasks, limit: float) -> float:
        """``shortest``, remembered: what is known are the seconds, or that they are more than some limit."""
        known = self._best.get(tasks)
        if known is None or (known[0] == math.inf and known[1] < limit):
            found = shortest(tasks, self.rules, limit) if at_least(tasks) <= limit else math.inf
            known = self._best[tasks] = (found, limit)
        return known[0] if known[0] <= limit else math.inf

    def seconds(self, assignment: Assignment, optimizer: float) -> float:
        """The shortest step of one assignment."""
        specs = dict(assignment.inputs)
        for op in self.graph.ops:
            specs.update(zip(op.outputs, assignment.strategies[op.name].outputs, strict=True))
        ways = []
        for tensor in self.graph.tensors:
            layouts = [layout for layout in assignment.layouts if layout.tensor == tensor]
            values = {layout.value for layout in layouts}
            reads = {place: value for place, value in (assignment.reads or {}).items() if value in values}
            ways.append(way_of(tensor, specs[tensor], layouts, reads))
        phases = [self.tasks(phase, assignment.strategies, ways) for phase in PHASES]
        return optimizer + sum(self.shortest(tasks, math.inf) for tasks in phases)


# all plans --------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Choice:
    """A way with what it costs at least: for each phase and link the seconds of its collectives without latencies.

    Args:
        parts: for each phase a number that stands for what it does then.
        seconds: of its collectives one after another.
    """

    way: Way
    loads: tuple[float, ...]
    parts: tuple[int, ...]
    seconds: float


class BruteForce:
    """All plans of a model, those that may be shorter than the best so far first looked at operator by operator."""

    def __init__(self, model: Model, best: float) -> None:
        self.model, self.best = model, best
        self.graph, self.machine = model.space.graph, model.space.machine
        self.timing = Timing(self.graph, self.machine)
        self.links = model.space.links
        self.plans = 0
        self.nodes_of = {tensor: self._nodes_of(site) for tensor, site in model.sites.items()}
        self.ops = [(op, model.node_number["op", op.name], model.space.op_choices(op).strategies) for op in self.graph.ops]
        sites_of = defaultdict(set)
        for tensor, site in model.sites.items():
            for node in self._nodes_of(site):
                sites_of[node].add(tensor)
        self.inner = {
            tensor: [node for node in self._nodes_of(site) if model.nodes[node].kind != "op" and self._local(node, sites_of)]
            for tensor, site in model.sites.items()
        }
        inside = {node for nodes in self.inner.values() for node in nodes}
        self.outer = self._in_order([number for number in range(len(model.nodes)) if number not in inside], sites_of)
        place = {node: index for index, node in enumerate(self.outer)}
        self.complete: list[list[Site]] = [[] for _ in self.outer]
        self.free_sites = []
        for site in model.sites.values():
            mine = [place[node] for node in self._nodes_of(site) if node in place]
            (self.complete[max(mine)] if mine else self.free_sites).append(site)
        self.between = [edge for edge in model.edges if edge.source in place and edge.target in place]
        self._choices: dict[object, tuple[Choice, ...]] = {}
        self._known: dict[Way, Choice] = {}
        self._parts: dict[object, int] = {}
        self._near: dict[str, list[list[tuple[int, int, list[list[bool]]]]]] = {}
        self._tasks: dict[object, dict[tuple[int, ...], tuple[Tasks, float]]] = {}

    def _nodes_of(self, site: Site) -> list[int]:
        nodes = [site.producer, site.forward, site.saved, site.backward, *(reader.node for reader in site.readers)]
        return list(dict.fromkeys(node for node in nodes if node is not None))

    def _local(self, node: int, sites_of: Mapping[int, set[str]]) -> bool:
        """Nothing beyond one tensor depends on it."""
        touching = [edge for edge in self.model.edges if node in (edge.source, edge.target)]
        mine = set(self._nodes_of(self.model.sites[next(iter(sites_of[node]))]))
        return len(sites_of[node]) == 1 and not self.model.nodes[node].seconds.any() and all({e.source, e.target} <= mine for e in touching)

    def _in_order(self, nodes: list[int], sites_of: Mapping[int, set[str]]) -> list[int]:
        """Operators as captured; other nodes as soon as all operators beside them have their place."""
        ops = [number for number in nodes if self.model.nodes[number].kind == "op"]
        found: list[int] = []
        waiting = [number for number in nodes if number not in ops]
        for op in ops:
            found.append(op)
            for number in list(waiting):
                beside = {n for tensor in sites_of[number] for n in self._nodes_of(self.model.sites[tensor]) if n in ops}
                if beside <= set(found):
                    found.append(number)
                    waiting.remove(number)
        return found + waiting

    def run(self) -> float:
        """The seconds of the best plan; ``best`` as it was given when there is none shorter."""
        nodes = self.model.nodes
        least = {phase: [0.0] * (len(self.outer) + 1) for phase in (*PHASES, "optimizer")}
        for index in range(len(self.outer) - 1, -1, -1):
            node = nodes[self.outer[index]]
            for phase in least:
                least[phase][index] = least[phase][index + 1] + (node.seconds.min() if self._counts(node) == phase else 0.0)
        self.least = least
        self.choice: dict[int, int] = {}
        free = [self.ways(site) for site in self.free_sites]
        self._dive(0, (0.0, 0.0, 0.0), (0.0,) * (2 * len(self.links)), free)
        return self.best

    def least_in_sequence(self) -> float:
        """The least sum of seconds when everything is done one after another, as under the communication model: tensor by tensor."""
        self.choice = {}

        def dive(index: int, spent: float) -> None:
            if spent >= self.best:
                return
            if index == len(self.outer):
                self.best = spent
                return
            number = self.outer[index]
            for choice in range(len(self.model.nodes[number].seconds)):
                self.choice[number] = choice
                if self._allowed(number):
                    beside = [min((way.seconds for way in self.ways(site)), default=math.inf) for site in self.complete[index]]
                    dive(index + 1, spent + float(self.model.nodes[number].seconds[choice]) + sum(beside))
            del self.choice[number]

        dive(0, sum(min(way.seconds for way in self.ways(site)) for site in self.free_sites))
        return self.best

    @staticmethod
    def _counts(node: object) -> str:
        return node.phase if node.kind == "op" else "optimizer"  # type: ignore[attr-defined]

    def _dive(self, index: int, spent: tuple[float, float, float], loads: tuple[float, ...], chosen: list[tuple[Choice, ...]]) -> None:
        if index == len(self.outer):
            self._leaf(spent, chosen)
            return
        number = self.outer[index]
        node = self.model.nodes[number]
        part = (*PHASES, "optimizer").index(self._counts(node))
        for choice in np.argsort(node.seconds, kind="stable"):
            self.choice[number] = int(choice)
            if not self._allowed(number):
                continue
            now = tuple(value + (node.seconds[choice] if place == part else 0.0) for place, value in enumerate(spent))
            held = loads
            ways = []
            for site in self.complete[index]:
                ways.append(self.ways(site))
                held = tuple(a + min((c.loads[place] for c in ways[-1]), default=math.inf) for place, a in enumerate(held))
            if all(ways) and self._at_least(index + 1, now, held) < self.best * (1 - EQUAL):
                self._dive(index + 1, now, held, [*chosen, *ways])
        del self.choice[number]

    def _allowed(self, number: int) -> bool:
        return all(
            np.isfinite(edge.seconds[self.choice[edge.source], self.choice[edge.target]])
            for edge in self.between
            if number in (edge.source, edge.target) and edge.source in self.choice and edge.target in self.choice
        )

    def _at_least(self, index: int, spent: tuple[float, ...], loads: tuple[float, ...]) -> float:
        total = spent[2] + self.least["optimizer"][index]
        count = len(self.links)
        for place, phase in enumerate(PHASES):
            total += max(spent[place] + self.least[phase][index], *loads[place * count : (place + 1) * count])
        return total

    def ways(self, site: Site) -> tuple[Choice, ...]:
        """All ways of one tensor, for the choices of the operators beside it."""
        outer = [node for node in self.nodes_of[site.tensor] if node in self.choice]
        key = site.tensor, tuple(self.choice[node] for node in outer)
        if key not in self._choices:
            found = {choice.parts: choice for choice in self._all_ways(site)}
            nothing = [self._parts.get((site.tensor, ((),))) for _ in PHASES]
            less = [
                choice
                for parts, choice in found.items()
                if not any(
                    other != parts and all(a in (b, nothing[place]) for place, (a, b) in enumerate(zip(other, parts, strict=True)))
                    for other in found
                )
            ]
            self._choices[key] = tuple(sorted(less, key=lambda choice: sum(choice.loads)))
        return self._choices[key]

    def _all_ways(self, site: Site) -> Iterator[Choice]:
        inner, near = self.inner[site.tensor], self._edges_within(site)
        choices = np.zeros(len(self.model.nodes), dtype=int)
        for node, choice in self.choice.items():
            choices[node] = choice

        def fill(place: int) -> Iterator[Choice]:
            if place == len(inner):
                yield self._choice(site, choices)
                return
            node = inner[place]
            for choice in range(len(self.model.nodes[node].seconds)):
                choices[node] = choice
                if all(finite[choices[source]][choices[target]] for source, target, finite in near[place]):
                    yield from fill(place + 1)

        yield from fill(0)

    def _edges_within(self, site: Site) -> list[list[tuple[int, int, list[list[bool]]]]]:
        """By the place of a tensor's inner nodes: the edges to those before it and to the operators beside the tensor, and where each is
        finite."""
        if site.tensor not in self._near:
            inner, mine, found = self.inner[site.tensor], set(self.nodes_of[site.tensor]), []
            edges = [edge for edge in self.model.edges if {edge.source, edge.target} <= mine]
            for place, node in enumerate(inner):
                later = set(inner[place + 1 :])
                near = [edge for edge in edges if node in (edge.source, edge.target) and not later & {edge.source, edge.target}]
                found.append([(edge.source, edge.target, np.isfinite(edge.seconds).tolist()) for edge in near])
            self._near[site.tensor] = found
        return self._near[site.tensor]

    def _choice(self, site: Site, choices: np.ndarray) -> Choice:
        layouts: list[Layout] = []
        reads: dict[tuple[str, int], str] = {}
        decode_site(self.model, choices, site, layouts, reads)
        way = way_of(site.tensor, site.specs[choices[site.producer]], layouts, reads)
        if way not in self._known:
            self._known[way] = self._priced(way)
        return self._known[way]

    def _priced(self, way: Way) -> Choice:
        loads, seconds = [0.0] * (2 * len(self.links)), 0.0
        for _, _, source, target, phase in way.made:
            for task in self.timing.steps(way.tensor, source, target):
                seconds += task.seconds
                for link in task.links:
                    loads[PHASES.index(phase) * len(self.links) + self.links.index(link)] += task.seconds - task.latency
        parts = (self._parts.setdefault((way.tensor, self.timing.part(way, phase)), len(self._parts)) for phase in PHASES)
        return Choice(way, tuple(loads), tuple(parts), seconds)

    def _leaf(self, spent: tuple[float, float, float], chosen: list[tuple[Choice, ...]]) -> None:
        """All ways of all tensors beside each other, for the operators chosen."""
        picked = {phase: tuple([self.choice[node] for op, node, _ in self.ops if op.phase == phase]) for phase in PHASES}
        strategies = {op.name: given[self.choice[node]] for op, node, given in self.ops}

        known = [self._tasks.setdefault((phase, picked[phase]), {}) for phase in PHASES]

        def tasks(place: int, ways: Sequence[Choice]) -> tuple[Tasks, float]:
            key = tuple([choice.parts[place] for choice in ways])
            if key not in known[place]:
                found = self.timing.tasks(PHASES[place], strategies, [choice.way for choice in ways])
                known[place][key] = found, at_least(found)
            return known[place][key]

        count = len(self.links)
        several, only = [ways for ways in chosen if len(ways) > 1], [ways[0] for ways in chosen if len(ways) == 1]
        rest = [(0.0,) * (2 * count)]
        for ways in reversed(several):
            rest.insert(0, tuple(later + min(way.loads[place] for way in ways) for place, later in enumerate(rest[0])))

        def look(place: int, picked_ways: tuple[Choice, ...], loads: tuple[float, ...]) -> None:
            room = self.best * (1 - EQUAL) - spent[2]
            held = [*map(add, loads, rest[place])]
            if max(spent[0], *held[:count]) + max(spent[1], *held[count:]) >= room:
                return
            if place < len(several):
                for way in several[place]:
                    look(place + 1, (*picked_ways, way), tuple(map(add, loads, way.loads)))
                return
            self.plans += 1
            early, least_early = tasks(0, picked_ways)
            late, least_late = tasks(1, picked_ways)
            if least_early + least_late < room:
                forward = self.timing.shortest(early, room - least_late)
                if forward + least_late < room:
                    self.best = min(self.best, spent[2] + forward + self.timing.shortest(late, room - forward))

        look(0, tuple(only), tuple(sum(way.loads[place] for way in only) for place in range(2 * count)))


def assignment_of(schedule: Schedule) -> Assignment:
    """What a schedule was made of: read from what runs in it."""
    strategies = {name: operation.strategy for name, operation in schedule.operations.items()}
    inputs = {item.tensor: schedule.specs[item.tensor] for item in schedule.graph.inputs}
    reads = {}
    for item in schedule.instructions:
        if item.kind == "run":
            op = schedule.graph.op[item.of]
            reads.update(((op.name, place), value) for place, value in enumerate(item.reads) if value != op.inputs[place])
    reads.update(((f"output:{index}", 0), value) for index, (output, value) in enumerate(schedule.outputs) if value != output.tensor)
    return Assignment(inputs, strategies, tuple(schedule.layouts.values()), reads)
