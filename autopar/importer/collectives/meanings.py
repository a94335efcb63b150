"""What the collectives of a model's own mean in a ``local_map`` region: operators of ``dialect.collectives`` on the values of all ranks.

They are kept: a plan runs each as that collective over the axes of its group, prices it, and lists it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from autopar.errors import CaptureError
from autopar.importer.collectives.regions import Region

Axes = tuple[int, ...]
ops = torch.ops.autopar
REDUCTIONS = ("sum", "avg", "max", "min")
"""What collectives may reduce by."""


def all_reduce(region: Region, x: Tensor, reduction: str, axes: Axes) -> Tensor:
    """The reduction of all ranks' ``x``, on each of them."""
    _check_reduction(reduction, REDUCTIONS)
    whole, rest, over = _ranks_first(region, x, axes)
    made = ops.all_reduce.default(whole, over, "sum" if reduction == "avg" else reduction)
    return region.within(made / region.count(axes) if reduction == "avg" else made, rest)


def all_gather(region: Region, x: Tensor, dim: int, axes: Axes) -> Tensor:
    """All ranks' ``x``, one after another along ``dim``, on each of them."""
    whole, rest, over = _ranks_first(region, x, axes)
    place = len(rest) + dim
    return region.within(ops.all_gather.default(whole, over).movedim(0, place).flatten(place, place + 1), rest)


def reduce_scatter(region: Region, x: Tensor, reduction: str, dim: int, axes: Axes) -> Tensor:
    """Of the reduction of all ranks' ``x`` each rank its part along ``dim``."""
    _check_reduction(reduction, REDUCTIONS[:2])
    whole, rest, over = _ranks_first(region, x, axes)
    place = 1 + len(rest) + dim
    made = ops.reduce_scatter.default(_cut(region, whole, place, axes).movedim(place, 1).contiguous(), over)
    return _apart(region, made / region.count(axes) if reduction == "avg" else made, axes, rest)


def all_to_all(region: Region, x: Tensor, axes: Axes) -> Tensor:
    """Of ``x``, cut along dim 0 in one part a rank, each rank gets its part from all ranks, one after another."""
    whole, rest, over = _ranks_first(region, x, axes)
    place = 1 + len(rest)
    made = ops.all_to_all.default(_cut(region, whole, place, axes).movedim(place, 1).contiguous(), over)
    return _apart(region, made.movedim(1, place).flatten(place, place + 1), axes, rest)


def gather_each(region: Region, x: Tensor, axes: Axes) -> tuple[Tensor, ...]:
    """Every rank's ``x``, on each of them."""
    return all_gather(region, x.unsqueeze(0), 0, axes).unbind(0)


def scatter_each(region: Region, items: Sequence[Tensor], reduction: str, axes: Axes) -> Tensor:
    """Each rank the reduction of all ranks' item of its number."""
    return reduce_scatter(region, _stacked(items), reduction, 0, axes).squeeze(0)


def exchange_each(region: Region, items: Sequence[Tensor], axes: Axes) -> tuple[Tensor, ...]:
    """Each rank all ranks' items of its number."""
    return all_to_all(region, _stacked(items), axes).unbind(0)


def _ranks_first(region: Region, x: Tensor, axes: Axes) -> tuple[Tensor, tuple[int, ...], str]:
    """All ranks' ``x`` as ``[ranks of the axes, ranks of other axes ..., its own shape]``; the other axes; how dim 0 lies."""
    whole, there = region.across(x, axes)
    rest = tuple(axis for axis in there if axis not in axes)
    order = [there.index(axis) for axis in (*axes, *rest)]
    whole = whole.permute(*order, *range(len(there), whole.dim()))
    whole = whole.flatten(0, len(axes) - 1) if axes else whole.unsqueeze(0)
    return whole.contiguous(), rest, region.layout(dict.fromkeys(axes, 0))


def _apart(region: Region, whole: Tensor, axes: Axes, rest: tuple[int, ...]) -> Tensor:
    """One rank's view of ``[ranks of the axes, ranks of other axes ..., its own shape]``."""
    whole = whole.unflatten(0, [region.sizes[axis] for axis in axes]) if axes else whole.squeeze(0)
    there, ranks = (*axes, *rest), sorted((*axes, *rest))
    return region.within(whole.permute(*map(there.index, ranks), *range(len(there), whole.dim())), ranks)


def _cut(region: Region, whole: Tensor, dim: int, axes: Axes) -> Tensor:
    """The tensor with a dim in two: one part a rank."""
    count = region.count(axes)
    if whole.shape[dim] % count:
        message = f"a collective cuts a dim of size {whole.shape[dim]} for {count} ranks, which do not divide it"
        raise CaptureError(message, "pad it to a multiple of them: all ranks run one program")
    return whole.unflatten(dim, [count, whole.shape[dim] // count])


def _check_reduction(reduction: str, allowed: Sequence[str]) -> None:
    if reduction not in allowed:
        message = f"a collective that reduces by {reduction!r} is not kept"
        raise CaptureError(message, f"reduce by {', '.join(allowed)}, or gather the parts and compute it of them")


def _stacked(items: Sequence[Tensor]) -> Tensor:
    if len({tuple(item.shape) for item in items}) > 1:
        raise CaptureError("a collective of tensors of different sizes", "pad them to one size: all ranks run one program")
    return torch.stack(list(items))
