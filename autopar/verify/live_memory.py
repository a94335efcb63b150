"""Bytes of live tensors, operator by operator: what a rank holds, not what its process has taken from the system.

Every operator that torch dispatches is seen; the storages that it makes are counted when first seen and uncounted when freed.
What lives only inside one operator, or inside a collective, is not seen, and the plan's prediction does not count it either: gloo reduces a
copy of its own, of which only the views are dispatched.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from autopar.runtime.ranks.offloading import HostMemory
from autopar.torch_compat import dispatch_mode, leaves_of, storage_key


class LiveMemory(dispatch_mode()):  # type: ignore[misc]
    """Within it, ``peak`` is the most bytes of live storages so far, ``host_peak`` of those that stand for memory of a host.

    Args:
        held: tensors that exist already and count: parameters, optimizer states, inputs.
    """

    def __init__(self, held: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self._live: dict[int, int] = {}
        self._hosted: set[int] = set()
        self.total = self.host_total = self.host_peak = 0
        for tensor in held:
            self._count(tensor)
        self.peak = self.total

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        given = {storage_key(_local(leaf)) for leaf in leaves_of((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for leaf in leaves_of(result):
            if isinstance(leaf, torch.Tensor) and storage_key(_local(leaf)) not in given:
                self._count_on_host(leaf) if HostMemory.allocating else self._count(leaf)
        self.peak = max(self.peak, self.total)
        return result

    def _count(self, tensor: torch.Tensor) -> None:
        tensor = _local(tensor)
        storage, key = tensor.untyped_storage(), storage_key(tensor)
        if key not in self._live and key not in self._hosted:
            self._live[key] = storage.nbytes()
            self.total += storage.nbytes()
            weakref.finalize(storage, self._free, key)

    def _count_on_host(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self.host_total += storage.nbytes()
        self.host_peak = max(self.host_peak, self.host_total)
        self._hosted.add(storage_key(tensor))
        weakref.finalize(storage, self._free_on_host, storage_key(tensor), storage.nbytes())

    def _free(self, key: int) -> None:
        self.total -= self._live.pop(key)

    def _free_on_host(self, key: int, size: int) -> None:
        self.host_total -= size
        self._hosted.discard(key)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part, of a tensor that is split."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
