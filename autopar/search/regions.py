"""Some operators of a plan chosen anew together, all others as they are: where no single change helps any more, several at once may.

A region is an operator and some that tensors lead to from it. Its operators, and the graph inputs they read or make gradients of, have all
their choices, the others the one of the plan; what is resharded, kept and made again is chosen anew everywhere. Such a problem is small.
"""

from __future__ import annotations

from random import Random

from autopar.graph import Graph
from autopar.schedule import Assignment
from autopar.search.space import Space

MANY = 12
"""What is read by so many operators leads to none of them: they have nothing else in common."""
NEXT = 3
"""A region grows from one of so many operators that it was first to reach."""


def region(graph: Graph, count: int, random: Random) -> frozenset[str]:
    """So many operators that tensors connect; fewer where there are no more."""
    found = {random.choice(graph.ops).name: None}
    growing = list(found)
    while growing and len(found) < count:
        op = graph.op[growing.pop(random.randrange(min(len(growing), NEXT)))]
        fresh = dict.fromkeys(name for tensor in (*op.inputs, *op.outputs) for name in _at(graph, tensor) if name not in found)
        reached = list(fresh)[: count - len(found)]
        found.update(dict.fromkeys(reached))
        growing += reached
    return frozenset(found)


def around(space: Space, plan: Assignment, names: frozenset[str]) -> Space:
    """The part of a space in which operators that are not named, and graph inputs that those do not touch, are as in the plan."""
    graph = space.graph
    touched = {tensor for name in names for tensor in (*graph.op[name].inputs, *graph.op[name].outputs)}
    touched.update(owner for output, owner in graph.owners.items() if output.tensor in touched)
    strategies = {op.name: space.op_choices(op).strategies if op.name in names else (plan.strategies[op.name],) for op in graph.ops}
    inputs = {
        item.tensor: space.input_specs(item) if item.tensor in touched else (plan.inputs[item.tensor],) for item in graph.inputs
    }  # fmt: skip
    return space.among(inputs, strategies)


def _at(graph: Graph, tensor: str) -> list[str]:
    """The operators that make and read a tensor; none where there are many."""
    readers = [graph.ops[index].name for index, _ in graph.consumers[tensor]]
    if len(readers) >= MANY:
        return []
    return [*([graph.producer[tensor].name] if tensor in graph.producer else []), *readers]
