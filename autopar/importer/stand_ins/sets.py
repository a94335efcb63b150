"""Sets in an order that does not depend on the hash seed, for as long as a model is traced.

A forward that iterates over a set of strings (``for kind in set(config.layer_types)``) runs its operators in an order that differs from
process to process, and ranks that capture it would disagree. Within ``in_order``, ``set`` in the files of the model's classes
iterates as it was filled, and sets that modules hold iterate sorted. Sets written in braces, and frozen ones, keep Python's order.
"""

from __future__ import annotations

import builtins
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from autopar.importer.diagnosis.errors import is_user_file


class _AnySet(type):
    """``isinstance(value, set)`` holds for every set, whatever ``set`` means in a file."""

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, builtins.set)


class InOrder(builtins.set[Any], metaclass=_AnySet):
    """A set that iterates in the order in which it was filled."""

    def __init__(self, items: Iterable[Any] = ()) -> None:
        self._order = dict.fromkeys(items)
        super().__init__(self._order)

    def __iter__(self) -> Iterator[Any]:
        return iter(list(self._order))

    def _then(self, made: builtins.set[Any], others: Iterable[Iterable[Any]]) -> InOrder:
        filled = dict.fromkeys(self._order)
        for other in others:
            filled.update(dict.fromkeys(other))
        return InOrder(item for item in filled if item in made)

    def _now(self, others: Iterable[Iterable[Any]] = ()) -> None:
        filled = dict.fromkeys(self._order)
        for other in others:
            filled.update(dict.fromkeys(other))
        self._order = dict.fromkeys(item for item in filled if item in self)


def _making(name: str) -> Callable[..., Any]:
    def made(self: InOrder, *others: Any) -> Any:
        result = getattr(builtins.set, name)(self, *others)
        return self._then(result, others) if isinstance(result, builtins.set) else result

    return made


def _changing(name: str, single: bool) -> Callable[..., Any]:
    def changed(self: InOrder, *others: Any) -> Any:
        result = getattr(builtins.set, name)(self, *others)
        self._now([others] if single else others)
        return self if name.startswith("__") and result is not NotImplemented else result

    return changed


_NEW = "__or__ __and__ __sub__ __xor__ union intersection difference symmetric_difference copy"
_CHANGING = "__ior__ __iand__ __isub__ __ixor__ update intersection_update difference_update symmetric_difference_update pop clear"
for _name in _NEW.split():
    setattr(InOrder, _name, _making(_name))
for _name in _CHANGING.split():
    setattr(InOrder, _name, _changing(_name, single=False))
for _name in ("add", "discard", "remove"):
    setattr(InOrder, _name, _changing(_name, single=True))


@contextmanager
def in_order(model: nn.Module, *functions: Any) -> Iterator[None]:
    """Within it, the sets of the model's files and modules, and of the files of ``functions``, iterate in one order in every process."""
    names = {cls.__module__ for part in model.modules() for cls in type(part).__mro__}
    names |= {getattr(function, "__module__", None) or "" for function in functions}
    files = [sys.modules[name] for name in sorted(names) if name in sys.modules]
    spaces = [vars(file) for file in files if is_user_file(getattr(file, "__file__", None) or "")]
    given = [space for space in spaces if "set" not in space]
    held = [
        (vars(part), name, value) for part in model.modules() for name, value in vars(part).items()
        if type(value) is builtins.set and value and not name.startswith("_")
    ]  # fmt: skip
    try:
        for space in given:
            space["set"] = InOrder
        for attributes, name, value in held:
            attributes[name] = InOrder(sorted(value, key=repr))
        yield
    finally:
        for space in given:
            space.pop("set", None)
        for attributes, name, value in held:
            attributes[name] = value
