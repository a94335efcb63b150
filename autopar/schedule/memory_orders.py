"""How the values of a list lie in memory, and what operators copy of operands that do not lie in order."""

from __future__ import annotations

import math

from autopar.cost_models import Machine
from autopar.graph import DTYPE_BYTES, Graph, Op
from autopar.rules import IN_ORDER, MemoryOrder, find_copied, find_orders, keeps_order, view_copies
from autopar.schedule.instructions import Operation
from autopar.sharding import Strategy

Orders = tuple[MemoryOrder, ...]


class MemoryOrders:
    """How operators of a graph make and read values on the ranks of a machine, each found once."""

    def __init__(self, graph: Graph, machine: Machine) -> None:
        self.graph, self.sizes = graph, machine.mesh.sizes
        self._keeping: dict[int, bool] = {}
        self._found: dict[tuple[int, int, Orders], tuple[Strategy, Orders, tuple[int, ...], int, bool]] = {}
        """By kind of operator, identity of its strategy, which is held so that no other takes it, and how operands lie."""

    def run(self, op: Op, strategy: Strategy, given: Orders) -> tuple[Orders, Operation]:
        """How the results lie, and the operator with the operands that it copies.

        Args:
            given: how each value that it reads lies.
        """
        kind = self.graph.kinds[op.name]
        if kind not in self._keeping:
            self._keeping[kind] = keeps_order(op)
        if self._keeping[kind] and all(order is IN_ORDER for order in given):
            return (IN_ORDER,) * len(op.outputs), Operation(op, strategy)
        key = kind, id(strategy), given
        if key not in self._found:
            self._found[key] = strategy, *self._find(op, strategy, given)
        _, results, copied, size, apart = self._found[key]
        return results, Operation(op, strategy, copied, size, apart)

    def _find(self, op: Op, strategy: Strategy, given: Orders) -> tuple[Orders, tuple[int, ...], int, bool]:
        tensors, inputs = self.graph.tensors, len(op.inputs)
        names, specs = (*op.inputs, *op.outputs), (*strategy.inputs, *strategy.outputs)
        shapes = [spec.local_shape(tensors[name].shape, self.sizes) for name, spec in zip(names, specs, strict=True)]
        copied = find_copied(op, shapes[:inputs], given)
        size = sum(math.prod(shapes[place]) * DTYPE_BYTES[tensors[op.inputs[place]].dtype] for place in copied)
        orders = find_orders(op, shapes[:inputs], given, shapes[inputs:], exchanges=bool(strategy.inner))
        return orders, copied, size, view_copies(op, shapes[:inputs], given, shapes[inputs:])
