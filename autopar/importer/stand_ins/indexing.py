"""Indexing by values: a row picked by a number in a tensor, constant masks, and rows written where a mask holds.

Export asks for such values (``table[t]`` for one ``t``), or has no size for the result (``x[mask]``). Yet the size is known: a number picks
like a tensor of one index, a mask built from numbers in the code has known places, and one row written to all places of a mask needs no
count.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from autopar import torch_compat
from autopar.importer.stand_ins.iota_index import OwnRows
from autopar.importer.stand_ins.known_values import KnownValues

_COUNTED = frozenset({"nonzero", "argwhere", "where", "unique", "unique_consecutive", "bincount", "repeat_interleave", "masked_select"})
"""Functions whose result has a size that depends on values."""
_ALL = slice(None)


class Indexing(TorchFunctionMode):
    """Within it, indices whose values ``known`` has are those values; what is picked by others keeps them tensors."""

    def __init__(self, known: KnownValues) -> None:
        super().__init__()
        self.known = known

    def __torch_function__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        if name in ("__getitem__", "__setitem__"):
            tensor, index, *value = args
            filled = bool(value) and not (isinstance(value[0], Tensor) and value[0].dim())  # one value, wherever a mask holds
            items = [part for item in (index if isinstance(index, tuple) else (index,)) for part in self._items(item, places=not filled)]
            own = OwnRows.of(tensor, items, lambda item: self.known.answered(torch.clone, (item,), {}))
            if own is not None:
                return own.put(tensor, value[0]) if value else own.picked(tensor)
            return _put(function, tensor, items, value[0]) if value else _picked(function, tensor, items)
        if name in _COUNTED and (name != "where" or len(args) == 1):
            found = self.known.answered(function, args, kwargs, sized=True)
            if found is not None:
                return torch_compat.map_only(numpy.ndarray, torch.from_numpy, found)
            if name == "repeat_interleave" and "output_size" not in kwargs and len(args) > 1:
                count = self.known.answered(torch.sum, args[1:2], {}, sized=True) if isinstance(args[1], Tensor) else None
                kwargs = kwargs if count is None or args[1].dim() == 0 else {**kwargs, "output_size": int(count)}
            if name == "masked_select" and not kwargs and args[0].shape == args[1].shape:
                return args[0][tuple(self._items(args[1]))]
        return function(*args, **kwargs)

    def _items(self, item: Any, *, places: bool = True) -> Iterator[Any]:
        """What stands for one item of an index: the ``places`` of a mask that is known, a number that is known, or the item."""
        if isinstance(item, Tensor):
            mask = item.dtype == torch.bool
            value = self.known.answered(torch.clone, (item,), {}, sized=mask and places) if mask or _is_number(item) else None
        else:
            flags = isinstance(item, list) and all(isinstance(one, bool) for one in item)
            value = numpy.asarray(item) if flags or isinstance(item, numpy.ndarray) else None
        if places and value is not None and value.dtype == numpy.bool_ and value.ndim:
            yield from map(torch.from_numpy, value.nonzero())
        elif value is not None and _is_number(item):
            yield int(value)
        else:
            yield item


def _is_number(item: Any) -> bool:
    """Whether it is an index in a tensor of no dims."""
    return isinstance(item, Tensor) and not item.dim() and item.dtype in (torch.int64, torch.int32, torch.int16, torch.int8)


def _taken(item: Any) -> int:
    """Dims of the tensor that an item of an index is for."""
    if isinstance(item, (Tensor, numpy.ndarray)) and item.dtype in (torch.bool, torch.uint8, numpy.bool_):
        return item.ndim
    return 0 if item is None or item is Ellipsis or isinstance(item, bool) else 1


def _picked(function: Any, tensor: Tensor, items: list[Any]) -> Tensor:
    if any(map(_is_number, items)):
        around = tensor.dim() - sum(map(_taken, items))  # what an ellipsis stands for
        dims = [sum(around if item is Ellipsis else _taken(item) for item in items[:at]) for at in range(len(items))]
        for dim, item in reversed(list(zip(dims, items, strict=True))):
            if _is_number(item):
                tensor = torch.ops.aten.index.Tensor(tensor, [None] * dim + [item.long()])
        items = [item for item in items if not _is_number(item)]
        if all(item is Ellipsis for item in items):
            return tensor
    return function(tensor, items[0] if len(items) == 1 else tuple(items))


def _put(function: Any, tensor: Tensor, items: list[Any], value: Any) -> Any:
    basic = all(_is_number(item) or item is None or item is Ellipsis or isinstance(item, (int, slice)) for item in items)
    if basic and any(map(_is_number, items)):
        part = tensor[tuple(_ALL if _is_number(item) else item for item in items)]
        around = tensor.dim() - sum(map(_taken, items))
        wide = [around if item is Ellipsis else 0 if isinstance(item, int) and not isinstance(item, bool) else 1 for item in items]
        places: list[Any] = [None] * part.dim()
        for at, item in enumerate(items):
            if _is_number(item):
                places[sum(wide[:at])] = item.long()
        value = torch.as_tensor(value, dtype=part.dtype)
        shape = [size for size, place in zip(part.shape, places, strict=True) if place is None]
        torch.ops.aten.index_put_(part, places, value.reshape(value.shape[max(0, value.dim() - len(shape)) :]).expand(shape))
        return None
    mask = items[0] if len(items) == 1 else None
    if isinstance(mask, Tensor) and mask.dtype == torch.bool and isinstance(value, Tensor) and mask.dim() and value.dim():
        further = tensor.dim() - mask.dim()
        single = value.dim() == further + 1 and isinstance(value.shape[0], int) and value.shape[0] == 1  # a symbol where that is not known
        value = value.squeeze(0) if single else value
        if value.dim() <= further:
            tensor.copy_(torch.where(mask.reshape(*mask.shape, *[1] * further), value.to(tensor.dtype), tensor))
            return None
    return function(tensor, items[0] if len(items) == 1 else tuple(items), value)
