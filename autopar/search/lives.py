"""When what lives: the memory items of a model's nodes. See ``model`` for what the nodes are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from autopar.graph import DTYPE_BYTES, Graph, Op
from autopar.rules import is_alias
from autopar.schedule import OUTPUT
from autopar.search.space import spec_bytes
from autopar.sharding import ShardingSpec
from cost_models import optimizer_bytes

if TYPE_CHECKING:
    from autopar.search.model import Model


def add_lives(model: Model, times: Mapping[str, int]) -> None:
    """Memory items of every node, in time steps of one operator; ``[0, end)`` covers the optimizer's step too.

    A value lives until its first reader or, where readers share a layout, the layout from there to the last of them; at that last
    reader it is the reader's own input. Views share what they view.
    """
    space, graph = model.space, model.space.graph
    end = len(graph.ops) + 1
    root = _storage_roots(graph)
    _add_leaving(model, times, root)
    for item in graph.inputs:
        home = model.nodes[model.number["input", item.tensor]]
        value = graph.tensors[item.tensor]
        size = DTYPE_BYTES[value.dtype]
        for choice, local in enumerate(spec_bytes(value, home.specs, space.machine)):
            states = optimizer_bytes(space.optimizer, local // size, value.dtype) if item.trained else 0
            home.items[choice].append((0, end, local + states))
    held: set[str] = set()
    last: set[tuple[str, str]] = set()
    for tensor, site in model.sites.items():
        early, late = site.phases(graph)
        stored = root[tensor] not in graph.producer
        for readers in (early, late):
            if readers and not stored:
                last.add((max(readers, key=lambda r: r.time).name, tensor))
        first = min((r.time for r in early or (() if site.saved is not None else late)), default=0)
        if root[tensor] == tensor and not stored:
            _hold(model, site.producer, tensor, site.specs, times[graph.producer[tensor].name], first)
            for node, readers in ((site.forward, early), (site.backward, late)):
                if node is not None:
                    reads = [r.time for r in readers]
                    _hold(model, node, tensor, model.nodes[node].specs, min(reads), max(reads), least=0)
        if site.saved is not None and not model.nodes[site.saved].states and root[tensor] not in held:
            held.add(root[tensor])
            kept = model.nodes[site.saved]
            begin, dies = max(r.time for r in early) + 1, min(r.time for r in late)
            for choice, local in enumerate(spec_bytes(graph.tensors[tensor], kept.specs, space.machine)):
                if dies > begin and (not stored or kept.from_layout[choice]):
                    kept.items[choice].append((begin, dies, local))
    for op in graph.ops:
        if not _views(op):
            counted: set[str] = set()
            for position, tensor in enumerate(op.inputs):
                if (op.name, tensor) in last and root[tensor] not in counted:
                    counted.add(root[tensor])
                    specs = space.op_choices(op).inputs(position)
                    _hold(model, model.number["op", op.name], tensor, specs, times[op.name], times[op.name])


def _hold(model: Model, node: int, tensor: str, specs: tuple[ShardingSpec, ...], begin: int, end: int, least: int = 1) -> None:
    """``tensor`` lives in the spec of the node's choice over ``[begin, end)``, at least ``least`` steps."""
    end = max(end, begin + least)
    if end > begin:
        for items, local in zip(
            model.nodes[node].items, spec_bytes(model.space.graph.tensors[tensor], specs, model.space.machine), strict=True
        ):
            items.append((begin, end, local))


def _add_leaving(model: Model, times: Mapping[str, int], root: Mapping[str, str]) -> None:
    """What leaves lives from just after it is made to the end: outputs, gradients (in their parameter's spec), new values of buffers."""
    space, graph = model.space, model.space.graph
    named = {item.name: item.tensor for item in graph.inputs}
    counted = {item.tensor for item in graph.inputs}
    for index, output in enumerate(graph.outputs):
        if root[output.tensor] in counted:
            continue
        counted.add(root[output.tensor])
        key = ("output", f"{OUTPUT}{index}") if output.kind == "output" else ("input", named[output.name])
        node = model.nodes[model.number[key]]
        born = times[graph.producer[output.tensor].name] + 1
        for choice, local in enumerate(spec_bytes(graph.tensors[output.tensor], node.specs, space.machine)):
            node.items[choice].append((born, len(graph.ops) + 1, local))


def _storage_roots(graph: Graph) -> dict[str, str]:
    """The tensor whose storage each tensor shares when nothing is resharded in between."""
    root = {item.tensor: item.tensor for item in graph.inputs}
    for op in graph.ops:
        root.update((tensor, root[op.inputs[0]] if _views(op) else tensor) for tensor in op.outputs)
    return root


def _views(op: Op) -> bool:
    return bool(op.inputs) and is_alias(op)
