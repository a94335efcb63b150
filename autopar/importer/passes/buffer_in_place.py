"""Buffers changed in place: a cache of which a call fills a few places is not copied.

Tracing makes a model's changes in place functional: each change makes a tensor, and the last is copied into the buffer at the end.
Where nobody reads the old values afterwards, the operator changes the buffer itself, as in the model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Set

from autopar.graph import Graph, Op
from autopar.rules import STORING, storage_roots


def stored(graph: Graph) -> Graph:
    """The graph with changes of a part of a buffer made in it. Of a graph for training none is: backward may want what was there."""
    if graph.mode != "inference":
        return graph
    place = {op.name: index for index, op in enumerate(graph.ops)}
    roots = storage_roots(graph)
    buffers = {item.name: item.tensor for item in graph.of_kind("buffer")}
    changed: dict[str, Op] = {}
    for output in graph.outputs:
        if output.kind == "buffer":
            buffer, chain = buffers[output.name], _chain(graph, output.tensor)
            versions = {buffer, *(op.outputs[0] for op in chain)}
            last = {place[op.name]: op.inputs[0] for op in chain}
            leaving = [other.tensor for other in graph.outputs if roots[other.tensor] in versions]
            if chain and chain[0].inputs[0] == buffer and leaving == [output.tensor] and _alone(graph, last, versions, roots):
                changed.update((op.name, dataclasses.replace(op, target=STORING[op.target])) for op in chain)
    return dataclasses.replace(graph, ops=tuple(changed.get(op.name, op) for op in graph.ops)) if changed else graph


def _chain(graph: Graph, tensor: str) -> list[Op]:
    """The changes that make ``tensor``, one of the other's result, the first of them first."""
    found: list[Op] = []
    while tensor in graph.producer and _replaces_entries(graph.producer[tensor]):
        found.append(graph.producer[tensor])
        tensor = found[-1].inputs[0]
    return found[::-1]


def _replaces_entries(op: Op) -> bool:
    """Whether the operator puts entries into a tensor, and these do not depend on what was there."""
    return op.target in STORING and not any(value is True for value in (*op.args, *dict(op.kwargs).values()))


def _alone(graph: Graph, last: Mapping[int, str], versions: Set[str], roots: Mapping[str, str]) -> bool:
    """Whether each version of the buffer is read, itself or by a view, only before it is changed, and by what changes it only as that.

    Args:
        last: by place of the operator that changes it, the version that is no more then.
    """
    gone = {version: place for place, version in last.items()}
    return not any(
        roots[tensor] in versions and ((position and place in last) or place > gone.get(roots[tensor], len(graph.ops)))
        for place, op in enumerate(graph.ops)
        for position, tensor in enumerate(op.inputs)
    )
