"""Layers of a chain that were passed over (``repeats``), put back into the graph: copies of the pattern under their own names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from autopar.graph import Graph, GraphInput, GraphOutput, Op, Tensor
from autopar.importer.layers.repeats import ENDS, Chain
from autopar.importer.naming import renamed
from autopar.rules import seed_of


def unrolled(graph: Graph, chains: Sequence[Chain]) -> Graph | None:
    """The graph with the modules left out; None where those traced are not alike in it, or are read from outside."""
    whole: Graph | None = graph
    for chain in chains:
        if whole is not None:
            made = _Unrolling(whole, chain)
            whole = made.run() if made.sound() else None
    return whole


class _Unrolling:
    """The second turn of a chain is the pattern; the third traced one, by its number in the whole chain, is its echo. Within a turn an
    operator's key is its place and a result's place in it, a weight's its name below the turn."""

    def __init__(self, graph: Graph, chain: Chain) -> None:
        self.graph, self.chain = graph, chain
        self.numbers = [*range(ENDS), *range(chain.turns - ENDS, chain.turns)]
        slots = {number: slot for slot, number in enumerate(self.numbers)}
        self.repeats: list[list[Op]] = [[] for _ in slots]
        for op in graph.ops:
            if (turn := chain.turn_of(op.module)) is not None and turn in slots:
                self.repeats[slots[turn]].append(op)
        self.home = {tensor: slot for slot, ops in enumerate(self.repeats) for op in ops for tensor in op.outputs}
        self.key: dict[str, Any] = {
            tensor: (place, index) for ops in self.repeats for place, op in enumerate(ops) for index, tensor in enumerate(op.outputs)
        }
        for item in (*graph.of_kind("parameter"), *graph.of_kind("buffer")):
            if (turn := chain.turn_of(item.name)) is not None and turn in slots:
                self.home[item.tensor], self.key[item.tensor] = slots[turn], chain.below(item.name)
        self.at = {(self.home[tensor], key): tensor for tensor, key in self.key.items()}
        self.seeds = [min((seed for op in ops if (seed := _seed(op)) is not None), default=0) for ops in self.repeats]
        """The first of each slot's draws, which are counted over the whole trace."""
        self.draws = self.seeds[2] - self.seeds[1]

    def sound(self) -> bool:
        """Whether pattern and echo are alike, read only themselves, neighbours and what all read, and are read by nobody else."""
        pattern, echo = ([self._row(op, slot) for op in self.repeats[slot]] for slot in (1, 2))
        if pattern != echo or not pattern or any(_seed(op) is not None and op.phase == "backward" for op in self.repeats[1]):
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
            reads.append(("all", tensor) if home is None else (home - slot, self.key[tensor] if home == slot else None))
            if home is not None and abs(home - slot) > 1:
                return ("far", op.name)
        shapes = tuple((self.graph.tensors[t].shape, self.graph.tensors[t].dtype) for t in (*op.inputs, *op.outputs))
        args = _drawing(op, -self.seeds[slot]).args
        return op.target, args, op.kwargs, op.phase, self.chain.below(op.module), op.location, tuple(reads), shapes

    def run(self) -> Graph | None:
        ops: list[Op] = []
        starts = {self._first_of(slot, part): part for slot, part in ((2, "prepared"), (2, "forward"), (1, "backward"))}
        copied = {part: [op for op in self.repeats[1] if self._part(op) == part] for part in starts.values()}
        for op in self.graph.ops:
            if (part := starts.get(op.name)) is not None:
                order = reversed(self.chain.left_out) if part == "backward" else self.chain.left_out
                ops += [self._copy(one, number) for number in order for one in copied[part]]
            ops.append(self._rewired(op))
        inputs = self._inputs()
        made = dict(self.graph.tensors)
        for number in self.chain.left_out:
            made |= {self._tensor(t, 1, number): self.graph.tensors[t] for op in self.repeats[1] for t in op.outputs}
        return renamed(self.graph, inputs, ops, self._outputs(inputs), made)

    def _part(self, op: Op) -> str:
        """Of a turn's operators those that lead forward lie apart from others."""
        return "prepared" if op.name in self.graph.prepared else op.phase

    def _first_of(self, slot: int, part: str) -> str:
        return next((op.name for op in self.repeats[slot] if self._part(op) == part), "")

    def _tensor(self, tensor: str, slot: int, number: int) -> str:
        """What the module ``number`` reads where the one traced in ``slot`` reads ``tensor``."""
        home = self.home.get(tensor)
        return tensor if home is None else self._named_at(self.key[tensor], number + home - slot)

    def _named_at(self, key: Any, number: int) -> str:
        if number in self.numbers:
            return self.at[self.numbers.index(number), key]
        if isinstance(key, tuple) and isinstance(key[1], str):
            return self.chain.named(number, key)
        return f"{self.at[1, key]}~{number}"  # until names are given anew

    def _copy(self, op: Op, number: int) -> Op:
        """The pattern's operator in another turn. The first turn and the last may be unlike the others: what is read of the turn before is
        what the echo reads of the pattern, of the turn after what the pattern reads of the echo."""
        echo = self.repeats[2][self.key[op.outputs[0]][0]]
        return replace(
            _drawing(op, (number - 1) * self.draws), name=f"{op.name}~{number}",
            inputs=tuple(
                self._tensor(other, 2, number) if self.home.get(tensor) == 0 else self._tensor(tensor, 1, number)
                for tensor, other in zip(op.inputs, echo.inputs, strict=True)
            ),
            outputs=tuple(self._tensor(tensor, 1, number) for tensor in op.outputs),
            module=self.chain.named(number, self.chain.below(op.module)),
        )  # fmt: skip

    def _rewired(self, op: Op) -> Op:
        seed = _seed(op)
        if seed is not None and self.draws and seed >= self.seeds[2]:
            op = _drawing(op, len(self.chain.left_out) * self.draws)
        slot = next((slot for slot in (1, 2) for tensor in op.outputs if self.home.get(tensor) == slot), None)
        if slot is None:
            return op
        return replace(op, inputs=tuple(self._tensor(tensor, slot, self.numbers[slot]) for tensor in op.inputs))

    def _inputs(self) -> dict[GraphInput, Tensor]:
        """The inputs with their tensors: those of each kind of the modules left out follow those of the pattern, which they are like."""
        own: dict[str, list[GraphInput]] = {}
        for item in self.graph.inputs:
            if self.home.get(item.tensor) == 1:
                own.setdefault(item.kind, []).append(item)
        found: dict[GraphInput, Tensor] = {}
        for item in self.graph.inputs:
            found[item] = self.graph.tensors[item.tensor]
            mine = own.get(item.kind, ())
            for number, like in product(self.chain.left_out if mine and item is mine[-1] else (), mine):
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


def _seed(op: Op) -> int | None:
    """The number of an operator's draw."""
    place = seed_of(op)
    seed = None if place is None else op.args[place]
    return seed if isinstance(seed, int) else None


def _drawing(op: Op, later: int) -> Op:
    """The operator with a draw of so much later."""
    seed, place = _seed(op), seed_of(op)
    if seed is None or place is None or not later:
        return op
    return replace(op, args=(*op.args[:place], seed + later, *op.args[place + 1 :]))
