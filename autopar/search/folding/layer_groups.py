"""Equal layers with everything that is in them: what lies at one place in each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autopar.graph import Graph

PATTERN = 1
"""The repeat whose choices those between take over."""
Key = tuple[Any, ...]
"""What a tensor is within its repeat: of which operator it is which output, or which input of its own."""


@dataclass(frozen=True)
class Group:
    """Where everything of a group of repeats is.

    Args:
        repeats: names of the operators of each repeat.
        ops: repeat and position of each operator.
        tensors: repeat and key of each tensor that belongs to one repeat.
        named: the tensors of each repeat by key.
    """

    repeats: tuple[tuple[str, ...], ...]
    ops: Mapping[str, tuple[int, int]]
    tensors: Mapping[str, tuple[int, Key]]
    named: tuple[Mapping[Key, str], ...]

    @property
    def echo(self) -> int:
        return len(self.repeats) - 2

    @property
    def left_out(self) -> range:
        return range(PATTERN + 1, self.echo)

    def repeat_of(self, name: str) -> int | None:
        """The repeat that an operator or tensor belongs to."""
        place = self.tensors.get(name) or self.ops.get(name)
        return None if place is None else place[0]

    def moved(self, name: str, repeat: int) -> str:
        """The tensor or operator of ``repeat`` that is at the place of ``name``."""
        if name in self.tensors:
            return self.named[repeat][self.tensors[name][1]]
        return self.repeats[repeat][self.ops[name][1]]


def grouped(whole: Graph, repeats: tuple[tuple[str, ...], ...]) -> Group:
    """Equal layers with their tensors: what their operators make, and what enters in one of them alone."""
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
    return Group(repeats, ops, tensors, named)
