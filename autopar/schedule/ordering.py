"""order: an assignment -> instructions in an order that is right, without overlap.

Operators run as captured, forward before backward. A second run stands just before the first operator of backward that needs what it
makes; several for one reader as captured. A reshard's steps stand just before the first operator that reads it (those of outputs just
after what they take out is made), every collective waited for at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count

from autopar import pricing
from autopar.graph import DTYPE_BYTES, Graph, Op
from autopar.reshard import Step, find_reshard
from autopar.rules import is_alias
from autopar.schedule.assignment import AGAIN, OUTPUT, Assignment, Layout, Moment
from autopar.schedule.instructions import COMPUTE, Collective, Cut, Instruction, Limits, Operation, Part, Schedule, Value
from autopar.sharding import ShardingSpec
from cost_models import Machine


def order(graph: Graph, assignment: Assignment, machine: Machine, limits: Limits) -> Schedule:
    """The schedule of ``assignment`` in program order.

    Raises:
        AssertionError: the assignment is not consistent (a read whose spec is not what the strategy needs).
    """
    return _Writer(graph, assignment, machine).run(limits)


@dataclass
class _Writer:
    graph: Graph
    assignment: Assignment
    machine: Machine
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
        self.number = count()
        self.before: dict[str, list[str]] = {}
        for layout in self.assignment.layouts:
            self.before.setdefault(layout.before, []).append(layout.value)
        self.place = {op.name: index for index, op in enumerate(graph.ops)}
        self.made_again = {tensor + AGAIN: graph.op[name] for name in self.assignment.again for tensor in graph.op[name].outputs}
        for item in graph.inputs:
            self._value(item.tensor, item.tensor, self.assignment.inputs[item.tensor])
        leaving: dict[str, list[str]] = {}
        for index, output in enumerate(graph.outputs):
            producer = graph.producer.get(output.tensor)
            leaving.setdefault(producer.name if producer else "", []).append(f"{OUTPUT}{index}")
        self._make_before(leaving.get("", ()))
        for op in phases_in_order(graph):
            self._make_before((op.name,))
            reads = tuple(self.reads.get((op.name, position), tensor) for position, tensor in enumerate(op.inputs))
            if op.phase == "backward":
                self._run_again(reads)
            self._run(op, op.name, op.phase, reads)
            self._make_before(leaving.get(op.name, ()))
        outputs = tuple((output, self.reads.get((f"{OUTPUT}{index}", 0), output.tensor)) for index, output in enumerate(graph.outputs))
        return Schedule(
            graph, self.machine, tuple(sorted(self.instructions, key=lambda item: item.half == "backward")), self.operations,
            self.collectives, self.cuts, self.values, self.layouts, outputs, limits,
        )  # fmt: skip

    def _make_before(self, readers: Iterable[str]) -> None:
        """The reshards that were said to be made here."""
        for reader in readers:
            for value in self.before.get(reader, ()):
                self._make(value, reader)

    def _value(self, name: str, tensor: str, spec: ShardingSpec) -> None:
        self.values[name] = Value(tensor, spec, pricing.local_bytes(self.graph.tensors[tensor], spec, self.machine))

    def _add(self, kind: str, phase: Moment, **more: object) -> None:
        self.instructions.append(Instruction(next(self.number), kind, phase, **more))  # type: ignore[arg-type]

    def _run_again(self, reads: Iterable[str]) -> None:
        """The second runs that ``reads`` need, and those that these need."""
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

    def _reads_again(self, op: Op) -> tuple[str, ...]:
        """What a second run reads."""
        made = self.made_again
        return tuple(
            self.reads.get((op.name + AGAIN, position), tensor + AGAIN if tensor + AGAIN in made else tensor)
            for position, tensor in enumerate(op.inputs)
        )

    def _run(self, op: Op, name: str, phase: Moment, reads: tuple[str, ...]) -> None:
        strategy, suffix = self.assignment.strategies[op.name], AGAIN if phase == "recompute" else ""
        for value, spec in zip(reads, strategy.inputs, strict=True):
            self._make(value, name)
            assert self.values[value].spec == spec, f"{name} reads {value} as {self.values[value].spec}, its strategy needs {spec}"
        writes = tuple(tensor + suffix for tensor in op.outputs)
        for value, tensor, spec in zip(writes, op.outputs, strategy.outputs, strict=True):
            self._value(value, tensor, spec)
        self.operations[name] = Operation(op, strategy)
        seconds = pricing.compute_seconds(op, self.graph.tensors, strategy, self.machine)
        inside = pricing.inner_seconds(strategy, self.machine)
        links = [link for inner in strategy.inner for link in self.machine.links(pricing.whole_axes(inner.axes, self.machine))]
        taken = 0 if is_alias(op) and reads else sum(self.values[value].bytes for value in writes)
        self._add(
            "run", phase, reads=reads, writes=writes, seconds=seconds + inside, bytes=taken, of=name,
            stream="+".join(dict.fromkeys((COMPUTE, *sorted(links)))),
        )  # fmt: skip

    def _make(self, value: str, reader: str) -> None:
        """The reshard that makes ``value``, and those it is made from, unless it is there or is none."""
        if value not in self.waiting:
            return
        layout = self.waiting[value]
        if layout.source in self.waiting:
            self._make(layout.source, reader)
        elif layout.source in self.made_again:
            self._run_again((layout.source,))
        del self.waiting[value]
        phase: Moment = "forward" if layout.half == "forward" else "recompute" if reader.endswith(AGAIN) else "backward"
        layout = self.layouts[value] = replace(layout, before=reader, phase=phase)
        spec = self.values[layout.source].spec
        assert spec is not None
        steps = steps_of(layout, spec, self.graph, self.machine)
        if not steps:
            self.cuts[value] = Cut(layout, None)
            self._add("slice", phase, reads=(layout.source,), writes=(value,), of=value)
        for part in steps:
            last = part.target == value
            self.values[part.target] = Value(layout.tensor, layout.spec if last else None, part.target_bytes)
            if part.step.is_collective:
                self._call(part)
            else:
                self.cuts[part.target] = Cut(layout, part.step)
                self._add("slice", phase, reads=(part.source,), writes=(part.target,), bytes=part.target_bytes, of=value)
        self._value(value, layout.tensor, layout.spec)

    def _call(self, part: Part) -> None:
        call = Collective(part.target, (part,))
        self.collectives[call.id] = call
        self.instructions += start_and_wait(call, self.machine, self.number)


def steps_of(layout: Layout, spec: ShardingSpec, graph: Graph, machine: Machine) -> tuple[Part, ...]:
    """The steps that make ``layout`` of its source in ``spec``, local ones too; step n makes ``VALUE#n``, the last one ``VALUE``."""
    tensor = graph.tensors[layout.tensor]
    itemsize = DTYPE_BYTES[tensor.dtype]
    reshard = find_reshard(tensor.shape, itemsize, spec, layout.spec, machine)
    assert reshard is not None, f"no reshard of {layout.tensor} from {spec} to {layout.spec}"
    found, shape, source = [], spec.local_shape(tensor.shape, machine.mesh.sizes), layout.source
    for number, step in enumerate(reshard.steps):
        target = layout.value if number == len(reshard.steps) - 1 else f"{layout.value}#{number + 1}"
        after = shape_after(shape, step)
        found.append(Part(layout, number, step, source, target, shape, after, itemsize, tensor.dtype, spec))
        shape, source = after, target
    return tuple(found)


def start_and_wait(call: Collective, machine: Machine, number: Iterator[int]) -> tuple[Instruction, Instruction]:
    """The two instructions of a collective."""
    sources, targets = tuple(part.source for part in call.parts), tuple(part.target for part in call.parts)
    start = Instruction(
        next(number), "start", call.phase, sources, targets, "+".join(machine.links(call.axes)), call.seconds(machine),
        call.staging_bytes + (0 if call.unpacks else call.target_bytes), call.id,
    )  # fmt: skip
    taken, seconds = call.target_bytes if call.unpacks else 0, machine.copy_seconds(call.copied_bytes, call.dtype)
    return start, Instruction(next(number), "wait", call.phase, (), targets, COMPUTE if seconds else "", seconds, taken, call.id)


def phases_in_order(graph: Graph) -> list[Op]:
    """Operators as captured, forward before backward."""
    return sorted(graph.ops, key=lambda op: op.phase == "backward")


def shape_after(shape: tuple[int, ...], step: Step) -> tuple[int, ...]:
    """A rank's shape after one step of a reshard."""
    parts = 1
    for axis in step.axes:
        parts *= axis.size
    changed = list(shape)
    if step.kind in ("slice", "reduce_scatter", "all_to_all"):
        changed[step.dims[-1]] //= parts
    if step.kind in ("all_gather", "all_to_all"):
        changed[step.dims[0]] *= parts
    return tuple(changed)
