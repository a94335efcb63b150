"""What a model's modules hold in plain attributes: numbers, flags, names, functions, tensors that are no buffers. A program is made with
them as they were, so that a call after one of them was changed asks for another."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar.runtime.agreement import hash_of

_PLAIN = (bool, int, float, complex, str, bytes, tuple, type(None), torch.dtype)
_FUNCTIONS = (FunctionType, BuiltinFunctionType, partial)
_TORCHS = frozenset(dir(nn.Module())) - {"forward"}
_MISSING = "missing"

Change = tuple[int, str, Hashable]
"""The place of a module among ``Module.modules``, the name of its attribute, and what stands for the value: of a tensor its hash, of a
function its name and a number, the same on ranks that do the same."""


@dataclass(frozen=True)
class _Part:
    """What one module held.

    Args:
        size: of all its attributes.
        names, values, read: the plain ones, and functions.
        tensors: by name the tensor and its version.
    """

    size: int
    names: tuple[str, ...]
    values: Any
    read: Callable[[dict[str, Any]], Any]
    tensors: dict[str, tuple[Tensor, int]]

    def is_as_it_was(self, held: dict[str, Any]) -> bool:
        try:
            same = len(held) == self.size and (not self.names or self.read(held) == self.values)
        except KeyError:
            return False
        tensors = self.tensors.items()
        return same and (not tensors or all(held.get(name) is tensor and tensor._version == version for name, (tensor, version) in tensors))

    def changes(self, part: nn.Module, token: Callable[[Any], Hashable]) -> Iterator[tuple[str, Hashable]]:
        held = vars(part)
        before = dict(zip(self.names, (self.values,) if len(self.names) == 1 else self.values, strict=True)) if self.names else {}
        for name, (tensor, version) in self.tensors.items():
            now = held.get(name)
            if now is not tensor or tensor._version != version:
                yield name, token(now)
        for name in (*before, *(name for name in held if name not in before and name not in _TORCHS and hasattr(type(part), name))):
            now, was = held.get(name, _MISSING), before.get(name, getattr(type(part), name, None))
            if _is_followed(was) and (type(now) is not type(was) or now != was):
                yield name, token(now)


class Settings:
    """The attributes of a model's modules as a program was made with them."""

    def __init__(self, parts: Sequence[nn.Module] = ()) -> None:
        self._parts = [_noted(vars(part)) for part in parts]
        self._seen: list[Any] = []

    def changes(self, parts: Sequence[nn.Module]) -> tuple[Change, ...]:
        """What is otherwise now, in the same modules or copies of them. Attributes that a module's class does not know and that it did not
        have are not read by its forward."""
        if all(noted.is_as_it_was(part.__dict__) for noted, part in zip(self._parts, parts, strict=False)):
            return ()
        places = enumerate(zip(self._parts, parts, strict=False))
        return tuple((index, *change) for index, (noted, part) in places for change in noted.changes(part, self._token))

    def _token(self, value: Any) -> Hashable:
        if _is_plain(value):
            return value  # type: ignore[no-any-return]
        if isinstance(value, Tensor):
            return hash_of(value)
        number = next((number for number, other in enumerate(self._seen) if other == value), len(self._seen))
        self._seen += [value] * (number == len(self._seen))
        return f"{getattr(value, '__qualname__', type(value).__name__)} ({number})"


def _noted(held: dict[str, Any]) -> _Part:
    names = tuple(name for name, value in held.items() if name not in _TORCHS and _is_followed(value))
    read = itemgetter(*names) if names else dict
    tensors = {name: (value, value._version) for name, value in held.items() if _is_constant(value)}
    return _Part(len(held), names, read(held) if names else (), read, tensors)


def _is_plain(value: Any) -> bool:
    return isinstance(value, _PLAIN) and (not isinstance(value, tuple) or all(map(_is_plain, value)))


def _is_followed(value: Any) -> bool:
    return isinstance(value, _FUNCTIONS) or _is_plain(value)


def _is_constant(value: Any) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, nn.Parameter | DTensor)
