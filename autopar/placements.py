"""DTensors among a user's arguments and parameters: where they lie is a pin, and capture sees their global shape."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from autopar.errors import UsageError
from autopar.graph import Graph
from cost_models import Mesh


def without_placement(tree: Any) -> Any:
    """The same nest of arguments with a meta tensor of the global shape for each DTensor."""
    return _map(tree, _as_meta) if _may_exist() else tree


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
