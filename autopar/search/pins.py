"""Pins: what the user fixed, resolved against the graph's names."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass, field

from autopar.errors import UsageError
from autopar.graph import Graph
from autopar.schedule import OUTPUT
from autopar.sharding import ShardingSpec
from cost_models import Mesh


@dataclass(frozen=True)
class Pins:
    """Pinned specs: of graph inputs by tensor name, of outputs by reader name (``output:0``), of operators' results by tensor name."""

    inputs: Mapping[str, ShardingSpec] = field(default_factory=dict)
    outputs: Mapping[str, ShardingSpec] = field(default_factory=dict)
    tensors: Mapping[str, ShardingSpec] = field(default_factory=dict)


def resolve_pins(graph: Graph, mesh: Mesh, constraints: Mapping[str, str]) -> Pins:
    """Reads constraints such as ``{"lm_head.weight": "S1 R", "input:tokens": "S0 R", "output:0": "R R", "module:layers.*": "S0 R R"}``.

    A bare name is a parameter or buffer (aliases of tied ones count); globs are allowed; ``module:`` pins the module's first
    output; ``op:`` pins an operator's first result.

    Raises:
        UsageError: a pin that names nothing, two pins that disagree, or a spec that is illegal for the tensor.
    """
    places: dict[str, dict[str, ShardingSpec]] = {"input": {}, "output": {}, "tensor": {}}
    for name, text in constraints.items():
        spec = ShardingSpec.parse(text, mesh.names)
        for kind, key, tensor in _targets(graph, name):
            reason = spec.problem(graph.tensors[tensor].shape, mesh.sizes)
            if spec.partial:
                reason = f"a pinned tensor cannot be partial ({spec!s})"
            if reason:
                raise UsageError(
                    f"the pin {name}={text!r} is illegal for {tensor}: {reason}", "give R or S with axes for each dim that they divide"
                )
            place = places[kind]
            new = spec.normalized(mesh.sizes)
            if place.get(key, new) != new:
                raise UsageError(f"two pins disagree on {tensor}: {place[key]!s} and {new!s}", "remove one of them")
            place[key] = new
    return Pins(places["input"], places["output"], places["tensor"])


def _targets(graph: Graph, name: str) -> list[tuple[str, str, str]]:
    """(kind, key, tensor) of everything the pin's name matches."""
    prefix, _, pattern = name.partition(":")
    known: dict[str, tuple[str, str, str]]
    if prefix == "input" and pattern:
        known = {i.name: ("input", i.tensor, i.tensor) for i in graph.of_kind("input")}
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
    """For each module path, the tensor it returns first: the result of its last forward operator."""
    found: dict[str, str] = {}
    for op in graph.ops:
        if op.phase == "forward" and op.module:
            parts = op.module.split(".")
            for end in range(1, len(parts) + 1):
                found[".".join(parts[:end])] = op.outputs[0]
    return found
