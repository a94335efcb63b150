"""order: an assignment -> instructions in a legal order, without overlap.

Operators run as captured, forward before backward. A second run stands just before its first reader in backward. A reshard's steps stand
just before the first operator that reads it; those of outputs just after the output is made. Operators that run once a step, and reshards
that are made once, stand before everything. Every collective is waited for at once. An all-reduce is made in place where its source has no
other reader.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import NamedTuple

from autopar import pricing
from autopar.cost_models import Machine
from autopar.cost_models.collectives import CALLS, FROM_HOST, KINDS, TO_HOST
from autopar.graph import DTYPE_BYTES, Graph, Op, Tensor
from autopar.reshard import Shapes, Step, find_reshard
from autopar.rules import IN_ORDER, MemoryOrder, find_askers, find_fusable_additions, is_alias, reads_back
from autopar.schedule.assignment import AGAIN, FORWARD, OUTPUT, PHASES, Assignment, Layout, Moment
from autopar.schedule.collectives import Collective, Part
from autopar.schedule.deferred_loss import deferred_values
from autopar.schedule.instructions import BEFORE_ALL, COMPUTE, Cut, Instruction, Kind, Limits, Operation, Value
from autopar.schedule.memory_orders import MemoryOrders
from autopar.schedule.schedule import Schedule
from autopar.sharding import ShardingSpec, Strategy


def order(graph: Graph, assignment: Assignment, machine: Machine, limits: Limits, prices: Prices | None = None) -> Schedule:
    """The schedule of ``assignment`` in program order.

    Args:
        prices: of the graph on the machine, kept from earlier lists.

    Raises:
        AssertionError: the assignment is not consistent (a read whose spec is not the one that the strategy needs).
    """
    return _Writer(graph, assignment, machine, prices or Prices(graph, machine)).run(limits)


class _Priced(NamedTuple):
    """An operator's seconds and streams, whether it only views its source, and bytes of its results on a rank.

    Args:
        launches: kernels that the host issues; None where the host has no price.
        reads_back: whether the host reads values of it.
    """

    seconds: float
    stream: str
    alias: bool
    sizes: tuple[int, ...]
    launches: int | None
    reads_back: bool


class Prices:
    """The prices of operators and reshards of a graph on a machine, each computed once for all lists."""

    def __init__(self, graph: Graph, machine: Machine) -> None:
        self.graph, self.machine = graph, machine
        self._runs: dict[tuple[int, int, bool], tuple[Strategy, _Priced]] = {}
        """By kind of operator, identity of its strategy, which is held so that no other takes it, and whether it asks for rows at hand."""
        self._askers = find_askers(graph.ops)
        self._routes: dict[object, tuple[Leg, ...]] = {}
        """By shape, dtype and the two specs."""
        self.fusable = find_fusable_additions(graph) if machine.issue_seconds else {}
        self.orders = MemoryOrders(graph, machine)
        self._taken: dict[tuple[int, bool], Taken] = {}
        """By identity of the leg in ``_routes``, and whether its source is copied."""

    def run(self, op: Op, strategy: Strategy) -> _Priced:
        """The price of an operator; operators of one kind in one strategy share it."""
        asks = op.name in self._askers
        key = self.graph.kinds[op.name], id(strategy), asks
        if key not in self._runs:
            links = {link for inner in strategy.inner for link in self.machine.links(pricing.whole_axes(inner.axes, self.machine))}
            sizes = tuple(
                pricing.local_bytes(self.graph.tensors[tensor], spec, self.machine)
                for tensor, spec in zip(op.outputs, strategy.outputs, strict=True)
            )
            seconds = pricing.run_seconds(op, self.graph.tensors, strategy, self.machine)
            launches = pricing.launches(op, self.graph.tensors, strategy, self.machine, asks)
            waits = launches is not None and reads_back(op, self.graph.tensors, strategy, asks=asks)
            self._runs[key] = strategy, _Priced(seconds, "+".join((COMPUTE, *sorted(links))), is_alias(op), sizes, launches, waits)
        return self._runs[key][1]

    def route(self, tensor: Tensor, source: ShardingSpec, target: ShardingSpec, transfer: str = "") -> tuple[Leg, ...]:
        """See ``route_of``."""
        key = tensor.shape, tensor.dtype, source, target, transfer
        found = self._routes.get(key)
        if found is None:
            found = self._routes[key] = route_of(tensor, source, target, self.machine, transfer)
        return found

    def taken(self, call: Collective, leg: Leg) -> Taken:
        """See ``taken_by``: of a call of one part, that of a leg of a ``route``."""
        key = id(leg), call.parts[0].copied
        if key not in self._taken:
            self._taken[key] = taken_by(call, self.machine)
        return self._taken[key]


@dataclass
class _Writer:
    graph: Graph
    assignment: Assignment
    machine: Machine
    prices: Prices
    instructions: list[Instruction] = field(default_factory=list)
    operations: dict[str, Operation] = field(default_factory=dict)
    collectives: dict[str, Collective] = field(default_factory=dict)
    cuts: dict[str, Cut] = field(default_factory=dict)
    values: dict[str, Value] = field(default_factory=dict)
    layouts: dict[str, Layout] = field(default_factory=dict)

    def run(self, limits: Limits) -> Schedule:
        graph = self.graph
        self.reads = self.assignment.reads or {}
        self.waiting = {layout.value: layout for layout in self.assignment.layouts}
        self.late = deferred_values(graph, self.assignment, self.machine)
        self.number = count()
        self.before: dict[str, list[str]] = {}
        for layout in self.assignment.layouts:
            self.before.setdefault(layout.before, []).append(layout.value)
        self.place = {op.name: index for index, op in enumerate(graph.ops)}
        self.made_again = {tensor + AGAIN: graph.op[name] for name in self.assignment.again for tensor in graph.op[name].outputs}
        for item in graph.inputs:
            self._value(item.tensor, item.tensor, self.assignment.inputs[item.tensor])
        self._make_once()
        leaving: dict[str, list[str]] = {}
        for index, output in enumerate(graph.outputs):
            producer = graph.producer.get(output.tensor)
            leaving.setdefault(producer.name if producer else "", []).append(f"{OUTPUT}{index}")
        self._make_before(leaving.get("", ()))
        for op in phases_in_order(graph):
            if op.name in self.before:
                self._make_before((op.name,))
            if op.name not in self.operations:
                reads = self._reads(op)
                if op.phase != FORWARD:
                    self._run_again(reads)
                self._run(op, op.name, op.phase, reads)
            if op.name in leaving:
                self._make_before(leaving[op.name])
        outputs = tuple((output, self.reads.get((f"{OUTPUT}{index}", 0), output.tensor)) for index, output in enumerate(graph.outputs))
        self._reduce_in_place({value for _, value in outputs})
        self._join_additions()
        return Schedule(
            graph, self.machine, tuple(sorted(self.instructions, key=lambda item: PHASES.index(item.half))), self.operations,
            self.collectives, self.cuts, self.values, self.layouts, outputs, limits, self.assignment.states_on_host,
        )  # fmt: skip

    def _make_once(self) -> None:
        """The operators that run once a step, and the reshards that are made once, where it has several microbatches."""
        if self.graph.microbatches > 1:
            for op in self.graph.ops if self.assignment.once else ():
                if op.name in self.assignment.once:
                    self._run(op, op.name, FORWARD, self._reads(op))
            for layout in [layout for layout in self.assignment.layouts if layout.once]:
                self._make(layout.value, layout.before)
            self.instructions = [item._replace(microbatch=BEFORE_ALL) for item in self.instructions]

    def _make_before(self, readers: Iterable[str]) -> None:
        """The reshards that were said to be made here."""
        for reader in readers:
            for value in self.before.get(reader, ()):
                self._make(value, reader)

    def _value(self, name: str, tensor: str, spec: ShardingSpec, order: MemoryOrder = IN_ORDER) -> None:
        self.values[name] = Value(tensor, spec, pricing.local_bytes(self.graph.tensors[tensor], spec, self.machine), order)

    def _add(
        self, kind: Kind, phase: Moment, reads: tuple[str, ...], writes: tuple[str, ...], stream: str, seconds: float, size: int, of: str,
        launches: int | None = None, reads_back: bool | None = None,
    ) -> None:  # fmt: skip
        made = Instruction(
            next(self.number), kind, phase, reads, writes, stream, seconds, size, of, launches=launches, reads_back=reads_back
        )  # fmt: skip
        self.instructions.append(made)

    def _run_again(self, reads: Iterable[str]) -> None:
        """Adds the second runs that ``reads`` need, and the second runs that these need."""
        missing, found = list(reads), dict[str, Op]()
        while missing:
            value = missing.pop()
            while value in self.waiting:
                value = self.waiting[value].source
            op = self.made_again.get(value)
            if op is not None and op.name not in found and op.name + AGAIN not in self.operations:
                found[op.name] = op
                missing += self._reads_again(op)
        for name in sorted(found, key=self.place.__getitem__):
            self._make_before((name + AGAIN,))
            self._run(found[name], name + AGAIN, "recompute", self._reads_again(found[name]))

    def _reads(self, op: Op) -> tuple[str, ...]:
        """The values that an operator reads."""
        return tuple([self.reads.get((op.name, position), tensor) for position, tensor in enumerate(op.inputs)])

    def _reads_again(self, op: Op) -> tuple[str, ...]:
        """The values that a second run reads."""
        made = self.made_again
        return tuple(
            self.reads.get((op.name + AGAIN, position), tensor + AGAIN if tensor + AGAIN in made else tensor)
            for position, tensor in enumerate(op.inputs)
        )

    def _run(self, op: Op, name: str, phase: Moment, reads: tuple[str, ...]) -> None:
        strategy, suffix = self.assignment.strategies[op.name], AGAIN if phase == "recompute" else ""
        for value, spec in zip(reads, strategy.inputs, strict=True):
            if value in self.waiting:
                self._make(value, name)
            known = self.values[value].spec
            assert known is spec or known == spec, f"{name} reads {value} as {self.values[value].spec}, its strategy needs {spec}"
        writes = tuple([tensor + suffix for tensor in op.outputs]) if suffix else op.outputs
        priced = self.prices.run(op, strategy)
        orders, self.operations[name] = self.prices.orders.run(op, strategy, tuple([self.values[value].order for value in reads]))
        for value, tensor, spec, size, order in zip(writes, op.outputs, strategy.outputs, priced.sizes, orders, strict=True):
            self.values[value] = Value(tensor, spec, size, order)
        taken = 0 if priced.alias and reads and not self.operations[name].apart else sum(priced.sizes)
        self._add("run", phase, reads, writes, priced.stream, priced.seconds, taken, name, priced.launches, priced.reads_back or None)

    def _make(self, value: str, reader: str) -> None:
        """Adds the reshard that makes ``value``, and first the reshards of its source."""
        if value not in self.waiting:
            return
        layout = self.waiting[value]
        if layout.source in self.waiting:
            self._make(layout.source, reader)
        elif layout.source in self.made_again:
            self._run_again((layout.source,))
        del self.waiting[value]
        phase: Moment = "recompute" if layout.half != FORWARD and reader.endswith(AGAIN) else layout.half
        layout = self.layouts[value] = Layout(value, layout.tensor, layout.source, layout.spec, phase, reader, layout.on_host, layout.once)
        spec, order = self.values[layout.source].spec, self.values[layout.source].order
        assert spec is not None
        tensor, from_host = self.graph.tensors[layout.tensor], self.values[layout.source].host_bytes > 0
        route = self.prices.route(tensor, spec, layout.spec, transfer_kind(layout, from_host))
        if not route:
            self.cuts[value] = Cut(layout, None)
            self._add("slice", phase, (layout.source,), (value,), "", 0.0, 0, value)
        for part, leg in zip(parts_of(layout, spec, tensor, route, order), route, strict=True):
            last = part.target == value
            self.values[part.target] = Value(layout.tensor, layout.spec if last else None, part.target_bytes)
            if part.step.is_collective:
                late = value in self.late and not any(other.step.is_collective for other in route[part.number + 1 :])
                self._call(part._replace(late=True) if late else part, leg)
            else:
                self.cuts[part.target] = Cut(layout, part)
                self._add("slice", phase, (part.source,), (part.target,), "", 0.0, part.target_bytes, value)
        self._value(value, layout.tensor, layout.spec, IN_ORDER if route else order)
        if layout.on_host:
            self.values[value] = on_host(self.values[value])

    def _call(self, part: Part, leg: Leg) -> None:
        call = Collective(part.target, (part,))
        self.collectives[call.id] = call
        self.instructions += start_and_wait(call, self.prices.taken(call, leg), self.number)

    def _reduce_in_place(self, leaving: set[str]) -> None:
        """Lets an all-reduce write over its source: a value of the same segment, in memory of its own, with no other reader.

        Args:
            leaving: the values that leave.
        """
        sums = {call.parts[0].source for call in self.collectives.values() if CALLS[call.kind].in_place and not call.filled}
        if not sums:
            return
        readers = Counter(value for item in self.instructions for value in item.reads if value in sums)
        maker = {value: item for item in self.instructions if item.kind != "start" for value in item.writes if value in sums}
        for index, item in enumerate(self.instructions):
            call = self.collectives[item.of] if item.kind == "start" else None
            if call is None or item.reads[0] not in sums or readers[item.reads[0]] > 1 or item.reads[0] in leaving:
                continue
            if CALLS[call.kind].in_place and self._alone(maker.get(item.reads[0]), item):
                call = self.collectives[item.of] = replace(call, in_place=True)
                pair = item.id, self.instructions[index + 1].id
                self.instructions[index : index + 2] = start_and_wait(call, taken_by(call, self.machine), iter(pair))

    def _join_additions(self) -> None:
        """Additions that a contraction does are not issued: nothing is resharded in between, and nobody else reads the product."""
        fusable = self.prices.fusable
        if not fusable:
            return
        readers = Counter(value for item in self.instructions for value in item.reads)
        for index, item in enumerate(self.instructions):
            place = fusable.get(self.operations[item.of].op.name) if item.kind == "run" else None
            if place is None or readers[item.reads[place]] > 1:
                continue
            suffix = AGAIN if item.phase == "recompute" else ""
            if item.reads[place] == self.operations[item.of].op.inputs[place] + suffix:
                self.instructions[index] = item._replace(launches=0)

    def _alone(self, maker: Instruction | None, reader: Instruction) -> bool:
        """Whether the source of ``reader`` lies in order in memory of its own, of the same segment: a backward pass may run twice on
        results of forward."""
        if maker is None or maker.half != reader.half or not self.values[reader.reads[0]].order.in_order:
            return False
        if maker.kind == "run":
            operation = self.operations[maker.of]
            return not operation.strategy.inner and not is_alias(operation.op)
        return maker.kind == "wait" or self.cuts[maker.writes[0]].step is not None


class Leg(NamedTuple):
    """A step of a reshard, and a rank's shapes before and after it."""

    step: Step
    shapes: Shapes


def transfer_kind(layout: Layout, from_host: bool) -> str:
    """The copy that makes a layout: to the host or back; none where it stays on the device.

    Args:
        from_host: whether its source lies on the host.
    """
    assert not (layout.on_host and from_host), f"{layout.value} is made on the host, of {layout.source}, which lies there"
    return TO_HOST.name if layout.on_host else FROM_HOST.name if from_host else ""


def on_host(value: Value) -> Value:
    """A value as it lies on the host."""
    return value._replace(bytes=0, host_bytes=value.bytes, order=IN_ORDER)


def route_of(tensor: Tensor, source: ShardingSpec, target: ShardingSpec, machine: Machine, transfer: str = "") -> tuple[Leg, ...]:
    """The steps from one spec of a tensor to another, local ones too.

    Args:
        transfer: the copy to the host or back that it is instead, in the same spec.
    """
    if transfer:
        assert source == target, f"{tensor.name} is copied {transfer} as {source}, and read as {target}"
        shape, copied = source.local_shape(tensor.shape, machine.mesh.sizes), pricing.local_bytes(tensor, source, machine)
        step = Step(transfer, (), (), full_bytes=copied, seconds=machine.transfer_seconds(copied))
        return (Leg(step, Shapes(shape, shape, shape, shape, False, tensor.shape, (source, target), True)),)
    reshard = find_reshard(tensor.shape, DTYPE_BYTES[tensor.dtype], source, target, machine)
    assert reshard is not None, f"no reshard of {tensor.name} from {source} to {target}"
    return tuple(map(Leg, reshard.steps, reshard.shapes))


def parts_of(
    layout: Layout, spec: ShardingSpec, tensor: Tensor, route: Sequence[Leg], order: MemoryOrder = IN_ORDER
) -> tuple[Part, ...]:  # fmt: skip
    """The steps of a layout, made of its source in ``spec``; step n makes ``VALUE#n``, the last one ``VALUE``.

    Args:
        order: how its source lies; what the first step makes lies in order.
    """
    found, source, size = [], layout.source, DTYPE_BYTES[tensor.dtype]
    for number, (step, shapes) in enumerate(route, 1):
        target = layout.value if number == len(route) else f"{layout.value}#{number}"
        copied = number == 1 and step.kind in KINDS and not order.in_order and (order.repeats or KINDS[step.kind].role != "gather")
        found.append(Part(layout, number - 1, step, source, target, shapes, size, tensor.dtype, spec, copied=copied))
        source = target
    return tuple(found)


def steps_of(layout: Layout, source: Value, graph: Graph, machine: Machine) -> tuple[Part, ...]:
    """The steps that make ``layout`` of its source: see ``parts_of``."""
    tensor, spec = graph.tensors[layout.tensor], source.spec
    assert spec is not None
    route = route_of(tensor, spec, layout.spec, machine, transfer_kind(layout, source.host_bytes > 0))
    return parts_of(layout, spec, tensor, route, source.order)


class Taken(NamedTuple):
    """The links and seconds of a collective, its memory in flight, and seconds of copies and memory at its wait.

    Args:
        issued_in, issued_out: what the host issues for its start and for its wait; None where the host has no price.
    """

    links: str
    seconds: float
    bytes: int
    copies: float
    unpacked: int
    issued_in: int | None
    issued_out: int | None


def taken_by(call: Collective, machine: Machine) -> Taken:
    """The costs of a call. Calls whose parts differ only in names cost the same."""
    return Taken(
        "+".join(machine.call_streams(call.kind, call.axes)), call.seconds(machine), call.taken_bytes,
        machine.copy_seconds(call.copied_bytes, call.dtype), call.target_bytes if call.unpacks else 0,
        *((call.issued_in, call.issued_out) if machine.issue_seconds else (None, None)),
    )  # fmt: skip


def start_and_wait(call: Collective, taken: Taken, number: Iterator[int]) -> tuple[Instruction, Instruction]:
    """The two instructions of a collective."""
    sources, targets = tuple([part.source for part in call.parts]), tuple([part.target for part in call.parts])
    over = sources[0] if call.in_place else None
    start = Instruction(
        next(number), "start", call.phase, sources, targets, taken.links, taken.seconds, taken.bytes, call.id, over=over,
        launches=taken.issued_in,
    )  # fmt: skip
    stream = COMPUTE if taken.copies else ""
    wait = Instruction(
        next(number), "wait", call.phase, (), targets, stream, taken.copies, taken.unpacked, call.id, late=call.late or None,
        launches=taken.issued_out,
    )  # fmt: skip
    return start, wait


def phases_in_order(graph: Graph) -> list[Op]:
    """Operators as captured, forward before backward."""
    return sorted(graph.ops, key=lambda op: PHASES.index(op.phase))
