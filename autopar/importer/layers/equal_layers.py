"""Equal layers: runs of repeats that compute the same, found by module path and proved equal by their operators.

A module path with a number in it (``layers.3.attn``) is a repeat of its container (``layers``). Neighbouring repeats whose
operators agree position by position in everything but names (target, arguments, shapes, dtypes, phase, and which of their own
results or which weights they read) form a group. Where layers of a few kinds take turns, those of one turn are a repeat together.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

from autopar.graph import Graph, Op, to_json
from autopar.rules import seed_of

Groups = tuple[tuple[tuple[str, ...], ...], ...]
TURN = 8
"""Layers in a turn, at most."""


def find_groups(graph: Graph) -> Groups:
    """Groups of at least two equal repeats; an operator is in at most one group, that of the outermost container."""
    taken: set[str] = set()
    found: list[tuple[tuple[str, ...], ...]] = []
    inputs = {item.tensor: item.name for item in graph.inputs}
    place = {op.name: index for index, op in enumerate(graph.ops)}
    for repeats in _containers(graph):
        free = {path: [op for op in ops if op.name not in taken] for path, ops in repeats.items()}
        shared = _shared(graph, free)
        signed = [(path, ops, _signature(graph, path, ops, inputs, shared)) for path, ops in free.items() if ops]
        known: dict[object, int] = {}
        for first, length, count in turns([known.setdefault(signature, len(known)) for _, _, signature in signed]):
            members = [signed[at : at + length] for at in range(first, first + count * length, length)]
            group = tuple(tuple(sorted((op.name for _, ops, _ in turn for op in ops), key=place.__getitem__)) for turn in members)
            found.append(group)
            taken.update(name for repeat in group for name in repeat)
    return tuple(found)


def turns(kinds: Sequence[object]) -> Iterator[tuple[int, int, int]]:
    """Where the same few follow one another at least twice: the first place, how many they are, and how often. Of several ways that which
    goes furthest, and of those the one with the fewest in a turn.

    >>> list(turns("aaabcbcbcd"))
    [(0, 1, 3), (3, 2, 3)]
    """
    first = 0
    while first < len(kinds):
        best = (1, 1)
        for length in range(1, TURN + 1):
            count = 1
            while kinds[first : first + length] == kinds[first + count * length : first + (count + 1) * length]:
                count += 1
            if count > 1 and length * count > best[0] * best[1]:
                best = (length, count)
        if best[1] > 1:
            yield first, *best
        first += best[0] * best[1]


def _containers(graph: Graph) -> Iterator[Mapping[str, list[Op]]]:
    """For each numbered container, outermost first: repeat path to its operators, in execution order."""
    containers: dict[str, dict[str, list[Op]]] = {}
    for op in graph.ops:
        for match in re.finditer(r"(?:^|\.)(\d+)(?=\.|$)", op.module):
            container = op.module[: match.start()]
            containers.setdefault(container, {}).setdefault(op.module[: match.end()], []).append(op)
    for container in sorted(containers, key=lambda path: (path.count("."), path)):
        repeats = containers[container]
        yield {path: repeats[path] for path in sorted(repeats, key=lambda path: int(path.rpartition(".")[2]))}


def _shared(graph: Graph, repeats: Mapping[str, list[Op]]) -> set[str]:
    """The tensors made by none of the repeats that several of them read: which of these a repeat reads tells it from others."""
    made = {tensor for ops in repeats.values() for op in ops for tensor in op.outputs}
    readers: dict[str, set[str]] = {}
    for path, ops in repeats.items():
        for op in ops:
            for tensor in op.inputs:
                if tensor in graph.producer and tensor not in made:
                    readers.setdefault(tensor, set()).add(path)
    return {tensor for tensor, paths in readers.items() if len(paths) > 1}


def _signature(graph: Graph, path: str, ops: list[Op], inputs: Mapping[str, str], shared: Set[str]) -> tuple[Any, ...]:
    """What a repeat computes, without its names.

    Args:
        inputs: names of what comes from outside.
        shared: see ``_shared``.
    """
    made = {tensor: (index, place) for index, op in enumerate(ops) for place, tensor in enumerate(op.outputs)}
    outside: dict[str, int] = {}

    def read(tensor: str) -> Any:
        if tensor in made:
            return made[tensor]
        if tensor in inputs:
            name = inputs[tensor]
            return name.removeprefix(path) if name.startswith(f"{path}.") else ("shared", name)
        if tensor in shared:
            return "shared", tensor
        return "outside", outside.setdefault(tensor, len(outside)), _shape(graph, tensor)

    rows = []
    for op in ops:
        args = op.args[: seed_of(op)]
        outputs = tuple(_shape(graph, tensor) for tensor in op.outputs)
        rows.append((
            op.target, str(to_json(args)), str(to_json(dict(op.kwargs))), op.phase, op.module.removeprefix(path),
            tuple(read(tensor) for tensor in op.inputs), tuple(_shape(graph, tensor) for tensor in op.inputs), outputs,
        ))  # fmt: skip
    return tuple(rows)


def _shape(graph: Graph, tensor: str) -> tuple[tuple[int, ...], str]:
    value = graph.tensors[tensor]
    return value.shape, value.dtype
