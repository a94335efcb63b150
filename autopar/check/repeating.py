"""Which values of a plan are views of which several elements lie at one place, and what operators copy of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autopar.check.parts import largest
from autopar.graph import DTYPE_BYTES, Op, Tensor
from autopar.rows import OpPlan, ReshardPlan
from autopar.rules import DENSE, Repeated, find_copied, is_alias, repeated_dims, repeats, stored_elements
from autopar.sharding import ShardingSpec


@dataclass
class Repeating:
    """What is learnt of them, operator by operator.

    Args:
        sizes: of the mesh's axes.
        values: the values that are such views.
        copied: bytes of such operands that an operator copies, by its name.
    """

    sizes: tuple[int, ...]
    values: set[str] = field(default_factory=set)
    copied: dict[str, int] = field(default_factory=dict)
    _dims: dict[str, Repeated] = field(default_factory=dict)

    def run(self, row: OpPlan, op: Op, tensors: Mapping[str, Tensor]) -> None:
        """Follows an operator."""
        parts = [largest(entry.shape, ShardingSpec.parse(entry.spec), self.sizes) for entry in row.inputs]
        dims = [self._dims.get(entry.tensor, DENSE) if (entry.value or entry.tensor) in self.values else DENSE for entry in row.inputs]
        copied = find_copied(op, parts, dims)
        self.copied[row.name] = sum(stored_elements(parts[place], DENSE) * DTYPE_BYTES[row.inputs[place].dtype] for place in copied)
        if not op.inputs or not is_alias(op):
            return
        for entry, made in zip(row.outputs, repeated_dims(op, tensors, self._dims.get(op.inputs[0], DENSE)), strict=True):
            self._dims[entry.tensor] = made
            if repeats(largest(entry.shape, ShardingSpec.parse(entry.spec), self.sizes), made):
                self.values.add(entry.value or entry.tensor)

    def reshard(self, row: ReshardPlan, moves: bool) -> bool:
        """Follows a reshard: whether its source is such a view. Its result is one where nothing ``moves``."""
        again = row.source in self.values
        if again and not moves:
            self.values.add(row.value)
        return again
