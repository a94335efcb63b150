"""The only file that touches private torch names (torch 2.13)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives  # registers the operators of torch.ops._c10d_functional
from torch.distributed.tensor import Placement, Shard
from torch.distributed.tensor.placement_types import _StridedShard

# ---------------------------------------------------------------- runtime: collectives and DTensor

StridedShard = _StridedShard
"""A shard of a dim that later mesh axes have already cut in ``split_factor`` blocks."""

_functional = torch.ops._c10d_functional
_AS_BYTES = (torch.int16, torch.complex64, torch.complex128)
"""Dtypes that gloo cannot move: sent as bytes."""


def split_factor_of(placement: Placement) -> int | None:
    """1 for a plain shard, the split factor for a strided one, None for anything else."""
    if isinstance(placement, _StridedShard):
        return placement.split_factor
    return 1 if isinstance(placement, Shard) else None


def all_gather_buffer(flat: torch.Tensor, size: int, group: dist.ProcessGroup) -> torch.Tensor:
    """The group's one-dim tensors, one after another."""
    if flat.dtype in _AS_BYTES:
        return all_gather_buffer(flat.view(torch.uint8), size, group).view(flat.dtype)
    return _functional.wait_tensor(_functional.all_gather_into_tensor(flat, size, group.group_name))


def reduce_scatter_buffer(flat: torch.Tensor, reduction: str, size: int, group: dist.ProcessGroup) -> torch.Tensor:
    """This rank's part of the group's reduced one-dim tensors."""
    return _functional.wait_tensor(_functional.reduce_scatter_tensor(flat, reduction, size, group.group_name))


def all_reduce_buffer(tensor: torch.Tensor, reduction: str, group: dist.ProcessGroup) -> torch.Tensor:
    """The group's tensors reduced, in a new tensor."""
    return _functional.wait_tensor(_functional.all_reduce(tensor, reduction, group.group_name))


def all_to_all_buffer(flat: torch.Tensor, received: Sequence[int], sent: Sequence[int], group: dist.ProcessGroup) -> torch.Tensor:
    """One-dim exchange: ``sent[i]`` elements go to member ``i``, ``received[i]`` come from it."""
    if flat.dtype in _AS_BYTES:
        scale = flat.element_size()
        sizes = [size * scale for size in received], [size * scale for size in sent]
        return all_to_all_buffer(flat.view(torch.uint8), *sizes, group).view(flat.dtype)
    return _functional.wait_tensor(_functional.all_to_all_single(flat, list(received), list(sent), group.group_name))


def keeps_autograd_graph() -> bool:
    """Whether the backward pass that is running was asked to keep the graph (``retain_graph=True``)."""
    return torch._C._autograd._get_current_graph_task_keep_graph()
