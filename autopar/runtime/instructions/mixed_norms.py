"""Norms that take weights of more digits than their input, for which CPUs alone have kernels."""

from __future__ import annotations

import torch

from autopar.errors import UsageError
from autopar.graph import Graph

_NORMS = frozenset({"aten.native_layer_norm.default", "aten.native_group_norm.default"})
"""``torch.autocast`` of CPUs leaves them in the dtype of their input; that of CUDA computes them in float32."""


def check_norms(graph: Graph, device: torch.device) -> None:
    """Raises UsageError: the device has no kernel for a norm of half precision beside float32 weights."""
    if device.type == "cpu":
        return
    for op in (op for op in graph.ops if op.target in _NORMS):
        first, *others = (graph.tensors[name].dtype for name in op.inputs)
        if any(other != first for other in others):
            where = op.module or op.name
            message = f"{where} normalises {first} beside {others[0]} weights, for which {device.type} has no kernel"
            raise UsageError(message, "give the norm float32, as in norm(x.float()), or plan with compute_dtype='bfloat16'")
