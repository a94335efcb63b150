"""The local steps of reshards: a rank keeps its slice of a tensor, or masks what is another rank's."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from autopar.runtime.ranks.filling import fitted, sliced
from autopar.schedule.collectives import Part
from autopar.torch_compat import shares_memory


def _slicing(part: Part, index: int) -> Callable[[Tensor], Tensor]:
    (dim,), shapes = part.step.dims, part.shapes
    return lambda tensor: _apart_from(tensor, sliced(tensor, shapes, dim, index))


def _masking(part: Part, index: int) -> Callable[[Tensor], Tensor]:
    shapes = part.shapes

    def run(tensor: Tensor) -> Tensor:
        kept = fitted(tensor, shapes.target, shapes)
        return torch.zeros_like(kept) if index else _apart_from(tensor, kept)

    return run


def _apart_from(tensor: Tensor, part: Tensor) -> Tensor:
    """A part of a tensor, in order and in memory of its own, which one that was filled up has already."""
    return part.clone(memory_format=torch.contiguous_format) if shares_memory(part, tensor) else part.contiguous()


CUT: Mapping[str, Callable[[Part, int], Callable[[Tensor], Tensor]]] = {"slice": _slicing, "mask": _masking}
"""The local steps of reshards: (the step on this rank, the rank's index in the group) -> what it does."""
