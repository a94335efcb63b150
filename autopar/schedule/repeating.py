"""Which values of a list are views that repeat, and what they cost where dense memory is needed."""

from __future__ import annotations

from collections.abc import Sequence

from autopar import pricing
from autopar.cost_models import Machine
from autopar.graph import Graph, Op
from autopar.rules import DENSE, find_copied, find_repeated, repeats
from autopar.schedule.instructions import Operation
from autopar.sharding import ShardingSpec, Strategy


class Repeating:
    """The views of a graph that repeat, on the ranks of a machine.

    Args:
        tensors: as ``find_repeated``.
    """

    def __init__(self, graph: Graph, machine: Machine) -> None:
        self.graph, self.machine = graph, machine
        self.tensors = find_repeated(graph)

    def result(self, tensor: str, spec: ShardingSpec) -> bool:
        """Whether a tensor is a view that repeats where an operator makes it in this spec. A reshard of it is none."""
        dims = self.tensors.get(tensor, DENSE)
        return bool(dims) and repeats(spec.local_shape(self.graph.tensors[tensor].shape, self.machine.mesh.sizes), dims)

    def operation(self, op: Op, strategy: Strategy, sources: Sequence[bool]) -> Operation:
        """The operator with the operands that it copies since they repeat.

        Args:
            sources: whether each value that it reads is a view that repeats.
        """
        if not any(sources):
            return Operation(op, strategy)
        sizes, tensors = self.machine.mesh.sizes, [self.graph.tensors[name] for name in op.inputs]
        shapes = [spec.local_shape(tensor.shape, sizes) for tensor, spec in zip(tensors, strategy.inputs, strict=True)]
        dims = [self.tensors.get(name, DENSE) if source else DENSE for name, source in zip(op.inputs, sources, strict=True)]
        copied = find_copied(op, shapes, dims)
        size = sum(pricing.local_bytes(tensors[place], strategy.inputs[place], self.machine) for place in copied)
        return Operation(op, strategy, copied, size)
