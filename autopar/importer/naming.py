"""Names of operators: what an operator does, counted in the order in which they run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from autopar.graph import Graph, GraphInput, GraphOutput, Op, Tensor

LOSS_GRADIENT = ("aten.full.default", ((), 1.0))
"""Target and arguments of the operator that begins a backward from a loss: it is named before all others."""


def fresh(base: str, counters: dict[str, int], taken: set[str]) -> str:
    """The next free name: ``base``, ``base_1`` ...; ``counters`` and ``taken`` are brought up to date."""
    while True:
        number = counters.get(base, 0)
        counters[base] = number + 1
        name = f"{base}_{number}" if number else base
        if name not in taken:
            taken.add(name)
            return name


def renamed(
    graph: Graph, inputs: Mapping[GraphInput, Tensor], ops: Sequence[Op], outputs: Sequence[GraphOutput], made: Mapping[str, Tensor]
) -> Graph | None:  # fmt: skip
    """The graph of these inputs, operators and outputs under the names that a trace in this order gives; None where one of the operators
    stands before what it reads.

    Args:
        inputs: with their tensors; they keep their names.
        made: what operators make, by name; names may be others.
    """
    taken = {item.tensor for item in inputs}
    new: dict[str, str] = {name: name for name in taken}
    tensors = {item.tensor: tensor for item, tensor in inputs.items()}
    counters: dict[str, int] = {}

    def named(op: Op, base: str) -> str:
        name = fresh(base, counters, taken)
        for index, old in enumerate(op.outputs):
            new[old] = f"{name}:{index}" if index else name
            tensors[new[old]] = replace(made[old], name=new[old])
        return name

    first = next((op for op in ops if op.phase == "backward"), None)
    begun = named(first, "full") if first is not None and (first.target, first.args) == LOSS_GRADIENT else ""
    found: list[Op] = []
    for op in ops:
        if not all(tensor in new for tensor in op.inputs):
            return None
        name = begun if begun and op is first else named(op, op.target.split(".")[1].lstrip("_"))
        read, written = (tuple(new[tensor] for tensor in some) for some in (op.inputs, op.outputs))
        found.append(replace(op, name=name, inputs=read, outputs=written))
    leaving = tuple(replace(output, tensor=new[output.tensor]) for output in outputs)
    return replace(graph, tensors=tensors, inputs=tuple(inputs), ops=tuple(found), outputs=leaving)
