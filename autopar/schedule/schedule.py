"""Schedule: the ordered list of instructions that every rank runs, with the values behind its names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, TypeVar

from autopar import pricing
from autopar.cost_models import Machine
from autopar.graph import Graph, GraphOutput
from autopar.rules import is_alias
from autopar.schedule.assignment import Layout
from autopar.schedule.collectives import Collective
from autopar.schedule.instructions import BEFORE_ALL, Cut, Instruction, Limits, Operation, Segment, Value
from autopar.schedule.text import format_instructions
from autopar.sharding import ShardingSpec

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Schedule:
    """The list of instructions, and the values behind its names.

    Args:
        instructions: in order, forward first.
        operations: by operator name, second runs by theirs.
        collectives: by id.
        cuts: by the value they make.
        values: every value.
        layouts: the reshards, by value.
        outputs: the graph's outputs with the value that leaves for each.
        limits: those of the passes.
        states_on_host: the parameters whose optimizer states lie on the host between steps.
    """

    graph: Graph
    machine: Machine
    instructions: tuple[Instruction, ...]
    operations: Mapping[str, Operation]
    collectives: Mapping[str, Collective]
    cuts: Mapping[str, Cut]
    values: Mapping[str, Value]
    layouts: Mapping[str, Layout]
    outputs: tuple[tuple[GraphOutput, str], ...]
    limits: Limits
    states_on_host: frozenset[str] = frozenset()

    def __str__(self) -> str:
        """The list in words, a line an instruction: ``text.parse`` reads it back."""
        mesh = self.machine.mesh
        called = {call.id: f"{call.kind}({','.join(map(mesh.sub_axis_name, call.axes)) or 'rank'})" for call in self.calls}
        return format_instructions(self.instructions, called)

    def under(self, limits: Limits) -> Schedule:
        """The list under other limits, with all that is known of it."""
        return self._knowing(replace(self, limits=limits), (*self.__dict__, "_known"))

    def freed(self, instructions: tuple[Instruction, ...]) -> Schedule:
        """The list with ``free`` in it: where values lie stays known."""
        return self._knowing(replace(self, instructions=instructions), ("specs", "sums", "storage"))

    def _knowing(self, made: Schedule, names: Iterable[str]) -> Schedule:
        for name in names:
            made.__dict__.setdefault(name, getattr(self, name))
        return made

    def once(self, question: Callable[[Schedule], Answer]) -> Answer:
        """The answer of a function that does not depend on limits, computed once."""
        known = self._known
        if question not in known:
            known[question] = question(self)
        answer: Answer = known[question]
        return answer

    def knowing(self, question: Callable[[Schedule], Answer], answer: Answer) -> Schedule:
        """The schedule itself, with the answer of a function kept."""
        self._known[question] = answer
        return self

    @cached_property
    def _known(self) -> dict[object, Any]:
        return {}

    @cached_property
    def specs(self) -> Mapping[str, ShardingSpec]:
        """The spec of every value that has one."""
        return {name: value.spec for name, value in self.values.items() if value.spec is not None}

    def local_bytes(self, value: str) -> int:
        """Bytes of a value on one rank."""
        return self.values[value].bytes

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """The segments of the list, in order."""
        found = dict.fromkeys((item.half, item.microbatch == BEFORE_ALL) for item in self.instructions)
        return tuple(Segment(phase, BEFORE_ALL if before else 0) for phase, before in found)

    @cached_property
    def sums(self) -> tuple[str, ...]:
        """The values that gradients are summed in over the microbatches: there from the beginning of the step on, zero at first."""
        return tuple(item.writes[0] for item in self.instructions if item.kind == "add")

    @cached_property
    def rounds(self) -> tuple[tuple[int, tuple[Instruction, ...]], ...]:
        """Counts of microbatches that run the same instructions, with these, in order; first what runs before all of them, once."""
        before = tuple(item for item in self.instructions if item.microbatch == BEFORE_ALL)
        items = self.instructions[len(before) :]
        begins = sorted({0, *(item.microbatch for item in items)}) + [self.graph.microbatches]
        found = ((after - first, tuple(item for item in items if item.microbatch <= first)) for first, after in pairwise(begins))
        return (*([(1, before)] if before else []), *found)

    def times(self, item: Instruction) -> int:
        """How often an instruction runs in a step."""
        return 1 if item.microbatch == BEFORE_ALL else self.graph.microbatches - item.microbatch

    @cached_property
    def kept_values(self) -> tuple[str, ...]:
        """The values that are made before the first microbatch and read in microbatches: there until the last has ended."""
        made = {value for item in self.instructions if item.microbatch == BEFORE_ALL for value in item.writes}
        read = {value for item in self.instructions if item.microbatch != BEFORE_ALL and item.kind != "free" for value in item.reads}
        return tuple(sorted(made & read)) if made else ()

    @cached_property
    def calls(self) -> tuple[Collective, ...]:
        """The collectives between operators in the order in which every rank starts them."""
        return tuple(self.collectives[item.of] for item in self.instructions if item.kind == "start")

    @cached_property
    def storage(self) -> Mapping[str, str]:
        """The value or collective whose memory each value lies in: itself, its base, the value it is written over, or its buffer."""
        return self.stored()

    def stored(self, *, apart: bool = False) -> Mapping[str, str]:
        """The memory of each value, see ``storage``; if ``apart``, values that share a collective's buffer lie apart."""
        root = {name: name for name in (*(item.tensor for item in self.graph.inputs), *self.sums)}
        views = {target: is_alias(op) for target, op in {item.op.target: item.op for item in self.operations.values()}.items()}
        for item in self.instructions:
            if item.kind == "run":
                operation = self.operations[item.of]
                shared = item.over or (item.reads[0] if item.reads and views[operation.op.target] and not operation.apart else "")
                for name in item.writes:
                    root[name] = root[shared] if shared else name
            elif item.kind == "slice":
                value = item.writes[0]
                root[value] = value if self.cuts[value].step is not None else root[item.reads[0]]
            elif item.kind == "start":
                call = self.collectives[item.of]
                for part in call.parts:
                    own = apart or call.unpacks
                    root[part.target] = part.target if own else root[part.source] if call.in_place else call.id
        return root

    def compute_seconds(self) -> float:
        """Sum over operators and the sums of gradients, in sequence, without the collectives inside them."""
        operators = sum(self.times(item) * self.operator_seconds(item.of) for item in self._runs())
        return operators + sum(self.times(item) * item.seconds for item in self.instructions if item.kind == "add")

    def operator_seconds(self, name: str) -> float:
        """Seconds of one operator without the collectives inside it; the same for operators of one kind in one strategy."""
        op, strategy, *_ = self.operations[name]
        key = self.graph.kinds[op.name], id(strategy)
        if key not in self._seconds:
            self._seconds[key] = pricing.compute_seconds(op, self.graph.tensors, strategy, self.machine)
        return self._seconds[key]

    @cached_property
    def _seconds(self) -> dict[tuple[int, int], float]:
        return {}

    def communication_seconds(self) -> float:
        """Sum over collectives and their copies, in sequence, with the collectives inside operators."""
        calls = sum(
            self.times(item) * item.seconds
            for item in self.instructions if item.kind in ("start", "wait") and not self.collectives[item.of].is_transfer
        )  # fmt: skip
        inside = (pricing.inner_seconds(self.operations[item.of].strategy, self.machine) * self.times(item) for item in self._runs())
        return calls + sum(inside)

    def _runs(self) -> Iterator[Instruction]:
        return (item for item in self.instructions if item.kind == "run")

    def optimizer_seconds(self, optimizer: str) -> float:
        """One step of the optimizer on the local shards of trained parameters, with the copies of states that lie on the host."""
        trained = [item.tensor for item in self.graph.inputs if item.tensor in self.graph.stepped]
        each = {name: pricing.optimizer_seconds(self.graph, name, self.specs[name], self.machine, optimizer) for name in trained}
        hosted = self.hosted_states(optimizer)
        resident = sum(seconds for name, seconds in each.items() if name not in hosted)
        return pricing.stepping_seconds(resident, ((self.machine.transfer_seconds(size), each[name]) for name, size in hosted.items()))

    def hosted_states(self, optimizer: str) -> Mapping[str, int]:
        """Bytes of the states that lie on the host, by parameter, in the order in which they are stepped: the largest first."""
        found = [(name, pricing.state_bytes(self.graph, name, self.local_bytes(name), optimizer)) for name in self.states_on_host]
        return dict(sorted(found, key=lambda item: (-item[1], item[0])))
