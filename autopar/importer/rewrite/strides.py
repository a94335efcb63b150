"""Operators about storage as operators about values: a part of a tensor has a storage of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from autopar.errors import CaptureError

aten = torch.ops.aten


def as_strided(x: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None) -> Tensor:
    """``x.as_strided``: entries of its storage by number. A copy: writing to it does not write to ``x``."""
    return _storage(x)[_positions(x, size, stride, storage_offset)]


def as_strided_scatter(x: Tensor, source: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None) -> Tensor:
    """``x`` with ``source`` at the places that ``x.as_strided`` names."""
    filled = _storage(x).index_put((_positions(x, size, stride, storage_offset),), source)
    order = _order(x)
    return filled.reshape([x.shape[dim] for dim in order]).permute([order.index(dim) for dim in range(x.dim())])


def _order(x: Tensor) -> list[int]:
    """The dims from the outermost in storage to the innermost."""
    return sorted(range(x.dim()), key=lambda dim: (-x.stride(dim), -x.shape[dim]))


def _storage(x: Tensor) -> Tensor:
    ordered = x.permute(_order(x))
    if not ordered.is_contiguous():
        raise CaptureError("as_strided of a tensor that does not fill its storage", "call contiguous() before as_strided")
    return ordered.reshape(-1)


def _positions(x: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None) -> Tensor:
    """``[*size]``: the number in storage of each entry, counted from the first of ``x``."""
    first = 0 if storage_offset is None else storage_offset - x.storage_offset()
    last = first + sum((extent - 1) * step for extent, step in zip(size, stride, strict=True))
    if first < 0 or last >= x.numel():
        raise CaptureError("as_strided reaches beyond the tensor, into a storage that it shares", "take it of the whole tensor")
    places = torch.full((), first, dtype=torch.int64, device=x.device)
    for dim, (extent, step) in enumerate(zip(size, stride, strict=True)):
        numbers = torch.arange(extent, device=x.device) * step
        places = places + numbers.reshape([-1] + [1] * (len(size) - dim - 1))
    return places


STRIDED: Mapping[Any, Callable[..., Tensor]] = {aten.as_strided.default: as_strided, aten.as_strided_scatter.default: as_strided_scatter}
"""Above autograd, so that gradients are those of a lookup; and below, where what is written in place was left a view: in memory of a rank a
tensor may lie otherwise."""


def fill_diagonal(x: Tensor, fill_value: float, wrap: bool = False) -> Tensor:
    """``x.fill_diagonal_``, which torch does by strides: where all indices are equal, in a tall matrix again below if it shall ``wrap``."""
    *rest, last = (torch.arange(extent, device=x.device).reshape([-1] + [1] * (x.dim() - dim - 1)) for dim, extent in enumerate(x.shape))
    if wrap and x.dim() == 2:
        rest = [rest[0] % (x.shape[1] + 1)]
    return x.masked_fill_(reduce(torch.logical_and, [places == last for places in rest]), fill_value)


def adaptive_average(operator: Callable[..., Tensor], mean: Callable[..., Tensor], dims: int) -> Callable[[Tensor, Sequence[int]], Tensor]:
    """Adaptive average pooling over the last ``dims`` dims, to a single place as the mean that it is: torch's own sets strides by hand."""

    def pooled(x: Tensor, output_size: Sequence[int]) -> Tensor:
        if any(size != 1 for size in output_size):
            return operator(x, output_size)
        return mean(x, list(range(-dims, 0)), True)

    return pooled


def channel_shuffle(x: Tensor, groups: int) -> Tensor:
    """``aten.channel_shuffle``: channels of groups side by side become groups of channels side by side."""
    split = x.reshape(x.shape[0], groups, x.shape[1] // groups, *x.shape[2:])
    return split.transpose(1, 2).reshape(x.shape)


def affine_grid(theta: Tensor, size: Sequence[int], align_corners: bool) -> Tensor:
    """``aten.affine_grid_generator``: ``theta [n, d, d + 1]`` applied to each place ``[*size, 1]`` of pictures, each dim from -1 to 1."""
    axes = []
    for extent in reversed(size[2:]):
        places = torch.linspace(-1, 1, extent, dtype=theta.dtype, device=theta.device)
        places = torch.zeros_like(places) if extent == 1 else places
        axes.append(places if align_corners else places * ((extent - 1) / extent))
    meshes = torch.meshgrid(*reversed(axes), indexing="ij")
    base = torch.stack([*reversed(meshes), torch.ones_like(meshes[0])], -1).reshape(-1, len(axes) + 1)
    return torch.einsum("pk,nik->npi", base, theta).reshape(size[0], *size[2:], len(axes))
