"""Values for what has none: meta or fake weights, and inputs, which must lie in a range that the model accepts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from autopar.graph import Graph, Op
from autopar.rules import count_entries, looked_up
from autopar.runtime.weights.sharding import copy_tree, has_no_values, own_tensors
from autopar.torch_compat import map_tensors

DEFAULT_BOUND = 2
"""Integers whose use in the graph does not bound them are 0 or 1."""
WEIGHT_SCALE = 0.02
"""Standard deviation of weights whose module has no ``reset_parameters``."""


def with_values(model: nn.Module, seed: int) -> nn.Module:
    """The model with real weights on the CPU. Weights that have values keep them (and share them, where they are on the CPU already).

    Meta and fake weights are filled by their module's ``reset_parameters``, or at random: matrices normal, vectors called
    weight one, other floats zero, integers zero; buffers, which scale and turn what they meet, uniform around one.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tensors: dict[int, torch.Tensor] = {}
        for _, _, name, tensor in own_tensors(model):
            if id(tensor) in tensors:
                continue
            real = _filled(name, tensor) if has_no_values(tensor) else tensor.detach().cpu()
            tensors[id(tensor)] = nn.Parameter(real, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else real
            tensors[id(tensor)]._backward_hooks = tensor._backward_hooks  # what the user registered on its gradient
        copied = copy_tree(model, tensors)
        pairs = list(zip(model.modules(), copied.modules(), strict=True))
        for original, module in pairs:
            direct = [tensor for tensor in (*original._parameters.values(), *original._buffers.values()) if tensor is not None]
            if hasattr(module, "reset_parameters") and direct and all(has_no_values(tensor) for tensor in direct):
                module.reset_parameters()
        for module in copied.modules():
            for name, value in list(vars(module).items()):
                if isinstance(value, torch.Tensor) and has_no_values(value):
                    vars(module)[name] = _filled(name, value)
    return copied


def _filled(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_floating_point():
        return torch.zeros(tensor.shape, dtype=tensor.dtype)
    if not isinstance(tensor, nn.Parameter):
        return torch.rand(tensor.shape, dtype=tensor.dtype) + 0.5
    if tensor.dim() > 1:
        return torch.randn(tensor.shape, dtype=tensor.dtype) * WEIGHT_SCALE
    return torch.full(tensor.shape, float("weight" in name or "var" in name), dtype=tensor.dtype)


def with_example_values(call: Any, names: Mapping[int, str], graph: Graph, seed: int) -> Any:
    """The call with random values for its meta and fake tensors; real ones are copied to the CPU.

    Args:
        call: nested arguments.
        names: input name of each tensor, by identity.
        graph: its uses of an integer input say how large it may be.
    """
    generator = torch.Generator().manual_seed(seed)
    done: dict[int, torch.Tensor] = {}

    def fill(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in done:
            name = names.get(id(tensor), "")
            values = tensor.detach().cpu() if not has_no_values(tensor) else example_like(tensor, name, graph, generator)
            done[id(tensor)] = values.requires_grad_(tensor.requires_grad)
        return done[id(tensor)]

    return map_tensors(fill, call)


def example_like(tensor: torch.Tensor, name: str, graph: Graph, generator: torch.Generator) -> torch.Tensor:
    """Random values of the tensor's shape and dtype, integers in the range that the graph's use of the input ``name`` allows."""
    shape = tuple(tensor.shape)
    if tensor.dtype == torch.bool:
        return torch.rand(shape, generator=generator) < 0.5
    if tensor.is_floating_point() or tensor.is_complex():
        return torch.randn(shape, generator=generator).to(tensor.dtype)
    entry = next((item.tensor for item in graph.inputs if item.kind == "input" and item.name == name), None)
    bound = index_bound(graph, entry) if entry is not None else DEFAULT_BOUND
    return torch.randint(bound, shape, generator=generator).to(tensor.dtype)


def index_bound(graph: Graph, tensor: str, default: int = DEFAULT_BOUND) -> int:
    """The size of the smallest table that the values of ``tensor`` index, through views, copies and slices of it; ``default`` where they
    index none."""
    bounds: list[int] = []
    seen, todo = {tensor}, [tensor]
    while todo:
        name = todo.pop()
        for index, position in graph.consumers[name]:
            op = graph.ops[index]
            bound = _bound_of_use(graph, op, position)
            if bound is not None:
                bounds.append(bound)
            elif len(op.inputs) == 1:
                fresh = [output for output in op.outputs if output not in seen]
                seen.update(fresh)
                todo += fresh
    return min(bounds, default=default)


def _bound_of_use(graph: Graph, op: Op, position: int) -> int | None:
    """How many entries the operator's table has when its input at ``position`` is an index into it."""
    lookup = looked_up(op)
    return count_entries(op, graph.tensors) if lookup is not None and lookup.numbers == position else None
