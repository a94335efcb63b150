"""Layers of a chain that were passed over (``repeats``), put back into the graph: copies of the pattern under their own names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from autopar.graph import Graph, GraphInput, GraphOutput, Op, Tensor
from autopar.importer.groups import SEED_AT
from autopar.importer.lowering import fresh
from autopar.importer.repeats import ENDS, Chain

LOSS_GRADIENT = ("aten.full.default", ((), 1.0))
"""Target and arguments of the operator that begins a backward from a loss."""


def unrolled(graph: Graph, chain: Chain) -> Graph | None:
    """The graph with the modules left out; None where those traced are not alike in it, or are read from outside."""
    made = _Unrolling(graph, chain)
    return made.run() if made.sound() else None


class _Unrolling:
    """The second module of a chain is the pattern; the third traced one, by its number in the whole chain, is its echo."""

    def __init__(self, graph: Graph, chain: Chain) -> None:
        self.graph, self.chain = graph, chain
        count = len(chain.modules)
        self.numbers = [*range(ENDS), *range(count - ENDS, count)]
        self.repeats = [[op for op in graph.ops if _under(op.module, self._prefix(number))] for number in self.numbers]
        self.home = {tensor: slot for slot, ops in enumerate(self.repeats) for op in ops for tensor in op.outputs}
        self.key: dict[str, Any] = {
            tensor: (place, index) for ops in self.repeats for place, op in enumerate(ops) for index, tensor in enumerate(op.outputs)
        }
        for item in graph.inputs:
            for slot, number in enumerate(self.numbers):
                if item.kind == "parameter" and _under(item.name, self._prefix(number)):
                    self.home[item.tensor], self.key[item.tensor] = slot, item.name.removeprefix(self._prefix(number))
        self.at = {(self.home[tensor], key): tensor for tensor, key in self.key.items()}

    def _prefix(self, number: int) -> str:
        return f"{self.chain.path}.{number}"

    def sound(self) -> bool:
        """Whether pattern and echo are alike, read only themselves, neighbours and what all read, and are read by nobody else."""
        pattern, echo = ([self._row(op, slot) for op in self.repeats[slot]] for slot in (1, 2))
        if pattern != echo or not pattern or any(op.target in SEED_AT for op in self.repeats[1]):
            return False
        within = {op.name for ops in self.repeats for op in ops}
        if any(self.home.get(tensor) in (1, 2) for op in self.graph.ops if op.name not in within for tensor in op.inputs):
            return False
        gradients: list[list[Any]] = [[], []]
        for output in self.graph.outputs:
            home = self.home.get(output.tensor)
            named = self.graph.owners[output] if output.kind != "output" else ""
            if home not in (1, 2) and self.home.get(named) not in (1, 2):
                continue
            if output.kind != "gradient" or home is None or self.home.get(named) != home:
                return False
            gradients[home - 1].append((self.key[output.tensor], self.key[named]))
        return sorted(gradients[0], key=repr) == sorted(gradients[1], key=repr)

    def _row(self, op: Op, slot: int) -> tuple[Any, ...]:
        reads = []
        for tensor in op.inputs:
            home = self.home.get(tensor)
            reads.append(("all", tensor) if home is None else (home - slot, self.key[tensor]))
            if home is not None and abs(home - slot) > 1:
                return ("far", op.name)
        shapes = tuple((self.graph.tensors[t].shape, self.graph.tensors[t].dtype) for t in (*op.inputs, *op.outputs))
        module = op.module.removeprefix(self._prefix(self.numbers[slot]))
        return op.target, op.args, op.kwargs, op.phase, module, op.location, tuple(reads), shapes

    def run(self) -> Graph | None:
        ops: list[Op] = []
        begun: set[str] = set()
        starts = {"forward": self._first_of(2, "forward"), "backward": self._first_of(1, "backward")}
        for op in self.graph.ops:
            if op.name == starts[op.phase] and op.phase not in begun:
                begun.add(op.phase)
                order = self.chain.left_out if op.phase == "forward" else reversed(self.chain.left_out)
                ops += [self._copy(one, number) for number in order for one in self.repeats[1] if one.phase == op.phase]
            ops.append(self._rewired(op))
        return self._named(ops)

    def _first_of(self, slot: int, phase: str) -> str:
        return next((op.name for op in self.repeats[slot] if op.phase == phase), "")

    def _tensor(self, tensor: str, slot: int, number: int) -> str:
        """What the module ``number`` reads where the one traced in ``slot`` reads ``tensor``."""
        home = self.home.get(tensor)
        return tensor if home is None else self._named_at(self.key[tensor], number + home - slot)

    def _named_at(self, key: Any, number: int) -> str:
        if number in self.numbers:
            return self.at[self.numbers.index(number), key]
        if isinstance(key, str):
            return self._prefix(number) + key
        return f"{self.at[1, key]}~{number}"  # until names are given anew

    def _copy(self, op: Op, number: int) -> Op:
        return replace(
            op, name=f"{op.name}~{number}", inputs=tuple(self._tensor(tensor, 1, number) for tensor in op.inputs),
            outputs=tuple(self._tensor(tensor, 1, number) for tensor in op.outputs),
            module=self._prefix(number) + op.module.removeprefix(self._prefix(self.numbers[1])),
        )  # fmt: skip

    def _rewired(self, op: Op) -> Op:
        slot = next((slot for slot in (1, 2) for tensor in op.outputs if self.home.get(tensor) == slot), None)
        if slot is None:
            return op
        return replace(op, inputs=tuple(self._tensor(tensor, slot, self.numbers[slot]) for tensor in op.inputs))

    def _named(self, ops: Sequence[Op]) -> Graph | None:
        """Names as a trace gives them, counted in the order of the operators; None where the order does not hold."""
        graph, inputs = self.graph, self._inputs()
        taken = {item.tensor for item in inputs}
        new: dict[str, str] = {name: name for name in taken}
        tensors = {item.tensor: tensor for item, tensor in inputs.items()}
        counters: dict[str, int] = {}
        renamed: list[Op] = []
        first = next((op for op in ops if op.phase == "backward"), None)
        if first is not None and (first.target, first.args) == LOSS_GRADIENT:  # it is named before all others
            new[first.outputs[0]] = fresh("full", counters, taken)
            tensors[new[first.outputs[0]]] = replace(graph.tensors[first.outputs[0]], name=new[first.outputs[0]])
        for op in ops:
            if op is first and op.outputs[0] in new:
                renamed.append(replace(op, name=new[op.outputs[0]], outputs=(new[op.outputs[0]],)))
                continue
            if not all(tensor in new for tensor in op.inputs):
                return None
            name = fresh(op.target.split(".")[1].lstrip("_"), counters, taken)
            outputs = tuple(f"{name}:{index}" if index else name for index in range(len(op.outputs)))
            for old, now in zip(op.outputs, outputs, strict=True):
                new[old] = now
                tensors[now] = replace(graph.tensors[old.partition("~")[0]], name=now)
            renamed.append(replace(op, name=name, inputs=tuple(new[tensor] for tensor in op.inputs), outputs=outputs))
        outputs_ = [replace(output, tensor=new[output.tensor]) for output in self._outputs(inputs)]
        return replace(graph, tensors=tensors, inputs=tuple(inputs), ops=tuple(renamed), outputs=tuple(outputs_))

    def _inputs(self) -> dict[GraphInput, Tensor]:
        """The inputs with their tensors: the weights of the modules left out follow those of the pattern, which they are like."""
        own = [item for item in self.graph.inputs if self.home.get(item.tensor) == 1]
        found: dict[GraphInput, Tensor] = {}
        for item in self.graph.inputs:
            found[item] = self.graph.tensors[item.tensor]
            for number, like in product(self.chain.left_out if item is own[-1] else (), own):
                name = self._named_at(self.key[like.tensor], number)
                found[replace(like, tensor=name, name=name)] = replace(self.graph.tensors[like.tensor], name=name)
        return found

    def _outputs(self, inputs: Iterable[GraphInput]) -> list[GraphOutput]:
        """The outputs with the gradients of the modules left out, in the order of what they are gradients of."""
        order = {item.name: index for index, item in enumerate(inputs)}
        own = [output for output in self.graph.outputs if output.kind == "gradient" and self.home.get(output.tensor) == 1]
        added = [
            GraphOutput(self._tensor(output.tensor, 1, number), "gradient", self._named_at(self.key[self.graph.owners[output]], number))
            for number in self.chain.left_out
            for output in own
        ]
        gradients = [output for output in self.graph.outputs if output.kind == "gradient"] + added
        others = [output for output in self.graph.outputs if output.kind != "gradient"]
        return others + sorted(gradients, key=lambda output: order[output.name.removeprefix("input:")])


def _under(path: str, prefix: str) -> bool:
    return path == prefix or path.startswith(f"{prefix}.")
