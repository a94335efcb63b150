"""How the values of a plan lie in memory, followed row by row, and what is copied since they do not lie in order."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from autopar.check.parts import largest
from autopar.graph import DTYPE_BYTES, Op
from autopar.rows import OpPlan, ReshardPlan, ValueSpec
from autopar.rules import IN_ORDER, MemoryOrder, find_copied, find_orders, view_copies
from autopar.sharding import ShardingSpec, Strategy


@dataclass
class MemoryOrders:
    """What is learnt of them, operator by operator.

    Args:
        sizes: of the mesh's axes.
        copied: bytes of the operands that an operator copies, by its name.
        apart: the views that copy.
    """

    sizes: tuple[int, ...]
    copied: dict[str, int] = field(default_factory=dict)
    apart: set[str] = field(default_factory=set)
    _of: dict[str, MemoryOrder] = field(default_factory=dict)
    """Of the values that do not lie in the order of their dims, or that were views."""

    def run(self, row: OpPlan, op: Op, strategy: Strategy) -> None:
        """Follows an operator."""
        given = [self.of(entry.value or entry.tensor) for entry in row.inputs]
        parts, results = self._parts(row.inputs), self._parts(row.outputs)
        copied = find_copied(op, parts, given)
        self.copied[row.name] = sum(math.prod(parts[place]) * DTYPE_BYTES[row.inputs[place].dtype] for place in copied)
        if view_copies(op, parts, given, results):
            self.apart.add(row.name)
        for entry, made in zip(row.outputs, find_orders(op, parts, given, results, exchanges=bool(strategy.inner)), strict=True):
            self._of[entry.value or entry.tensor] = made

    def of(self, value: str) -> MemoryOrder:
        """How a value lies; what collectives and slices make, and what enters, lies in order."""
        return self._of.get(value, IN_ORDER)

    def reshard(self, row: ReshardPlan, moves: bool) -> MemoryOrder:
        """Follows a reshard, and says how its source lies. Its result lies so where nothing ``moves``."""
        if not moves:
            self._of[row.value] = self.of(row.source)
        return self.of(row.source)

    def _parts(self, entries: Iterable[ValueSpec]) -> list[tuple[int, ...]]:
        return [largest(entry.shape, ShardingSpec.parse(entry.spec), self.sizes) for entry in entries]
