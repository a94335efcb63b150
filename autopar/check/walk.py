"""One pass over a plan in execution order: what is made, read and moved, in which specs, by which strategies."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import NamedTuple

from autopar.check.differences import Difference, close
from autopar.errors import AutoparError, FileError
from autopar.graph import DTYPE_BYTES, Graph, GraphInput, GraphOutput, Op, Tensor, from_json
from autopar.plan import CollectivePlan, OpPlan, Plan, ReshardPlan, TensorSpec
from autopar.reshard import find_reshard
from autopar.rules import ShardingRule, family, find_rule, flops, is_alias, strategies
from autopar.sharding import InnerCollective, ShardingSpec, Strategy
from autopar.timeline import instructions
from cost_models import Machine, Operator


class Expected(NamedTuple):
    """A collective as it follows from the specs; the fields of ``CollectivePlan``."""

    kind: str
    axes: tuple[str, ...]
    phase: str
    tensor: str
    value: str | None
    source: str
    target: str
    before: str
    bytes: int
    received_bytes_per_rank: int
    seconds: float

    @staticmethod
    def of(row: CollectivePlan) -> Expected:
        """A row of the plan."""
        return Expected(
            row.kind, row.axes, row.phase, row.tensor, row.value, row.from_spec, row.to_spec, row.before, row.bytes,
            row.received_bytes_per_rank, row.seconds,
        )  # fmt: skip

    def __str__(self) -> str:
        specs = f"{self.source!r} to {self.target!r}"
        return f"{self.kind} of {self.tensor} over {','.join(self.axes)}, {self.bytes} bytes ({specs}) before {self.before}"


@dataclass
class Walk:
    """One pass over the plan in execution order, with what it learns on the way.

    Args:
        tensors: every tensor as its producer writes it.
        specs: spec of every value made so far.
        tensor_of: the tensor behind each value.
        storage: the value whose storage each value shares.
        collectives: the collectives that follow from the specs.
        made, used: by storage, the index of the instruction that makes it and of the last that needs it.
        broken: the wiring cannot be followed, so that cost and memory cannot be recomputed.
    """

    plan: Plan
    machine: Machine
    tensors: dict[str, Tensor] = field(default_factory=dict)
    specs: dict[str, ShardingSpec] = field(default_factory=dict)
    tensor_of: dict[str, str] = field(default_factory=dict)
    storage: dict[str, str] = field(default_factory=dict)
    ops: list[Op] = field(default_factory=list)
    collectives: list[Expected] = field(default_factory=list)
    made: dict[str, int] = field(default_factory=dict)
    used: dict[str, int] = field(default_factory=dict)
    extra: dict[int, int] = field(default_factory=dict)
    compute: float = 0.0
    steps: int = 0
    broken: bool = False
    _rules: dict[object, dict[object, Strategy]] = field(default_factory=dict)

    def run(self) -> Iterator[Difference]:
        yield from self._entering()
        done: set[str] = set()
        order = list(instructions(self.plan))
        for index, row in enumerate(order):
            if isinstance(row, OpPlan):
                yield from self._op(index, row)
            else:
                done.add(row.value)
                yield from self._reshard(index, row)
        self.steps = len(order)
        for row in self.plan.reshards:
            if row.value not in done:
                self.broken = True
                yield Difference(f"reshards.{row.value}", f"it is made before {row.before!r} in {row.phase}, which the plan does not have")
        yield from self._leaving()
        yield from self._same_graph()
        yield from self._same_collectives()

    def _entering(self) -> Iterator[Difference]:
        for index, (kind, name, spec) in enumerate(self.plan.entering):
            where = f"{kind}s.{name}"
            if spec.index != index:
                yield Difference(where, f"its index is {spec.index}, its place is {index}")
            if spec.tensor in self.specs:
                self.broken = True
                yield Difference(where, f"tensor {spec.tensor} enters twice")
            yield from self._define(where, spec)
            if self.specs[spec.tensor].partial:
                yield Difference(where, f"{spec.spec} is partial; what enters is whole or split")
            self.storage[spec.tensor] = spec.tensor
            self.made[spec.tensor] = -1

    def _define(self, where: str, row: TensorSpec) -> Iterator[Difference]:
        """Takes a tensor in as its producer writes it."""
        if row.dtype not in DTYPE_BYTES:
            self.broken = True
            yield Difference(where, f"unknown dtype {row.dtype!r}")
        spec = ShardingSpec.parse(row.spec)
        yield from self._legal(where, row.shape, spec)
        self.tensors[row.tensor] = Tensor(row.tensor, row.shape, row.dtype)
        self.specs[row.tensor] = spec
        self.tensor_of[row.tensor] = row.tensor

    def _legal(self, where: str, shape: tuple[int, ...], spec: ShardingSpec) -> Iterator[Difference]:
        problem = spec.problem(shape, self.plan.sizes)
        if problem is None and spec.normalized(self.plan.sizes) != spec:
            problem = f"the spec {spec} names an axis of size 1"
        if problem is not None:
            self.broken = True
            yield Difference(where, problem)

    def _op(self, index: int, row: OpPlan) -> Iterator[Difference]:
        where = f"ops.{row.name}"
        for position, entry in enumerate(row.inputs):
            yield from self._read(f"{where}.inputs[{position}]", entry, entry.value or entry.tensor)
        for output in row.outputs:
            if output.tensor in self.specs:
                self.broken = True
                yield Difference(where, f"makes {output.tensor}, which already exists")
            yield from self._define(f"{where}.outputs", output)
        if self.broken:
            return
        op = _as_op(row)
        reads = [entry.value or entry.tensor for entry in row.inputs]
        shared = is_alias(op) and bool(reads)
        for name in op.outputs:
            self._make(index, name, self.storage[reads[0]] if shared else name)
        for value in (*reads, *op.outputs):
            self.used[self.storage[value]] = index
        self.ops.append(op)
        try:
            strategy = self._strategy(where, row, op)
        except (AutoparError, LookupError, TypeError, ValueError, ArithmeticError) as error:
            self.broken = True
            yield Difference(f"{where}.attributes", f"no rule fits them: {error}".partition("\n")[0])
            return
        if isinstance(strategy, Difference):
            yield strategy
            return
        seconds = self._operator_seconds(row, op, strategy)
        if not close(row.seconds, seconds):
            yield Difference(f"{where}.seconds", f"{row.seconds:.6g} in the plan, {seconds:.6g} recomputed")
        self.compute += seconds
        self.collectives += [self._inside(row, inner) for inner in strategy.inner]

    def _make(self, index: int, value: str, storage: str) -> None:
        self.storage[value] = storage
        self.made.setdefault(storage, index)

    def _read(self, where: str, entry: TensorSpec, value: str) -> Iterator[Difference]:
        """What is read exists, is this tensor, and has this spec."""
        known = self.tensors.get(entry.tensor)
        if known is None or value not in self.specs:
            self.broken = True
            yield Difference(where, f"reads {value}, which has not been made before it")
            return
        if (known.shape, known.dtype) != (entry.shape, entry.dtype):
            self.broken = True
            yield Difference(where, f"{entry.tensor} is {known.dtype}{list(known.shape)}, here {entry.dtype}{list(entry.shape)}")
        if self.tensor_of[value] != entry.tensor:
            self.broken = True
            yield Difference(where, f"reads {value}, which is a layout of {self.tensor_of[value]}, as {entry.tensor}")
        if self.specs[value] != ShardingSpec.parse(entry.spec):
            yield Difference(where, f"{value} has the spec {str(self.specs[value])!r}, it is read as {entry.spec!r}")

    def _strategy(self, where: str, row: OpPlan, op: Op) -> Strategy | Difference:
        """The strategy of the rules that the row names, or what is wrong with it."""
        rule = find_rule(op, self.tensors)
        offered = self._offered(rule, op)
        axes = {name: number for number, name in enumerate(self.plan.mesh)}
        split = row.factors or {}
        unknown = [axis for chosen in split.values() for axis in chosen if axis not in axes]
        if unknown:
            return Difference(f"{where}.factors", f"the mesh has no axis {unknown[0]!r}")
        key = _key(
            (ShardingSpec.parse(entry.spec) for entry in row.inputs),
            (ShardingSpec.parse(entry.spec) for entry in row.outputs),
            ((name, tuple(axes[axis] for axis in chosen)) for name, chosen in split.items()),
        )
        found = offered.get(key)
        if found is None:
            sides = [", ".join(entry.spec or "scalar" for entry in entries) for entries in (row.inputs, row.outputs)]
            specs = " -> ".join(sides)
            return Difference(where, f"{row.op} has no strategy {specs} with the factors {split}; its rule is {rule}")
        return found

    def _offered(self, rule: ShardingRule, op: Op) -> dict[object, Strategy]:
        if rule not in self._rules:
            operands = [self.tensors[name] for name in (*op.inputs, *op.outputs)]
            self._rules[rule] = {_key(s.inputs, s.outputs, s.factors): s for s in strategies(rule, operands, self.plan.sizes)}
        return self._rules[rule]

    def _operator_seconds(self, row: OpPlan, op: Op, strategy: Strategy) -> float:
        """Seconds of the operator as one rank runs it."""
        sizes = self.plan.sizes
        entries = (*row.inputs, *row.outputs)
        shapes = tuple(ShardingSpec.parse(entry.spec).local_shape(entry.shape, sizes) for entry in entries)
        moved = 0
        if not is_alias(op):
            moved = sum(math.prod(shape) * DTYPE_BYTES[entry.dtype] for entry, shape in zip(entries, shapes, strict=True))
        split, work = len(row.inputs), flops(op, self.tensors) / strategy.parts
        return self.machine.operator_seconds(Operator(row.op, family(op), entries[0].dtype, shapes[:split], shapes[split:], work, moved))

    def _reshard(self, index: int, row: ReshardPlan) -> Iterator[Difference]:
        where = f"reshards.{row.value}"
        source, target = ShardingSpec.parse(row.from_spec), ShardingSpec.parse(row.to_spec)
        if row.value in self.specs or row.value in self.tensors:
            self.broken = True
            yield Difference(where, "a value of this name already exists")
        if row.source not in self.specs or row.tensor not in self.tensors:
            self.broken = True
            yield Difference(where, f"is made from {row.source}, which has not been made before it")
            return
        if self.tensor_of[row.source] != row.tensor:
            self.broken = True
            yield Difference(where, f"is made from {row.source}, which is a layout of {self.tensor_of[row.source]}, as {row.tensor}")
        tensor = self.tensors[row.tensor]
        if self.specs[row.source] != source:
            yield Difference(where, f"{row.source} has the spec {str(self.specs[row.source])!r}, the reshard starts from {row.from_spec!r}")
        yield from self._legal(where, tensor.shape, target)
        self.specs[row.value], self.tensor_of[row.value] = target, row.tensor
        found = None if self.broken else find_reshard(tensor.shape, DTYPE_BYTES[tensor.dtype], source, target, self.machine)
        if found is None:
            if not self.broken:
                yield Difference(where, f"no collectives turn {row.from_spec!r} into {row.to_spec!r}")
            self.broken = True
            return
        self._make(index, row.value, row.value if found.steps else self.storage[row.source])
        for value in (row.source, row.value):
            self.used[self.storage[value]] = index
        self.extra[index] = found.temporary_bytes
        for step in found.steps:
            if step.is_collective:
                axes = tuple(map(self.machine.mesh.sub_axis_name, step.axes))
                counts = (round(step.full_bytes), round(step.received_bytes_per_rank))
                specs = (row.from_spec, row.to_spec)
                self.collectives.append(
                    Expected(step.kind, axes, row.phase, row.tensor, row.value, *specs, row.before, *counts, step.seconds)
                )

    def _inside(self, row: OpPlan, inner: InnerCollective) -> Expected:
        """A collective inside an operator, as the plan must list it."""
        parts = tuple(map(self.machine.mesh.whole, inner.axes))
        axes = tuple(map(self.machine.mesh.sub_axis_name, parts))
        received = self.machine.received_bytes(inner.kind, inner.bytes, math.prod(part.size for part in parts))
        seconds = self.machine.collective_seconds(inner.kind, inner.bytes, parts)
        first, specs = row.inputs[0], (row.inputs[0].spec, row.outputs[0].spec)
        counts = (round(inner.bytes), int(received))
        return Expected(inner.kind, axes, row.phase, first.tensor, None, *specs, row.name, *counts, seconds)

    def _same_collectives(self) -> Iterator[Difference]:
        if self.broken:
            return
        listing = map(Expected.of, self.plan.collectives)
        for number, (listed, expected) in enumerate(zip_longest(listing, self.collectives)):
            where = f"collectives[{number}]"
            if listed is None:
                yield Difference(where, f"missing: {expected}")
            elif expected is None:
                yield Difference(where, f"one too many: {listed}")
            elif listed[:-1] != expected[:-1]:
                yield Difference(where, f"{listed} in the plan, {expected} recomputed")
                return
            elif not close(listed.seconds, expected.seconds):
                yield Difference(f"{where}.seconds", f"{listed.seconds:.6g} in the plan, {expected.seconds:.6g} recomputed")

    def _leaving(self) -> Iterator[Difference]:
        homes: dict[str, TensorSpec] = {**self.plan.parameters, **self.plan.buffers}
        for index, (kind, name, row) in enumerate(self.plan.leaving):
            where = f"{kind}s.{name}"
            if row.index != index:
                yield Difference(where, f"its index is {row.index}, its place is {index}")
            yield from self._read(where, row, row.value or row.tensor)
            spec = ShardingSpec.parse(row.spec)
            if spec.partial:
                yield Difference(where, f"{row.spec} is partial; what leaves is whole or split")
            home = homes.get(name)
            if kind != "output" and home is not None and home.spec != row.spec:
                yield Difference(where, f"leaves as {row.spec!r}, {name} itself lies as {home.spec!r}")

    def _same_graph(self) -> Iterator[Difference]:
        """The operators, arguments and shapes are those that were captured."""
        if self.broken:
            return
        inputs = tuple(GraphInput(spec.tensor, kind, name) for kind, name, spec in self.plan.entering)
        outputs = tuple(GraphOutput(spec.tensor, kind, name) for kind, name, spec in self.plan.leaving)
        order = {row.name: number for number, row in enumerate(self.plan.ops)}
        ops = tuple(sorted(self.ops, key=lambda op: order[op.name]))
        found = Graph(self.plan.model.mode, self.tensors, inputs, ops, outputs).sha256
        if found != self.plan.model.graph_sha256:
            yield Difference("ops", f"their hash is {found[:12]}..., the plan was made for {self.plan.model.graph_sha256[:12]}...")


def _as_op(row: OpPlan) -> Op:
    attributes = row.attributes
    if set(attributes) != {"args", "kwargs"} or not isinstance(attributes["args"], list) or not isinstance(attributes["kwargs"], dict):
        raise FileError(f"ops.{row.name}.attributes: not the arguments of an operator", "undo the edit, or plan again")
    return Op(
        row.name, row.op, tuple(entry.tensor for entry in row.inputs), tuple(entry.tensor for entry in row.outputs),
        from_json(attributes["args"]), tuple((key, from_json(value)) for key, value in attributes["kwargs"].items()), row.module,
        "backward" if row.phase == "backward" else "forward",
    )  # fmt: skip


def _key(inputs: Iterable[ShardingSpec], outputs: Iterable[ShardingSpec], factors: Iterable[tuple[str, tuple[int, ...]]]) -> object:
    return tuple(inputs), tuple(outputs), frozenset((name, tuple(axes)) for name, axes in factors if axes)


def local_bytes(tensor: Tensor, spec: ShardingSpec, sizes: tuple[int, ...]) -> int:
    return math.prod(spec.local_shape(tensor.shape, sizes)) * DTYPE_BYTES[tensor.dtype]
