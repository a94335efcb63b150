"""Collectives that a model calls itself in a ``local_map`` region, kept.

Each is written as what it means for the values of all ranks (``importer.regions``), between two ``autopar.on_axes`` that leave the planner
one way to make it: the reshard that is the collective, which is priced, listed, checked and run as any other.

    all_reduce          ranks over their axes -> summed, partial over them -> whole
    all_gather          ranks over their axes -> whole
    reduce_scatter      ranks over their axes -> summed, partial over them -> scattered parts over them
    all_to_all          ranks that send over their axes -> ranks that receive over them
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from autopar.errors import CaptureError
from autopar.importer.regions import SUM, Region, reduced

Axes = tuple[int, ...]


def all_reduce(region: Region, x: Tensor, reduction: str, axes: Axes) -> Tensor:
    """The reduction of all ranks' ``x``, on each of them."""
    total, rest = _total(region, x, reduction, axes)
    return region.within(region.laid(total, dict.fromkeys(axes)), rest)


def all_gather(region: Region, x: Tensor, dim: int, axes: Axes) -> Tensor:
    """All ranks' ``x``, one after another along ``dim``, on each of them."""
    whole, there = region.across(x, axes)
    whole = region.laid(region.laid(whole, {axis: there.index(axis) for axis in axes}), dict.fromkeys(axes))
    rest, first = [axis for axis in there if axis not in axes], len(there)
    whole = whole.permute(
        *map(there.index, rest), *range(first, first + dim), *map(there.index, axes), *range(first + dim, whole.dim())
    )  # fmt: skip
    return region.within(whole.flatten(len(rest) + dim, len(rest) + dim + len(axes)), rest)


def reduce_scatter(region: Region, x: Tensor, reduction: str, dim: int, axes: Axes) -> Tensor:
    """Of the reduction of all ranks' ``x`` each rank its part along ``dim``."""
    count = _count(region, axes)
    _check_divides(x, dim, count)
    total, rest = _total(region, x, reduction, axes)
    total = total.unflatten(len(rest) + dim, [*[region.sizes[axis] for axis in axes], x.shape[dim] // count])
    there = sorted((*rest, *axes))
    place = {**{axis: number for number, axis in enumerate(rest)}, **{axis: len(rest) + dim + n for n, axis in enumerate(axes)}}
    total = total.permute(*[place[axis] for axis in there], *[d for d in range(total.dim()) if d not in place.values()])
    return region.within(region.laid(total, {axis: there.index(axis) for axis in axes}), there)


def all_to_all(region: Region, x: Tensor, axes: Axes) -> Tensor:
    """Of ``x``, cut along dim 0 in one part a rank, each rank gets its part from all ranks, one after another."""
    count = _count(region, axes)
    _check_divides(x, 0, count)
    whole, there = region.across(x, axes)
    first = len(there)
    whole = whole.unflatten(first, [*[region.sizes[axis] for axis in axes], x.shape[0] // count])
    sending = {axis: there.index(axis) for axis in axes}
    receiving = {axis: first + number for number, axis in enumerate(axes)}
    whole = region.laid(region.laid(whole, sending), receiving)
    ranks = [receiving.get(axis, there.index(axis)) for axis in there]
    whole = whole.permute(*ranks, *sending.values(), *range(first + len(axes), whole.dim()))
    return region.within(whole.flatten(first, first + len(axes)), there)


def _total(region: Region, x: Tensor, reduction: str, axes: Axes) -> tuple[Tensor, list[int]]:
    """All ranks' ``x`` reduced over axes, still partial over them where it is a sum; the other axes along which it differs."""
    whole, there = region.across(x, axes)
    whole = region.laid(whole, {axis: there.index(axis) for axis in axes})
    dims = [there.index(axis) for axis in axes]
    if not axes:
        total = whole
    elif reduction in (SUM, "avg"):
        total = region.laid(reduced(whole, SUM, dims), dict.fromkeys(axes, "P"))
        total = total / _count(region, axes) if reduction == "avg" else total
    else:
        total = reduced(whole, reduction, dims)
    return total, [axis for axis in there if axis not in axes]


def _count(region: Region, axes: Axes) -> int:
    return math.prod(region.sizes[axis] for axis in axes)


def _check_divides(x: Tensor, dim: int, count: int) -> None:
    if x.shape[dim] % count:
        message = f"a collective cuts dim {dim} of {list(x.shape)} for {count} ranks, which do not divide it"
        raise CaptureError(message, "pad it to a multiple of them")


def gather_each(region: Region, x: Tensor, axes: Axes) -> tuple[Tensor, ...]:
    """Every rank's ``x``, on each of them."""
    return all_gather(region, x.unsqueeze(0), 0, axes).unbind(0)


def scatter_each(region: Region, items: Sequence[Tensor], reduction: str, axes: Axes) -> Tensor:
    """Each rank the reduction of all ranks' item of its number."""
    return reduce_scatter(region, _stacked(items), reduction, 0, axes).squeeze(0)


def exchange_each(region: Region, items: Sequence[Tensor], axes: Axes) -> tuple[Tensor, ...]:
    """Each rank all ranks' items of its number."""
    return all_to_all(region, _stacked(items), axes).unbind(0)


def _stacked(items: Sequence[Tensor]) -> Tensor:
    if len({tuple(item.shape) for item in items}) > 1:
        raise CaptureError("a collective of tensors of different sizes", "pad them to one size: all ranks run one program")
    return torch.stack(list(items))
