"""Runs a captured graph operator by operator with torch, from ``Op`` alone: the meaning of a graph, in forty lines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import autopar.dialect  # noqa: F401  registers torch.ops.autopar
from autopar.graph import Dtype, Graph, Op, Ref


def run_graph(graph: Graph, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Every tensor of the graph by name, from the values of its inputs by tensor name; parameters are of the model's shapes."""
    tensors = dict(values)
    tensors |= {item.tensor: values[item.tensor].view(graph.tensors[item.tensor].shape) for item in graph.inputs if item.blocks is not None}
    with torch.no_grad():
        for op in graph.ops:
            results = run_op(op, [tensors[name] for name in op.inputs])
            for name, result in zip(op.outputs, results, strict=True):
                declared = graph.tensors[name]
                assert tuple(result.shape) == declared.shape, f"{name}: {tuple(result.shape)} is not {declared.shape}"
                assert str(result.dtype) == f"torch.{declared.dtype}", f"{name}: {result.dtype} is not {declared.dtype}"
                tensors[name] = result
    return tensors


def run_op(op: Op, inputs: list[Tensor]) -> list[Tensor]:
    """The results of one operator, without those that it was told not to compute."""

    def value(argument: Any) -> Any:
        match argument:
            case Ref(index):
                return inputs[index]
            case Dtype(name):
                return getattr(torch, name)
            case tuple():
                return [value(item) for item in argument]
            case _:
                return argument

    function = torch.ops
    for word in op.target.split("."):
        function = getattr(function, word)
    if op.target in ("aten.view.default", "aten._unsafe_view.default"):
        function = torch.reshape
    result = function(*(value(item) for item in op.args), **{key: value(item) for key, item in op.kwargs})
    results = list(result) if isinstance(result, (tuple, list)) else [result]
    return [item for item in results if item is not None]
