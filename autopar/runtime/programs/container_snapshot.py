"""Snapshots of lists, dictionaries and plain objects, by which changes inside of them are found.

``noted(value, names) == value`` as long as they hold the same. Plain values count by their value, tensors by identity and version, objects
by the attributes in ``names``. Anything else, modules for example, counts by its class.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Set
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

_ABSENT = "absent"


@dataclass(frozen=True, eq=False)
class _Itself:
    """Equal to one object alone, and as long as that was not written to."""

    value: Any
    version: int = 0

    def __eq__(self, other: object) -> bool:
        return other is self.value and (not isinstance(other, Tensor) or other._version == self.version)


@dataclass(frozen=True, eq=False)
class _OfKind:
    """Equal to whatever is of the class and has these attributes."""

    kind: type
    held: Mapping[str, Any]

    def __eq__(self, other: object) -> bool:
        if type(other) is not self.kind:
            return False
        now = vars(other) if self.held else {}
        return all(was == now.get(name, _ABSENT) for name, was in self.held.items())


def is_container(value: Any) -> bool:
    """Whether it may hold, and be changed inside: lists, dictionaries, sets, objects that are neither called nor torch's."""
    if isinstance(value, (list, tuple, dict, set)):
        return True
    if isinstance(value, (nn.Module, Tensor, type, ModuleType)) or callable(value) or not hasattr(value, "__dict__"):
        return False
    return type(value).__module__.partition(".")[0] != "torch"


def noted(value: Any, names: Set[str], is_leaf: Callable[[Any], bool], within: tuple[int, ...] = ()) -> Any:
    """What equals the value from the left until something in it changes. ``is_leaf``: what counts by its own equality."""
    if is_leaf(value):
        return value
    if isinstance(value, Tensor) and not isinstance(value, nn.Parameter | DTensor):
        return _Itself(value, value._version)
    if id(value) in within or not is_container(value):
        return _OfKind(type(value), {})
    further = (*within, id(value))
    match value:
        case list():
            return [noted(item, names, is_leaf, further) for item in value]
        case tuple():
            return tuple([noted(item, names, is_leaf, further) for item in value])
        case dict():
            return {key: noted(item, names, is_leaf, further) for key, item in value.items()}
        case set():
            return set(value)
        case _:
            held = {name: item for name, item in vars(value).items() if name in names}
            return _OfKind(type(value), {name: noted(item, names, is_leaf, further) for name, item in held.items()})


def still(before: Any, value: Any) -> bool:
    """``before == value``, where what came in between, an array of numbers say, may have no truth."""
    try:
        return bool(before == value)
    except (RuntimeError, ValueError, TypeError):
        return False


def token(value: Any, names: Set[str], of: Callable[[Any], Hashable], within: tuple[int, ...] = ()) -> Hashable:
    """What stands for the contents, the same on ranks that hold the same. ``of``: what stands for what is no container."""
    if id(value) in within or not is_container(value):
        return of(value) if not isinstance(value, nn.Module) else type(value).__qualname__
    further = (*within, id(value))
    match value:
        case list() | tuple():
            return tuple(token(item, names, of, further) for item in value)
        case dict():
            return tuple((repr(key), token(item, names, of, further)) for key, item in value.items())
        case set():
            return tuple(sorted(map(repr, value)))
        case _:
            held = {name: item for name, item in vars(value).items() if name in names}
            return (type(value).__qualname__, token(held, names, of, further))


def inside(value: Any, names: Set[str], within: tuple[int, ...] = ()) -> Iterator[Any]:
    """The containers of a container that can be changed, itself first."""
    if id(value) in within or not is_container(value):
        return
    if not isinstance(value, tuple):
        yield value
    held = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    if not isinstance(value, (list, tuple, dict, set)):
        held = [item for name, item in vars(value).items() if name in names]
    for item in held:
        yield from inside(item, names, (*within, id(value)))


def put_back(container: Any, before: Any) -> None:
    """The container holds again what a shallow copy of it does."""
    match container:
        case list():
            container[:] = before
        case dict() | set():
            container.clear()
            container.update(before)
        case _:
            vars(container).clear()
            vars(container).update(vars(before))

