"""Gradients that are views which repeat, such as that of a sum: each is copied, since optimizers write into gradients in place."""

from __future__ import annotations

import dataclasses

from autopar.graph import Graph, Op, Ref
from autopar.importer.naming import fresh
from autopar.rules import find_repeated

COPY = "aten.clone.default"


def with_dense_gradients(graph: Graph) -> Graph:
    """The graph with such gradients copied just after they are made, one copy for each that leaves."""
    repeated = find_repeated(graph)
    copied = [number for number, output in enumerate(graph.outputs) if output.kind == "gradient" and output.tensor in repeated]
    if not copied:
        return graph
    tensors, outputs, taken, behind = dict(graph.tensors), list(graph.outputs), set(graph.tensors), dict[str, list[Op]]()
    for number in copied:
        source, name = outputs[number].tensor, fresh("clone", {}, taken)
        maker = graph.producer[source]
        tensors[name] = dataclasses.replace(tensors[source], name=name)
        outputs[number] = dataclasses.replace(outputs[number], tensor=name)
        copy = Op(name, COPY, (source,), (name,), (Ref(0),), module=maker.module, phase=maker.phase, location=maker.location)
        behind.setdefault(maker.name, []).append(copy)
    ops = tuple(each for op in graph.ops for each in (op, *behind.get(op.name, ())))
    return dataclasses.replace(graph, tensors=tensors, ops=ops, outputs=tuple(outputs))
