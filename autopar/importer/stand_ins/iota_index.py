"""Indices that count the rows of a dim: ``x[torch.arange(len(x)), last]`` reads one entry of each row.

An index makes all of its dims whole. Where its values are known to be 0, 1, 2 ... to the end of the dim, the dim is the result's own, and
rows stay apart as in ``gather`` and ``scatter``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor

_WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8)
_ALL = slice(None)
Values = Callable[[Tensor], Any]
"""The values of a tensor, None where they are not known."""


@dataclass(frozen=True)
class OwnRows:
    """An index of which all tensors but one, or all, count the rows of their dims.

    Args:
        basic: the index with all of these dims whole.
        rows: the dim (of what ``basic`` picks) whose rows are counted along a dim of the index.
        shape: of the index.
        other: the dim that is picked from by ``index``, and how far it goes; None where there is none.
    """

    basic: tuple[Any, ...]
    rows: Mapping[int, int]
    shape: tuple[int, ...]
    other: tuple[int, int] | None
    index: Tensor | None

    @classmethod
    def of(cls, tensor: Tensor, items: Sequence[Any], values: Values) -> OwnRows | None:
        """The index ``items`` of a tensor as one of these; None where it is none."""
        if not all(_is_basic(item) or _is_places(item) for item in items) or all(map(_is_basic, items)):
            return None
        if not all(type(size) is int for size in tensor.shape):
            return None  # a symbol
        basic = tuple(item if _is_basic(item) else _ALL for item in items)
        try:
            part = numpy.broadcast_to(0, tuple(tensor.shape))[basic].shape  # a view of the tensor would be one more operator
        except (IndexError, ValueError):
            return None  # torch says what is wrong
        around = tensor.dim() - sum(item is not None and item is not Ellipsis for item in items)
        wide = [around if item is Ellipsis else 0 if isinstance(item, int) else 1 for item in items]
        dims = [sum(wide[:at]) for at, item in enumerate(items) if not _is_basic(item)]
        places = [item for item in items if not _is_basic(item)]
        shapes = [tuple(item.shape) if isinstance(item, Tensor) else (len(item),) for item in places]
        if not all(type(size) is int for sizes in shapes for size in sizes):
            return None
        shape = numpy.broadcast_shapes(*shapes)
        rows: dict[int, int] = {}
        others: list[tuple[int, Any]] = []
        for dim, item in zip(dims, places, strict=True):
            along = [at for at, size in enumerate(shape) if size == part[dim] and at not in rows]
            known = (values(item) if isinstance(item, Tensor) else numpy.asarray(item)) if along else None
            found = next((at for at in along if known is not None and _counts(known, shape, at)), None)
            if found is None:
                others.append((dim, item))
            else:
                rows[found] = dim
        if not others:
            return cls(basic, rows, shape, None, None) if all(size == 1 for at, size in enumerate(shape) if at not in rows) else None
        ((dim, index), *more) = others
        return cls(basic, rows, shape, (dim, part[dim]), index) if rows and not more and isinstance(index, Tensor) else None

    def picked(self, tensor: Tensor) -> Tensor:
        """``tensor[items]``."""
        part, free = self._in_order(tensor[self.basic])
        counted = len(self.rows)
        kept = part.shape[part.dim() - len(free) :]
        found = part.clone() if self.index is None else part.gather(counted, self._along(kept))
        return _permuted(found.reshape(*part.shape[:counted], *self._around, *kept), self._order(free)).contiguous()

    def put(self, tensor: Tensor, value: Any) -> None:
        """``tensor[items] = value``."""
        part, free = self._in_order(tensor[self.basic])
        value = torch.as_tensor(value, dtype=part.dtype)
        counted, kept = len(self.rows), part.shape[part.dim() - len(free) :]
        order = self._order(free)
        sizes = [*part.shape[:counted], *self._around, *kept]
        value = value.reshape(value.shape[max(0, value.dim() - len(order)) :]).expand([sizes[at] for at in order])
        value = value.permute([order.index(at) for at in range(len(order))])
        if self.index is None:
            part.copy_(value.reshape(part.shape))
        else:
            part.scatter_(counted, self._along(kept), value.reshape(*part.shape[:counted], math.prod(self._around), *kept))

    @property
    def _around(self) -> list[int]:
        """The sizes of the index's dims along which nothing is counted."""
        return [size for at, size in enumerate(self.shape) if at not in self.rows]

    def _in_order(self, part: Tensor) -> tuple[Tensor, list[int]]:
        """The dims that are counted, the one that is picked from, and the others, which are told."""
        first = [*(self.rows[at] for at in sorted(self.rows)), *([] if self.other is None else [self.other[0]])]
        free = [dim for dim in range(part.dim()) if dim not in first]
        return _permuted(part, [*first, *free]), free

    def _along(self, kept: Sequence[int]) -> Tensor:
        """The index as ``gather`` takes it: counted from the start, with a dim for each of the part's."""
        assert self.index is not None and self.other is not None
        index = self.index.long()
        index = torch.where(index < 0, index + self.other[1], index).expand(self.shape)
        counted = sorted(self.rows)
        index = _permuted(index, [*counted, *(at for at in range(len(self.shape)) if at not in self.rows)])
        sizes = [*(self.shape[at] for at in counted), math.prod(self._around)]
        return index.reshape(*sizes, *[1] * len(kept)).expand(*sizes, *kept)

    def _order(self, free: Sequence[int]) -> list[int]:
        """Where the result's dims are among those counted, those around and the free ones: an index's own stand where the dims are that
        it is for, or first where these are apart."""
        inner = [*sorted(self.rows), *(at for at in range(len(self.shape)) if at not in self.rows)]
        index = [inner.index(at) for at in range(len(self.shape))]
        dims = sorted([*self.rows.values(), *([] if self.other is None else [self.other[0]])])
        before = sum(dim < dims[0] for dim in free) if dims == list(range(dims[0], dims[0] + len(dims))) else 0
        rest = [len(index) + at for at in range(len(free))]
        return [*rest[:before], *index, *rest[before:]]


def _is_basic(item: Any) -> bool:
    if isinstance(item, slice):
        return all(one is None or type(one) is int for one in (item.start, item.stop, item.step))
    return item is None or item is Ellipsis or type(item) is int


def _is_places(item: Any) -> bool:
    """Whether it is an index of whole numbers, of one dim or more."""
    if isinstance(item, Tensor):
        return item.dim() > 0 and item.dtype in _WHOLE
    return isinstance(item, (list, range)) and len(item) > 0 and all(type(one) is int for one in item)


def _counts(known: Any, shape: Sequence[int], along: int) -> bool:
    """Whether values are 0, 1, 2 ... along one dim of a shape."""
    count = numpy.arange(shape[along]).reshape([-1 if at == along else 1 for at in range(len(shape))])
    return bool((numpy.broadcast_to(known, shape) == count).all())


def _permuted(tensor: Tensor, order: Sequence[int]) -> Tensor:
    return tensor if list(order) == list(range(tensor.dim())) else tensor.permute(*order)
