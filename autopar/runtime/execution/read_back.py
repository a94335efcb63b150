"""Operators that a CUDA graph cannot hold: the host waits for values of theirs, or makes copies of its own."""

from __future__ import annotations

import torch

from autopar.dialect.library import LOOKING
from autopar.errors import UsageError
from autopar.graph import Graph, Op
from autopar.runtime.execution.replaying import EAGER, refuse
from autopar.schedule import Schedule

_DECOMPOSITIONS = ("_linalg_eigh", "linalg_eig", "linalg_eigvals", "_linalg_svd", "linalg_pinv", "linalg_matrix_exp", "cholesky")
"""Of matrices: CUDA's solvers say on the host whether they have converged, or the host takes a part of the work."""
READ_BACK = frozenset({*(f"aten.{name}" for name in _DECOMPOSITIONS), "autopar.ctc_loss", "autopar.ctc_loss_backward"})
"""Operators without their overload, on any device. CTC's kernel takes the lengths of sequences on the host."""


def check_recordable(schedule: Schedule, device: torch.device) -> None:
    """Raises UsageError: an operator reads values back, at the model's line; or values lie on the host in between."""
    if any(call.is_transfer for call in schedule.calls):
        message = "the plan keeps values on the host, and CUDA graphs make no copies there"
        raise UsageError(message, f"{EAGER}, or plan without offload")
    for op in schedule.graph.ops:
        if reads_back(op, schedule.graph, device):
            raise refuse(op, "the host reads values of it")


def reads_back(op: Op, graph: Graph, device: torch.device) -> bool:
    """Whether the host waits for values of the operator."""
    target = op.target.rpartition(".")[0]
    if target.startswith(("aten.index_put", "aten._unsafe_index_put")):
        return any(graph.tensors[name].dtype == "bool" for name in op.inputs[1:-1])  # a mask becomes numbers of rows
    if target.removeprefix("autopar.") in LOOKING:
        grouped = device.type == "cuda" and graph.tensors[op.inputs[0]].dtype == "bfloat16" and target != "autopar.grouped_outer"
        return not grouped
    return target in READ_BACK
