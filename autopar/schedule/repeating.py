"""Which values of a list are views that repeat, and what they cost where dense memory is needed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from autopar import pricing
from autopar.graph import Graph, Op
from autopar.rules import DENSE, find_copied, find_repeated, is_alias, repeats
from autopar.schedule.instructions import Operation
from autopar.sharding import Strategy
from cost_models import Machine


class Repeating:
    """The views of a graph that repeat, on the ranks of a machine.

    Args:
        tensors: as ``find_repeated``.
    """

    def __init__(self, graph: Graph, machine: Machine) -> None:
        self.graph, self.machine = graph, machine
        self.tensors = find_repeated(graph)

    def results(self, op: Op, strategy: Strategy, sources: Iterable[bool]) -> tuple[bool, ...]:
        """Whether each result of an operator is a view that repeats.

        Args:
            sources: the same of each value that it reads: a reshard of such a view is none.
        """
        if self.tensors.keys().isdisjoint(op.outputs) or not is_alias(op):
            return (False,) * len(op.outputs)
        sizes, tensors = self.machine.mesh.sizes, self.graph.tensors
        given = math.prod(strategy.inputs[0].local_shape(tensors[op.inputs[0]].shape, sizes))
        viewed, found = next(iter(sources)), []
        for name, spec in zip(op.outputs, strategy.outputs, strict=True):
            shape = spec.local_shape(tensors[name].shape, sizes)
            found.append(repeats(shape, self.tensors.get(name, DENSE)) and (viewed or math.prod(shape) > given))
        return tuple(found)

    def operation(self, op: Op, strategy: Strategy, sources: Sequence[bool]) -> Operation:
        """The operator with the operands that it copies since they repeat; ``sources`` as for ``results``."""
        if not any(sources):
            return Operation(op, strategy)
        sizes, tensors = self.machine.mesh.sizes, [self.graph.tensors[name] for name in op.inputs]
        shapes = [spec.local_shape(tensor.shape, sizes) for tensor, spec in zip(tensors, strategy.inputs, strict=True)]
        dims = [self.tensors.get(name, DENSE) if source else DENSE for name, source in zip(op.inputs, sources, strict=True)]
        copied = find_copied(op, shapes, dims)
        size = sum(pricing.local_bytes(tensors[place], strategy.inputs[place], self.machine) for place in copied)
        return Operation(op, strategy, copied, size)
