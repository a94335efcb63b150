"""Pins: specs that the user fixed, resolved against the graph's names."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass, field

from autopar.cost_models import Mesh
from autopar.errors import UsageError
from autopar.graph import Graph
from autopar.rules import axis_layout
from autopar.schedule import OUTPUT
from autopar.sharding import AxisDims, Blocks, ShardingSpec


@dataclass(frozen=True)
class Pins:
    """Pinned specs.

    Args:
        inputs: of graph inputs, by tensor name.
        outputs: of graph outputs, by reader name (``output:0``).
        tensors: of operators' results, by tensor name.
        merged: axes that stand for several axes of a larger mesh. They split no blocks.
        on_axes: how input 0 of an operator lies over some axes where the model says so itself, by operator name.
    """

    inputs: Mapping[str, ShardingSpec] = field(default_factory=dict)
    outputs: Mapping[str, ShardingSpec] = field(default_factory=dict)
    tensors: Mapping[str, ShardingSpec] = field(default_factory=dict)
    merged: frozenset[int] = frozenset()
    on_axes: Mapping[str, AxisDims] = field(default_factory=dict)


def resolve_pins(graph: Graph, mesh: Mesh, constraints: Mapping[str, str]) -> Pins:
    """Reads constraints such as ``{"lm_head.weight": "S1 R", "input:tokens": "S0 R", "output:0": "R R", "module:layers.*": "S0 R R"}``.

    A bare name is a parameter or buffer; aliases of tied ones count. Its spec is for the parameter's own shape, a dim in blocks as
    ``S0/3``. Globs are allowed. ``module:`` pins the module's first output, ``op:`` an operator's first result.

    Raises:
        UsageError: a pin names nothing, two pins disagree, or a spec is illegal for the tensor.
    """
    places: dict[str, dict[str, ShardingSpec]] = {"input": {}, "output": {}, "tensor": {}}
    entering = {item.tensor: item for item in graph.inputs}
    for name, text in constraints.items():
        spec = ShardingSpec.parse(text, mesh.names)
        for kind, key, tensor in _targets(graph, name):
            item, shape = entering.get(tensor) if kind == "input" else None, graph.tensors[tensor].shape
            reason = spec.problem(shape if item is None else item.own_shape(shape), mesh.sizes)
            if spec.partial:
                reason = f"a pinned tensor cannot be partial ({spec!s})"
            if reason:
                hint = "give R, or S with axes that divide the dim, or with one axis"
                raise UsageError(f"the pin {name}={text!r} is illegal for {tensor}: {reason}", hint)
            place = places[kind]
            new = _in_graph(name, spec.normalized(mesh.sizes), None if item is None else item.blocks, mesh)
            if place.get(key, new) != new:
                raise UsageError(f"two pins disagree on {tensor}: {place[key]!s} and {new!s}", "remove one of them")
            place[key] = new
    return Pins(places["input"], places["output"], places["tensor"], on_axes=_layouts_on_axes(graph, mesh))


def _layouts_on_axes(graph: Graph, mesh: Mesh) -> dict[str, AxisDims]:
    """``Pins.on_axes`` of a graph.

    Raises:
        UsageError: the mesh has not the axes, or not with as many ranks; with the user's line.
    """
    found = {}
    for op in graph.ops:
        layout = axis_layout(op)
        if layout is not None:
            problem = layout.problem(graph.tensors[op.inputs[0]].shape, dict(mesh.axes))
            if problem:
                message = f"{op.location}: a local_map region or a collective in it does not fit the mesh: {problem}"
                raise UsageError(message, "plan on a mesh that has the axes of the region's device_mesh, by name and size")
            found[op.name] = layout.on(mesh.names, mesh.sizes)
    return found


def _in_graph(name: str, spec: ShardingSpec, blocks: Blocks | None, mesh: Mesh) -> ShardingSpec:
    """The pinned spec for the tensor as the graph holds it, in blocks or not.

    Raises:
        UsageError: the spec splits blocks that do not exist, or cuts across blocks.
    """
    if blocks is None and not spec.blocks:
        return spec
    if blocks is None:
        raise UsageError(f"the pin {name}={str(spec)!r} splits blocks of what the model does not cut into any", "split the dim as a whole")
    found = blocks.spec(spec, mesh.sizes)
    if found is None:
        hint = f"write /{blocks.count} after the axes of that dim, or plan the model with this pin rather than a graph captured without it"
        raise UsageError(f"the pin {name}={str(spec)!r} cuts across blocks: the graph holds dim {blocks.dim} as {blocks.count}", hint)
    return found


def _targets(graph: Graph, name: str) -> list[tuple[str, str, str]]:
    """(kind, key, tensor) of everything that the pin's name matches.

    Raises:
        UsageError: the name matches nothing.
    """
    prefix, _, pattern = name.partition(":")
    known: dict[str, tuple[str, str, str]]
    if prefix in ("input", "tangent") and pattern:
        known = {i.name: ("input", i.tensor, i.tensor) for i in graph.of_kind(prefix)}
    elif prefix == "output" and pattern:
        known = {o.name: ("output", f"{OUTPUT}{n}", o.tensor) for n, o in enumerate(graph.outputs) if o.kind == "output"}
    elif prefix == "module" and pattern:
        known = {path: ("tensor", tensor, tensor) for path, tensor in module_outputs(graph).items()}
    elif prefix == "op" and pattern:
        known = {op.name: ("tensor", op.outputs[0], op.outputs[0]) for op in graph.ops}
    else:
        prefix, pattern = "parameter", name
        known = {}
        for item in graph.inputs:
            if item.kind in ("parameter", "buffer"):
                known.update(dict.fromkeys((item.name, *item.aliases), ("input", item.tensor, item.tensor)))
    found = [place for key, place in known.items() if fnmatch.fnmatchcase(key, pattern)]
    if not found:
        near = difflib.get_close_matches(pattern, known, n=3, cutoff=0.3) or list(known)[:3]
        raise UsageError(
            f"the pin {name!r} names no {prefix} of the model",
            f"did you mean {' or '.join(near)}?" if near else f"the model has no {prefix}",
        )
    return found


def module_outputs(graph: Graph) -> dict[str, str]:
    """The tensor that each module returns first, by module path: the first result of its last forward operator."""
    found: dict[str, str] = {}
    for op in graph.ops:
        if op.phase == "forward" and op.module:
            parts = op.module.split(".")
            for end in range(1, len(parts) + 1):
                found[".".join(parts[:end])] = op.outputs[0]
    return found
