"""Equal layers: runs of repeats that compute the same, found by module path and proved equal by their operators.

A module path with a number in it (``layers.3.attn``) is a repeat of its container (``layers``). Neighbouring repeats whose
operators agree position by position in everything but names (target, arguments, shapes, dtypes, phase, and which of their own
results or which weights they read) form a group.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any

from autopar.graph import Graph, Op, to_json

Groups = tuple[tuple[tuple[str, ...], ...], ...]
SEED_AT = {"autopar.dropout.default": 2, "autopar.uniform.default": 1, "autopar.normal.default": 1}


def find_groups(graph: Graph) -> Groups:
    """Groups of at least two equal repeats; an operator is in at most one group, that of the outermost container."""
    taken: set[str] = set()
    found: list[tuple[tuple[str, ...], ...]] = []
    inputs = {item.tensor: item.name for item in graph.inputs}
    for repeats in _containers(graph):
        free = {path: [op for op in ops if op.name not in taken] for path, ops in repeats.items()}
        signed = [(path, ops, _signature(graph, path, ops, inputs)) for path, ops in free.items() if ops]
        for _, run in groupby(signed, key=lambda item: item[2]):
            group = tuple(tuple(op.name for op in ops) for _, ops, _ in run)
            if len(group) > 1:
                found.append(group)
                taken.update(name for repeat in group for name in repeat)
    return tuple(found)


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


def _signature(graph: Graph, path: str, ops: list[Op], inputs: Mapping[str, str]) -> tuple[Any, ...]:
    """What a repeat computes, without its names."""
    made = {tensor: (index, place) for index, op in enumerate(ops) for place, tensor in enumerate(op.outputs)}
    outside: dict[str, int] = {}

    def read(tensor: str) -> Any:
        if tensor in made:
            return made[tensor]
        if tensor in inputs:
            name = inputs[tensor]
            return name.removeprefix(path) if name.startswith(f"{path}.") else ("shared", name)
        return "outside", outside.setdefault(tensor, len(outside)), _shape(graph, tensor)

    rows = []
    for op in ops:
        args = op.args[: SEED_AT.get(op.target)]
        outputs = tuple(_shape(graph, tensor) for tensor in op.outputs)
        rows.append((
            op.target, str(to_json(args)), str(to_json(dict(op.kwargs))), op.phase, op.module.removeprefix(path),
            tuple(read(tensor) for tensor in op.inputs), tuple(_shape(graph, tensor) for tensor in op.inputs), outputs,
        ))  # fmt: skip
    return tuple(rows)


def _shape(graph: Graph, tensor: str) -> tuple[tuple[int, ...], str]:
    value = graph.tensors[tensor]
    return value.shape, value.dtype
