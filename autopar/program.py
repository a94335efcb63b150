"""Program: the instructions every rank runs, made from a graph and an assignment of strategies. No torch.

The plan's list of collectives, its predicted time and its peak memory are read off this program, and the runtime executes
the same instructions: what is priced is what is run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from autopar import pricing
from autopar.graph import DTYPE_BYTES, Graph, GraphInput, GraphOutput, Op, Phase
from autopar.reshard import Reshard, find_reshard
from autopar.rules import is_alias
from autopar.sharding import ShardingSpec, Strategy
from cost_models import Machine, SubAxis, optimizer_bytes

OUTPUT = "output:"
"""Prefix of the reader name of a graph output: ``output:0`` is the first entry of ``Graph.outputs``."""


@dataclass(frozen=True)
class Layout:
    """A tensor in a further spec, made once and shared by its readers.

    Args:
        value: unique name of the resharded value.
        tensor: the graph tensor.
        source: the value it is made from: the tensor's own name, or another layout's.
        spec: its spec.
        phase: when it is made.
        before: the operator just before which it is made, or ``output:N``: just after that output's tensor is made.
    """

    value: str
    tensor: str
    source: str
    spec: ShardingSpec
    phase: Phase
    before: str


@dataclass(frozen=True)
class Assignment:
    """What a search decides.

    Args:
        inputs: spec of each graph input, by tensor name.
        strategies: strategy of each operator, by name.
        layouts: the reshards, in any order.
        reads: (operator or ``output:N``, input position) -> value read; what is absent reads the tensor as it was made.
    """

    inputs: Mapping[str, ShardingSpec]
    strategies: Mapping[str, Strategy]
    layouts: tuple[Layout, ...] = ()
    reads: Mapping[tuple[str, int], str] | None = None


@dataclass(frozen=True)
class Run:
    """Run ``op`` on local parts under ``strategy``, reading these values."""

    op: Op
    strategy: Strategy
    reads: tuple[str, ...]

    @property
    def writes(self) -> tuple[str, ...]:
        return self.op.outputs

    @property
    def phase(self) -> Phase:
        return self.op.phase


@dataclass(frozen=True)
class Move:
    """Reshard one value into ``layout``."""

    layout: Layout
    reshard: Reshard

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.layout.source,)

    @property
    def writes(self) -> tuple[str, ...]:
        return (self.layout.value,)

    @property
    def phase(self) -> Phase:
        return self.layout.phase


Instruction = Run | Move


@dataclass(frozen=True)
class Collective:
    """One collective of the program, as the plan lists it.

    ``source`` and ``target`` are the specs of the whole reshard (or of the operator's input and output when it runs inside one);
    ``full_bytes`` is the gathered or reduced tensor on its group.
    """

    kind: str
    axes: tuple[SubAxis, ...]
    phase: Phase
    tensor: str
    source: str
    target: str
    before: str
    full_bytes: int
    received_bytes_per_rank: int
    seconds: float


@dataclass(frozen=True)
class Memory:
    """Peak bytes on one rank, and what is live at the peak."""

    peak: int
    parameters: int
    gradients: int
    optimizer: int
    activations: int
    temporaries: int
    at: str
    biggest: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Program:
    """Instructions in execution order, forward first.

    Args:
        specs: spec of every value.
        outputs: the graph's outputs with the value that leaves for each.
    """

    graph: Graph
    machine: Machine
    instructions: tuple[Instruction, ...]
    specs: Mapping[str, ShardingSpec]
    outputs: tuple[tuple[GraphOutput, str], ...]

    @cached_property
    def tensor_of(self) -> Mapping[str, str]:
        """The graph tensor behind each value."""
        found = {name: name for name in self.graph.tensors}
        found.update({move.layout.value: move.layout.tensor for move in self.instructions if isinstance(move, Move)})
        return found

    def local_bytes(self, value: str) -> int:
        """Bytes of a value on one rank."""
        return pricing.local_bytes(self.graph.tensors[self.tensor_of[value]], self.specs[value], self.machine)

    def collectives(self) -> Iterator[Collective]:
        """Every collective in execution order; local steps are not collectives."""
        for item in self.instructions:
            if isinstance(item, Move):
                layout, reshard = item.layout, item.reshard
                for step in reshard.steps:
                    if step.is_collective:
                        yield Collective(
                            step.kind, step.axes, layout.phase, layout.tensor, str(reshard.source), str(reshard.target),
                            layout.before, round(step.full_bytes), round(step.received_bytes_per_rank), step.seconds,
                        )  # fmt: skip
                continue
            for inner in item.strategy.inner:
                axes = pricing.whole_axes(inner.axes, self.machine)
                size = self.machine.group(axes).size
                yield Collective(
                    inner.kind, axes, item.phase, item.op.inputs[0], str(item.strategy.inputs[0]), str(item.strategy.outputs[0]),
                    item.op.name, inner.bytes, int(self.machine.received_bytes(inner.kind, inner.bytes, size)),
                    self.machine.collective_seconds(inner.kind, inner.bytes, axes),
                )  # fmt: skip

    def compute_seconds(self) -> float:
        """Sum over operators, in sequence."""
        runs = (item for item in self.instructions if isinstance(item, Run))
        return sum(pricing.compute_seconds(run.op, self.graph.tensors, run.strategy, self.machine) for run in runs)

    def communication_seconds(self) -> float:
        """Sum over collectives, in sequence."""
        return sum(item.seconds for item in self.collectives())

    def optimizer_seconds(self, optimizer: str) -> float:
        """One step of the optimizer on the local shards of trained parameters."""
        return sum(self._optimizer_seconds(item, optimizer) for item in self.graph.inputs if item.trained)

    def _optimizer_seconds(self, item: GraphInput, optimizer: str) -> float:
        tensor = self.graph.tensors[item.tensor]
        return self.machine.optimizer_seconds(optimizer, self.local_bytes(item.tensor) // DTYPE_BYTES[tensor.dtype], tensor.dtype)

    @cached_property
    def storage(self) -> Mapping[str, str]:
        """The value whose storage each value shares: itself, or what it is a view of."""
        root = {item.tensor: item.tensor for item in self.graph.inputs}
        for item in self.instructions:
            if isinstance(item, Move):
                value = item.layout.value
                root[value] = value if item.reshard.steps else root[item.layout.source]
            else:
                shared = is_alias(item.op) and bool(item.reads)
                root.update((name, root[item.reads[0]] if shared else name) for name in item.op.outputs)
        return root

    @cached_property
    def last_use(self) -> Mapping[str, int]:
        """Index of the last instruction that needs each storage; ``len(instructions)`` for what leaves or came in."""
        last: dict[str, int] = {}
        for index, item in enumerate(self.instructions):
            for value in (*item.reads, *item.writes):
                last[self.storage[value]] = index
        for value in [value for _, value in self.outputs] + [item.tensor for item in self.graph.inputs]:
            last[self.storage[value]] = len(self.instructions)
        return last

    def memory(self, optimizer: str) -> Memory:
        """Peak bytes on one rank by liveness, over forward, backward and the optimizer's step."""
        graph = self.graph
        parameters = {i.tensor: self.local_bytes(i.tensor) for i in graph.inputs if i.kind in ("parameter", "buffer", "constant")}
        states = sum(
            optimizer_bytes(
                optimizer, self.local_bytes(i.tensor) // DTYPE_BYTES[graph.tensors[i.tensor].dtype], graph.tensors[i.tensor].dtype
            )
            for i in graph.inputs
            if i.trained
        )
        gradients = {self.storage[value] for output, value in self.outputs if output.kind == "gradient"} - set(parameters)
        live = {i.tensor: self.local_bytes(i.tensor) for i in graph.inputs if i.tensor not in parameters}
        freed: dict[int, list[str]] = {}
        for value, index in self.last_use.items():
            freed.setdefault(index, []).append(value)
        total, best = sum(live.values()), -1
        peak: tuple[int, dict[str, int], int] = (-1, {}, 0)
        for index, item in enumerate(self.instructions):
            for value in item.writes:
                if self.storage[value] == value:
                    live[value] = self.local_bytes(value)
                    total += live[value]
            extra = item.reshard.temporary_bytes if isinstance(item, Move) else 0
            if total + extra > best:
                best, peak = total + extra, (index, dict(live), extra)
            for value in freed.get(index, ()):
                total -= live.pop(value, 0)
        if not self.instructions or total > best:
            best, peak = total, (len(self.instructions), dict(live), 0)
        index, at_peak, extra = peak
        grads = sum(size for value, size in at_peak.items() if value in gradients)
        where = self.instructions[index].writes[0] if 0 <= index < len(self.instructions) else "the optimizer's step"
        items = sorted({**at_peak, **parameters}.items(), key=lambda pair: (-pair[1], pair[0]))
        return Memory(
            best + sum(parameters.values()) + states, sum(parameters.values()), grads, states,
            sum(at_peak.values()) - grads, extra, where, tuple(items[:10]),
        )  # fmt: skip


def build_program(graph: Graph, assignment: Assignment, machine: Machine) -> Program:
    """The program of ``assignment``: layouts are made just before their first reader, those of outputs just after the output is
    made (so that a gradient is reduced at once), and forward operators run before backward ones.

    Raises:
        AssertionError: when the assignment is not consistent (a read whose spec is not what the strategy needs).
    """
    reads = assignment.reads or {}
    layouts = {layout.value: layout for layout in assignment.layouts}
    before: dict[str, list[Layout]] = {}
    for layout in assignment.layouts:
        before.setdefault(layout.before, []).append(layout)
    specs: dict[str, ShardingSpec] = dict(assignment.inputs)
    instructions: list[Instruction] = []

    def make(layout: Layout) -> None:
        if layout.value in specs:
            return
        if layout.source in layouts:
            make(layouts[layout.source])
        tensor = graph.tensors[layout.tensor]
        reshard = find_reshard(tensor.shape, DTYPE_BYTES[tensor.dtype], specs[layout.source], layout.spec, machine)
        assert reshard is not None, f"no reshard of {layout.tensor} from {specs[layout.source]} to {layout.spec}"
        instructions.append(Move(layout, reshard))
        specs[layout.value] = layout.spec

    leaving: dict[str, list[str]] = {}
    for index, output in enumerate(graph.outputs):
        producer = graph.producer.get(output.tensor)
        leaving.setdefault(producer.name if producer else "", []).append(f"{OUTPUT}{index}")

    def leave(name: str) -> None:
        for reader in leaving.get(name, ()):
            for layout in before.get(reader, ()):
                make(layout)

    leave("")
    for op in sorted(graph.ops, key=lambda op: op.phase == "backward"):
        for layout in before.get(op.name, ()):
            make(layout)
        strategy = assignment.strategies[op.name]
        values = tuple(reads.get((op.name, position), tensor) for position, tensor in enumerate(op.inputs))
        for value, spec in zip(values, strategy.inputs, strict=True):
            assert specs[value] == spec, f"{op.name} reads {value} as {specs[value]}, its strategy needs {spec}"
        instructions.append(Run(op, strategy, values))
        specs.update(zip(op.outputs, strategy.outputs, strict=True))
        leave(op.name)
    outputs = tuple((output, reads.get((f"{OUTPUT}{index}", 0), output.tensor)) for index, output in enumerate(graph.outputs))
    return Program(graph, machine, tuple(instructions), specs, outputs)
