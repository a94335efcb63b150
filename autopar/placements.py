"""Placements that a model brings along: DTensors among arguments and parameters, and ``shard`` inside a model. ``same_sharding`` compares.

A DTensor's placement is a pin, and capture sees its global shape.
"""

from __future__ import annotations

import fnmatch
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from autopar.cost_models import Mesh
from autopar.errors import SpecError, UsageError
from autopar.graph import Graph
from autopar.sharding import ShardingSpec

_AXES = re.compile(r"\([^()]*\)")
"""The names of axes in a pin."""


def same_sharding(a: Any, b: Any, mesh: Any = None) -> bool:
    """Whether two tensors are known to lie alike: every rank holds the same part of both, whole or summed as far.

    Conservative: True only where that is certain. ``S01`` and ``S10`` hold the same parts in other places, and differ; a spec without its
    mesh may split by an axis of size 1, and differs from one that does not.

    Args:
        a, b: each a DTensor, a ``ShardingSpec`` or its text (``"S0 R"``). Two DTensors lie on one mesh to be alike, and have one shape.
        mesh: of specs: ``"dp=2,tp=4"``, a mapping of sizes by name, or a ``Mesh``; of DTensors it is their own.

    Raises:
        SpecError: a text that cannot be read. UsageError: something that has no sharding.
    """
    placed = [item for item in (a, b) if _may_exist() and _is_placed(item)]
    if len(placed) == 2 and (tuple(a.shape) != tuple(b.shape) or a.device_mesh != b.device_mesh):
        return False
    sizes = tuple(placed[0].device_mesh.shape) if placed else Mesh.parse(mesh).sizes if mesh is not None else None
    first, second = (_spec_of(item, sizes) for item in (a, b))
    if sizes is not None:
        if max((axis + 1 for spec in (first, second) for axis in (*spec.split_axes, *spec.partial_axes)), default=0) > len(sizes):
            return False
        first, second = first.normalized(sizes), second.normalized(sizes)
    return first == second


def shard(x: Any, spec: str) -> Any:
    """Inside of a model's forward: the plan splits this value so. Anywhere else it is ``x`` itself.

    Args:
        x: a tensor ``[...]`` of global shape.
        spec: a word for each dim, as in pins: ``"S0 R"`` by axis number, ``"S(dp) R"`` by name. The gradient is free.

    Raises:
        UsageError: the spec is no text. A spec that does not fit the tensor or the mesh is refused when planning, with this line.
    """
    if not isinstance(spec, str):
        raise UsageError(f"autopar.shard with a {type(spec).__name__}", "give a spec such as 'S0 R'")
    import torch

    return torch.ops.autopar.shard.default(x, spec) if torch.compiler.is_exporting() else x


def written_pins(graph: Graph, meshes: Sequence[Mesh]) -> dict[str, str]:
    """Operator to spec for every ``shard`` in the model.

    Raises:
        UsageError: a spec that fits none of the meshes, with the user's line.
    """
    found = {}
    for op in graph.ops:
        if op.target == "autopar.shard.default":
            text, shape = str(op.args[1]), graph.tensors[op.inputs[0]].shape
            reasons = [_reason(text, shape, mesh) for mesh in meshes]
            if all(reasons):
                hint = "give R, or S with axes that divide the dim, or with one axis"
                raise UsageError(f"{op.location}: autopar.shard with {text!r}: {reasons[0]}", hint)
            found[f"op:{op.name}"] = text
    return found


def _reason(text: str, shape: Sequence[int], mesh: Mesh) -> str | None:
    """Why a spec cannot be a pin on a mesh; None when it can."""
    try:
        spec = ShardingSpec.parse(text, mesh.names)
    except SpecError as error:
        return error.message
    if spec.blocks:
        return f"{spec!s} splits blocks, which parameters alone have"
    return f"a pinned tensor cannot be partial ({spec!s})" if spec.partial else spec.problem(shape, mesh.sizes)


def _spec_of(item: Any, sizes: tuple[int, ...] | None) -> ShardingSpec:
    if isinstance(item, ShardingSpec):
        return item
    if isinstance(item, str):
        return ShardingSpec.parse(item)
    if sizes is not None and _may_exist() and _is_placed(item):
        from autopar.runtime import from_placements

        found: ShardingSpec = from_placements(item.placements, item.dim(), sizes)
        return found
    raise UsageError(f"a {type(item).__name__} has no sharding", "give DTensors, or specs such as 'S0 R'")


def without_placement(tree: Any) -> Any:
    """The arguments with a meta tensor of the global shape in place of each DTensor."""
    return _map(tree, _as_meta) if _may_exist() else tree


def plain_dims(model: Any, pins: Mapping[str, str]) -> dict[str, frozenset[int]]:
    """By parameter the dims that pins, and placements of DTensors, split as a whole: the graph must not hold them in blocks."""
    found: dict[str, frozenset[int]] = {}
    is_module = hasattr(model, "named_modules")  # what is none, capture refuses
    for name, value in model.named_parameters(remove_duplicate=False) if is_module else ():
        for key, text in pins.items():
            words = _AXES.sub("", text).split()
            if fnmatch.fnmatchcase(name, key):
                dims = [dim for dim, word in enumerate(words) if word.startswith("S") and "/" not in word]
            else:  # what a module gives is pinned as the module has it
                dims = list(range(value.dim())) if fnmatch.fnmatchcase(f"module:{name.rpartition('.')[0]}", key) else []
            found[name] = found.get(name, frozenset()).union(dims)
        if _may_exist() and _is_placed(value):
            spec = _spec_of(value, tuple(value.device_mesh.shape))
            split = [dim for dim, axes in enumerate(spec.dims) if axes and dim not in dict(spec.blocks)]
            found[name] = found.get(name, frozenset()).union(split)
    return {name: dims for name, dims in found.items() if dims}


def placed_pins(model: Any, args: Any, kwargs: Mapping[str, Any], loss_args: Any, graph: Graph, meshes: Sequence[Mesh]) -> dict[str, str]:
    """Name to spec for every parameter, buffer and argument that is a DTensor.

    Args:
        graph: the model's graph, whose ``arguments`` name the tensors of the call.
        meshes: the meshes to be planned for; DTensors fix the mesh, so there must be one, of the DTensors' sizes.

    Raises:
        UsageError: DTensors on another mesh, or partial ones.
    """
    if not _may_exist():
        return {}
    found = {name: value for name, value in (*model.named_parameters(), *model.named_buffers()) if _is_placed(value)}
    given = {"args": list(args), "kwargs": dict(kwargs), "loss_args": list(loss_args)}
    for name, value in _named(given, graph.arguments):
        if _is_placed(value):
            found[f"input:{name}"] = value
    return {name: _spec(name, value, meshes) for name, value in found.items()}


def _may_exist() -> bool:
    """Importing DTensor takes seconds, and whoever has one has imported it."""
    return "torch.distributed.tensor" in sys.modules


def _is_placed(value: Any) -> bool:
    from torch.distributed.tensor import DTensor

    return isinstance(value, DTensor)


def _as_meta(value: Any) -> Any:
    import torch

    if not _is_placed(value):
        return value
    return torch.empty(value.shape, dtype=value.dtype, device="meta").requires_grad_(value.requires_grad)


def _map(tree: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(tree, dict):
        return {key: _map(item, change) for key, item in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(_map(item, change) for item in tree))
    if isinstance(tree, list | tuple):
        return type(tree)(_map(item, change) for item in tree)
    return change(tree)


def _named(given: Any, tree: Any) -> Iterator[tuple[str, Any]]:
    """(tensor name, value) for each tensor leaf of the recorded tree."""
    if isinstance(tree, Mapping):
        if isinstance(tree.get("tensor"), str) and len(tree) == 1:
            yield tree["tensor"], given
        elif isinstance(given, Mapping):
            for key, item in tree.items():
                if key in given:
                    yield from _named(given[key], item)
    elif isinstance(tree, list | tuple) and isinstance(given, list | tuple):
        for value, item in zip(given, tree, strict=False):
            yield from _named(value, item)


def _spec(name: str, value: Any, meshes: Sequence[Mesh]) -> str:
    from autopar.runtime import from_placements

    sizes = tuple(value.device_mesh.shape)
    if len(meshes) != 1 or meshes[0].sizes != sizes:
        wanted = " or ".join(str(mesh) for mesh in meshes[:3])
        raise UsageError(
            f"{name} is a DTensor on a mesh of sizes {list(sizes)}, the plan is for {wanted}", "plan for the mesh that the DTensors lie on"
        )
    spec = from_placements(value.placements, value.dim(), sizes)
    if spec.partial:
        raise UsageError(f"{name} is a DTensor with partial sums ({spec})", "redistribute it to Replicate or Shard placements first")
    return str(spec)
