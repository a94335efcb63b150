"""A loss tensor whose sum over the ranks is waited for when it is read.

Forward often ends with an all-reduce of the loss. A user rarely reads the loss before backward, which does not need it. Waiting in
forward would hold all ranks at the pace of the slowest, twice a step. So forward may return a tensor whose value is on its way. Every
operation on it waits first, except those that need no value: its shape, ``detach``, ``backward``.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from autopar.torch_compat import NO_TORCH_FUNCTION, map_tensors, schema_of, wrapper_of


class Arrival:
    """A value that is on its way, waited for once by whoever asks first.

    Args:
        wait: gives the value.
    """

    def __init__(self, wait: Callable[[], Tensor]) -> None:
        self._wait: Callable[[], Tensor] | None = wait
        self._value: Tensor | None = None
        self._lock = threading.Lock()

    def get(self) -> Tensor:
        """The value.

        Raises:
            RuntimeError: another rank is gone or late.
        """
        with self._lock:
            if self._wait is not None:
                self._value, self._wait = self._wait(), None
            assert self._value is not None
            return self._value


class LateTensor(Tensor):
    """A tensor whose value is on its way."""

    arrival: Arrival
    __torch_function__ = NO_TORCH_FUNCTION

    @staticmethod
    def __new__(cls, arrival: Arrival, like: Tensor) -> LateTensor:
        """A tensor as ``like`` is."""
        made = wrapper_of(cls, like)
        made.arrival = arrival
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, LateTensor):
            if func is torch.ops.aten.ones_like.default:
                return torch.ones(first.shape, dtype=kwargs.get("dtype") or first.dtype, device=kwargs.get("device") or first.device)
            if func in _SAME:
                return LateTensor(first.arrival, first)
        args, kwargs = map_tensors(_arrived, (args, kwargs))
        found = func(*args, **kwargs)
        return first if schema_of(func).is_mutable and found is args[0] else found

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return repr(self.plain())

    def __format__(self, specification: str) -> str:
        return format(self.plain(), specification)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return copy.deepcopy(self.plain(), memo)

    def numpy(self, *, force: bool = False) -> Any:
        return self.plain().numpy(force=force)

    def tolist(self) -> Any:
        return self.plain().tolist()

    def plain(self) -> Tensor:
        """The value, with the autograd history of this tensor."""
        return self.clone()


_SAME = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)
"""Operators whose result is the tensor itself."""


def _arrived(tensor: Tensor) -> Tensor:
    return tensor.arrival.get() if isinstance(tensor, LateTensor) else tensor
