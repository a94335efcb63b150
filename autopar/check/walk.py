"""One pass over what a plan decides: what enters, what every operator and reshard makes, in which specs, by which strategies.

Operators are followed in the order of the file, those of forward first, then second runs, then backward, and reshards where they are
first read: what holds here holds in whatever order things run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from autopar.check.blocks import in_graph, misfit
from autopar.check.differences import Difference, count, seconds
from autopar.check.legs import Ends, Leg, legs, transfer
from autopar.check.memory_orders import MemoryOrders
from autopar.check.parts import halfway, illegal, largest
from autopar.cost_models import Machine, Operator
from autopar.errors import AutoparError, FileError
from autopar.graph import DTYPE_BYTES, Graph, GraphInput, GraphOutput, Op, Tensor, from_json
from autopar.plan import Plan
from autopar.reshard import find_reshard
from autopar.rows import OpPlan, ReshardPlan, TensorSpec, ValueSpec
from autopar.rules import (
    ShardingRule,
    axis_layout,
    bytes_moved,
    dispatched_results,
    family,
    find_rule,
    flops,
    kernel_launches,
    strategies,
    why_once,
)
from autopar.sharding import ShardingSpec, Strategy, lies_so

OUTPUT = "output:"
"""Prefix of the reader of something that leaves: ``output:0`` is the first."""
AGAIN = "@again"
"""Suffix of an operator's second run and of what it makes."""
TURN = ("forward", "recompute", "backward")
"""The phases in an order in which everything finds what it reads."""


def is_forward(phase: str) -> bool:
    """Whether what is of this phase stands in the forward half of the step; the rest shares the other half."""
    return phase == "forward"


@dataclass
class Walk:
    """One pass over a plan's rows, with what it learns on the way.

    Args:
        tensors: every tensor as its producer writes it.
        specs: spec of every value but those between the steps of a reshard.
        tensor_of: the tensor behind each value.
        ops: the operators, second runs among them.
        rows: the row of each, by name.
        strategies: of each operator, by name.
        seconds: of each operator without the collectives inside it, by name.
        legs: the steps of each reshard, by its value.
        sums: what is added to each sum over microbatches.
        hosted: the values that lie on the host.
        broken: the wiring cannot be followed, so that cost and memory cannot be recomputed.
    """

    plan: Plan
    machine: Machine
    tensors: dict[str, Tensor] = field(default_factory=dict)
    specs: dict[str, ShardingSpec] = field(default_factory=dict)
    tensor_of: dict[str, str] = field(default_factory=dict)
    ops: list[Op] = field(default_factory=list)
    rows: dict[str, OpPlan] = field(default_factory=dict)
    strategies: dict[str, Strategy] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    legs: dict[str, tuple[Leg, ...]] = field(default_factory=dict)
    sums: dict[str, str] = field(default_factory=dict)
    dispatched: set[str] = field(default_factory=set)
    hosted: set[str] = field(default_factory=set)
    broken: bool = False
    _rules: dict[object, dict[object, Strategy]] = field(default_factory=dict)
    _waiting: dict[str, ReshardPlan] = field(default_factory=dict)

    @cached_property
    def orders(self) -> MemoryOrders:
        """How values lie in memory, as the pass meets them."""
        return MemoryOrders(self.plan.sizes)

    def run(self) -> Iterator[Difference]:
        yield from self._entering()
        for reshard in self.plan.reshards:
            if reshard.value in self._waiting:
                self.broken = True
                yield Difference(f"reshards.{reshard.value}", "a value of this name already exists")
            self._waiting[reshard.value] = reshard
        for row in sorted(self.plan.ops, key=lambda row: TURN.index(row.phase)):
            yield from self._op(row)
        yield from self._sums()
        yield from self._leaving()
        for value in tuple(self._waiting):
            yield from self._make(value)
        if not self.broken:
            yield from self._first_readers()
            yield from self._same_graph()

    def local_bytes(self, value: str) -> int:
        """Bytes of a value with a spec on a rank."""
        return local_bytes(self.tensors[self.tensor_of[value]], self.specs[value], self.plan.sizes)

    def _entering(self) -> Iterator[Difference]:
        for index, (kind, name, spec) in enumerate(self.plan.entering):
            where = f"{kind}s.{name}"
            if spec.index != index:
                yield Difference(where, f"its index is {spec.index}, its place is {index}")
            if spec.tensor in self.specs:
                self.broken = True
                yield Difference(where, f"tensor {spec.tensor} enters twice")
            if (problem := misfit(spec, self.plan.sizes)) is not None:
                self.broken = True
                yield Difference(where, problem)
            yield from self._define(where, in_graph(spec, self.plan.sizes))
            if self.specs[spec.tensor].partial:
                yield Difference(where, f"{spec.spec} is partial; what enters is whole or split")

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
        problem = spec.problem(shape, self.plan.sizes) or illegal(shape, spec, self.plan.sizes)
        if problem is None and spec.normalized(self.plan.sizes) != spec:
            problem = f"the spec {spec} names an axis of size 1"
        if problem is None and spec.blocks:
            problem = f"the spec {spec} splits blocks; only a parameter that is held in so many has any"
        if problem is not None:
            self.broken = True
            yield Difference(where, problem)

    def _op(self, row: OpPlan) -> Iterator[Difference]:
        where = f"ops.{row.name}"
        if row.name in self.strategies:
            self.broken = True
            yield Difference(where, "an operator of this name already exists")
        for position, entry in enumerate(row.inputs):
            yield from self._read(f"{where}.inputs[{position}]", entry, entry.value or entry.tensor)
        for output in row.outputs:
            value = output.value or output.tensor
            if value in self.specs:
                self.broken = True
                yield Difference(where, f"makes {value}, which already exists")
            if row.phase == "recompute":
                self.specs[value], self.tensor_of[value] = ShardingSpec.parse(output.spec), output.tensor
            elif output.value is not None:
                self.broken = True
                yield Difference(where, f"makes {output.tensor} under the name {value}")
            else:
                yield from self._define(f"{where}.outputs", output)
        if row.phase == "recompute":
            yield from self._again(where, row)
        if self.broken:
            return
        op = _as_op(row)
        self.ops.append(op)
        self.rows[op.name] = row
        try:
            strategy = self._strategy(where, row, op)
        except (AutoparError, LookupError, TypeError, ValueError, ArithmeticError) as error:
            self.broken = True
            yield Difference(f"{where}.attributes", f"no rule fits them: {error}".partition("\n")[0])
            return
        if isinstance(strategy, Difference):
            self.broken = True
            yield strategy
            return
        self.strategies[op.name] = strategy
        self.dispatched.update(dispatched_results(op, self.tensors, self.dispatched))
        self.seconds[op.name] = self._operator_seconds(row, op, strategy)
        self.orders.run(row, op, strategy)
        yield from seconds(f"{where}.seconds", row.seconds, self.seconds[op.name])
        yield from count(f"{where}.times", row.times, self.times.get(row.name, self.plan.microbatches))

    @cached_property
    def times(self) -> Mapping[str, int]:
        """How often each operator runs in a step, by the schedule."""
        return {row.of: row.times(self.plan.microbatches) for row in self.plan.schedule if row.kind == "run"}

    def _sums(self) -> Iterator[Difference]:
        """What gradients of microbatches are summed in: each as what is added to it."""
        for place, row in enumerate(self.plan.schedule):
            if row.kind == "add" and len(row.reads) == 1 and len(row.writes) == 1:
                (value,), (total,) = row.reads, row.writes
                yield from self._make(value)
                if value not in self.specs or total in self.specs:
                    self.broken = True
                    what = f"adds {value}, which has not been made" if value not in self.specs else f"makes {total}, which already exists"
                    yield Difference(f"schedule[{place}]", what)
                    continue
                self.specs[total], self.tensor_of[total] = self.specs[value], self.tensor_of[value]
                self.sums[total] = value

    def _again(self, where: str, row: OpPlan) -> Iterator[Difference]:
        """A second run is that of an operator of forward, which may run twice, and the same but for the values it reads and makes."""
        first = self.rows.get(row.name.removesuffix(AGAIN))
        if first is None or not row.name.endswith(AGAIN) or first.phase != "forward":
            self.broken = True
            yield Difference(where, "is of phase recompute, and no operator of forward runs a second time under this name")
            return
        for key in ("op", "attributes", "factors"):
            if getattr(row, key) != getattr(first, key):
                self.broken = True
                yield Difference(f"{where}.{key}", f"{getattr(row, key)!r}, the first run has {getattr(first, key)!r}")
        for side in ("inputs", "outputs"):
            if list(map(_place, getattr(row, side))) != list(map(_place, getattr(first, side))):
                self.broken = True
                yield Difference(f"{where}.{side}", "their tensors and specs are not those of the first run")
        for entry in row.outputs:
            if entry.value != entry.tensor + AGAIN:
                self.broken = True
                yield Difference(f"{where}.outputs", f"makes {entry.tensor} as {entry.value!r}, not as {entry.tensor + AGAIN!r}")
        reason = why_once(_as_op(row))
        if reason:
            yield Difference(where, f"{row.op} may not run a second time: {reason}")

    def _read(self, where: str, entry: TensorSpec, value: str) -> Iterator[Difference]:
        """What is read exists, is this tensor, and has this spec."""
        yield from self._make(value)
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
        if value in self.hosted:
            self.broken = True
            yield Difference(where, f"reads {value}, which lies on the host")
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
        return self._not_on_axes(where, row, op) or found

    def _not_on_axes(self, where: str, row: OpPlan, op: Op) -> Difference | None:
        """A problem of an operand over the axes whose layout the model itself gives."""
        layout, mesh = axis_layout(op), dict(self.plan.mesh)
        if layout is None:
            return None
        if problem := layout.problem(row.inputs[0].shape, mesh):
            return Difference(where, f"the model asks for {layout}: {problem}")
        if not lies_so(ShardingSpec.parse(row.inputs[0].spec), layout.on(tuple(mesh), self.plan.sizes)):
            return Difference(where, f"reads {row.inputs[0].spec!r}, the model asks for {layout}")
        return None

    def _offered(self, rule: ShardingRule, op: Op) -> dict[object, Strategy]:
        if rule not in self._rules:
            operands = [self.tensors[name] for name in (*op.inputs, *op.outputs)]
            self._rules[rule] = {_key(s.inputs, s.outputs, s.factors): s for s in strategies(rule, operands, self.plan.sizes)}
        return self._rules[rule]

    def _operator_seconds(self, row: OpPlan, op: Op, strategy: Strategy) -> float:
        """Seconds of the operator as one rank runs it."""
        sizes = self.plan.sizes
        entries = (*row.inputs, *row.outputs)
        shapes = tuple(largest(entry.shape, ShardingSpec.parse(entry.spec), sizes) for entry in entries)
        sizes_of = [math.prod(shape) * DTYPE_BYTES[entry.dtype] for entry, shape in zip(entries, shapes, strict=True)]
        split, work = len(row.inputs), flops(op, self.tensors) / strategy.parts
        moved = bytes_moved(op, sizes_of[:split], sizes_of[split:])
        kernels, dtype, turns = kernel_launches(op, self.tensors), entries[0].dtype, strategy.turns
        moved, kernels = moved * turns, kernels * turns
        whole = self.machine.operator_seconds(Operator(row.op, family(op), dtype, shapes[:split], shapes[split:], work, moved, kernels))
        return whole + self.machine.merge_seconds(strategy.merged, turns, dtype)

    def storage_bytes(self, value: str) -> int:
        """Bytes on a rank of what came in or is a sum: of an input that is cut, of all microbatches."""
        return self.local_bytes(value) * self.plan.parts(value)

    def _make(self, value: str) -> Iterator[Difference]:
        """Follows the reshard that makes ``value``, if one does, and those it is made from."""
        chain: list[ReshardPlan] = []
        while value in self._waiting:
            chain.append(self._waiting.pop(value))
            value = chain[-1].source
        for row in reversed(chain):
            yield from self._reshard(row)

    def _reshard(self, row: ReshardPlan) -> Iterator[Difference]:
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
            self.broken = True
            yield Difference(where, f"{row.source} has the spec {str(self.specs[row.source])!r}, the reshard starts from {row.from_spec!r}")
        if row.tensor in self.dispatched and source != target:
            yield Difference(where, f"{row.tensor} holds rows of experts, as many as chose them, which no collective can cut or join")
        yield from self._legal(where, tensor.shape, target)
        self.specs[row.value], self.tensor_of[row.value] = target, row.tensor
        if self.broken:
            return
        itemsize = DTYPE_BYTES[tensor.dtype]
        if row.on_host or row.source in self.hosted:
            yield from self._transfer(where, row, source, target)
            return
        middle = halfway(tensor.shape, source, target, self.plan.sizes)
        stretches = [(source, target)] if middle is None else [(source, middle), (middle, target)]
        found = [find_reshard(tensor.shape, itemsize, *ends, self.machine) for ends in stretches]
        if None in found:
            self.broken = True
            yield Difference(where, f"no collectives turn {row.from_spec!r} into {row.to_spec!r}")
            return
        ways = [(Ends(tensor.shape, *ends, self.plan.sizes), way.steps) for ends, way in zip(stretches, found, strict=True) if way]
        order = self.orders.reshard(row, moves=any(way for _, way in ways))
        self.legs[row.value] = tuple(legs(row, ways, itemsize, tensor.dtype, order))
        yield from self._sent(where, self.legs[row.value])

    def _transfer(self, where: str, row: ReshardPlan, source: ShardingSpec, target: ShardingSpec) -> Iterator[Difference]:
        """A copy to the host or back keeps the spec; what is copied to the host was on the device, and fills all of its memory."""
        tensor, problem = self.tensors[row.tensor], None
        if source != target:
            problem = f"turns {row.from_spec!r} into {row.to_spec!r}, a copy to the host or back turns nothing"
        elif row.on_host and (row.source in self.hosted or row.phase != "forward"):
            problem = "is copied to the host from there, or not in forward"
        elif self.machine.hardware.host is None:
            problem = "the plan's hardware has no links.host, by which it is copied"
        elif self.orders.reshard(row, moves=True).repeats:
            problem = f"{row.source} is a view that repeats, and is not copied to the host"
        if problem is not None:
            self.broken = True
            yield Difference(where, problem)
            return
        if row.on_host:
            self.hosted.add(row.value)
        shape = largest(tensor.shape, source, self.plan.sizes)
        self.legs[row.value] = (transfer(row, shape, DTYPE_BYTES[tensor.dtype], tensor.dtype, self.machine),)

    def _sent(self, where: str, made: Iterable[Leg]) -> Iterator[Difference]:
        """What is sent is what the shapes on a rank say."""
        for leg in made:
            if leg.step is not None and leg.is_collective and round(leg.step.full_bytes) != leg.on_group:
                self.broken = True
                yield Difference(where, f"step {leg.number} moves {round(leg.step.full_bytes)} bytes, parts on a rank make {leg.on_group}")

    def _first_readers(self) -> Iterator[Difference]:
        """``before`` of each reshard is an operator or output of its phase, and no operator that reads the value was captured before
        it; where a second run stands is the schedule's to say."""
        again = {row.name for row in self.plan.recomputed}
        captured = sorted(self.plan.captured, key=lambda row: row.phase != "forward")
        place = {row.name: float(index) for index, row in enumerate(captured)}
        maker = {entry.tensor: place[row.name] for row in captured for entry in row.outputs}
        place |= {f"{OUTPUT}{index}": maker.get(row.tensor, -1.0) + 0.5 for index, (_, _, row) in enumerate(self.plan.leaving)}
        readers = [(row.name, entry.value) for row in captured for entry in row.inputs]
        first: dict[str, str] = {}
        for reader, value in sorted(readers, key=lambda item: place[item[0]]):
            while value in self.legs:
                if value in first:
                    break
                first[value] = reader
                value = self.legs[value][0].row.source
        for row in self.plan.reshards:
            if row.before in again or row.phase == "recompute":
                if row.before not in again or row.phase != "recompute":
                    yield Difference(f"reshards.{row.value}", f"it is of phase {row.phase}, made before {row.before}")
            elif row.before not in place:
                yield Difference(f"reshards.{row.value}", f"it is made before {row.before!r}, which the plan does not have")
            elif row.value in first and place[first[row.value]] < place[row.before]:
                yield Difference(f"reshards.{row.value}", f"it is made before {row.before}, {first[row.value]} reads it earlier")

    def _leaving(self) -> Iterator[Difference]:
        homes = {name: in_graph(spec, self.plan.sizes) for name, spec in {**self.plan.parameters, **self.plan.buffers}.items()}
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
        found = self.captured.sha256
        if found != self.plan.model.graph_sha256:
            yield Difference("ops", f"their hash is {found[:12]}..., the plan was made for {self.plan.model.graph_sha256[:12]}...")

    @cached_property
    def captured(self) -> Graph:
        """The operators as captured, without second runs."""
        inputs = tuple(GraphInput(spec.tensor, kind, name) for kind, name, spec in self.plan.entering)
        outputs = tuple(GraphOutput(spec.tensor, kind, name) for kind, name, spec in self.plan.leaving)
        order = {row.name: number for number, row in enumerate(self.plan.ops)}
        ops = tuple(sorted((op for op in self.ops if self.rows[op.name].phase != "recompute"), key=lambda op: order[op.name]))
        return Graph(self.plan.model.mode, self.tensors, inputs, ops, outputs)


def _as_op(row: OpPlan) -> Op:
    attributes = row.attributes
    if set(attributes) != {"args", "kwargs"}:
        raise FileError(f"ops.{row.name}.attributes: not the arguments of an operator", "undo the edit, or plan again")
    return Op(
        row.name, row.op, tuple(entry.tensor for entry in row.inputs), tuple(entry.tensor for entry in row.outputs),
        from_json(attributes["args"]), tuple((key, from_json(value)) for key, value in attributes["kwargs"].items()), row.module,
        "backward" if row.phase == "backward" else "forward",
    )  # fmt: skip


def _place(entry: ValueSpec) -> object:
    return entry.tensor, entry.shape, entry.dtype, entry.spec


def _key(inputs: Iterable[ShardingSpec], outputs: Iterable[ShardingSpec], factors: Iterable[tuple[str, tuple[int, ...]]]) -> object:
    return tuple(inputs), tuple(outputs), frozenset((name, tuple(axes)) for name, axes in factors if axes)


def local_bytes(tensor: Tensor, spec: ShardingSpec, sizes: tuple[int, ...]) -> int:
    return math.prod(largest(tensor.shape, spec, sizes)) * DTYPE_BYTES[tensor.dtype]
