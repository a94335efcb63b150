"""Groups of equal layers: the operators and tensors of each repeat, and their counterparts in the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autopar.graph import Graph

REPRESENTATIVE = 1
"""Index of the repeat whose choices hold for all repeats between the first and the last."""
Key = tuple[Any, ...]
"""Identity of a tensor within its repeat.

(operator, output), ("input", operator, position), or "output" followed by the key of the tensor that leaves.
"""


@dataclass(frozen=True)
class LayerGroup:
    """A group of equal repeats.

    Args:
        repeats: names of the operators of each repeat.
        ops: repeat and position of each operator.
        tensors: repeat and key of each tensor that belongs to one repeat.
        by_key: the tensors of each repeat, by key.
    """

    repeats: tuple[tuple[str, ...], ...]
    ops: Mapping[str, tuple[int, int]]
    tensors: Mapping[str, tuple[int, Key]]
    by_key: tuple[Mapping[Key, str], ...]

    @property
    def last_representative(self) -> int:
        return len(self.repeats) - 2

    @property
    def left_out(self) -> range:
        return range(REPRESENTATIVE + 1, self.last_representative)

    @property
    def represented(self) -> range:
        """The repeats that the representative stands for, itself included."""
        return range(REPRESENTATIVE, self.last_representative + 1)

    def is_represented(self, name: str) -> bool:
        """Whether an operator or tensor is of a repeat that the representative stands for."""
        return self.repeat_of(name) in self.represented

    def repeat_of(self, name: str) -> int | None:
        """The repeat of an operator or tensor; None outside all repeats."""
        place = self.tensors.get(name) or self.ops.get(name)
        return None if place is None else place[0]

    def counterpart(self, name: str, repeat: int) -> str:
        """The counterpart of a tensor or operator in ``repeat``."""
        if name in self.tensors:
            return self.by_key[repeat][self.tensors[name][1]]
        return self.repeats[repeat][self.ops[name][1]]


def group_layers(whole: Graph, repeats: tuple[tuple[str, ...], ...]) -> LayerGroup:
    """The group of these repeats. A tensor belongs to a repeat that makes it, or that alone reads it as a graph input."""
    ops = {name: (repeat, place) for repeat, names in enumerate(repeats) for place, name in enumerate(names)}
    tensors: dict[str, tuple[int, Key]] = {}
    for name, (repeat, place) in ops.items():
        tensors.update((tensor, (repeat, (place, index))) for index, tensor in enumerate(whole.op[name].outputs))
    for item in whole.inputs:
        readers = [(ops.get(whole.ops[index].name), position) for index, position in whole.consumers[item.tensor]]
        if readers and None not in readers and len({place[0] if place else None for place, _ in readers}) == 1:
            first, position = readers[0]
            if first is not None:
                tensors[item.tensor] = first[0], ("input", first[1], position)
    named: tuple[dict[Key, str], ...] = tuple({} for _ in repeats)
    for tensor, (repeat, key) in tensors.items():
        named[repeat][key] = tensor
    return LayerGroup(repeats, ops, tensors, named)
