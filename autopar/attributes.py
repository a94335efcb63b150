"""What attributes of objects hold, exchanged for something else: modules and tensors stand in plain containers too. What attributes do not
show, functions and objects that hold a module in their own way, goes on to hold what a copy was made of."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from operator import is_
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary, ref


def exchanged(value: Any, others: Mapping[int, Any]) -> Any:
    """The value with ``others[id(it)]`` in the place of all that is there, in plain lists, tuples and dictionaries, and as whose method
    something is called; itself where nothing is.

    >>> old, new = object(), object()
    >>> exchanged({"a": [old, 1]}, {id(old): new}) == {"a": [new, 1]}
    True
    """
    if id(value) in others:
        return others[id(value)]
    if isinstance(value, MethodType) and id(value.__self__) in others:
        return MethodType(value.__func__, others[id(value.__self__)])
    if type(value) in (list, tuple):
        items = [exchanged(item, others) for item in value]
        return value if all(map(is_, items, value)) else type(value)(items)
    if type(value) is dict:
        items = [exchanged(item, others) for item in value.values()]
        return value if all(map(is_, items, value.values())) else dict(zip(value, items, strict=True))
    return value


_ORIGINALS: WeakKeyDictionary[Any, ref[Any]] = WeakKeyDictionary()


def note_copy(copied: Any, original: Any) -> None:
    """``original`` is what ``copied`` was made of, as long as somebody holds it."""
    _ORIGINALS[copied] = ref(original)


@contextmanager
def in_place_of_originals(copies: Iterable[Any]) -> Iterator[None]:
    """Within it, what the copies were made of has the attributes of the copies, and is them to all who hold it."""
    undo: list[tuple[Any, dict[str, Any]]] = []
    try:
        for copied in copies:
            noted = _ORIGINALS.get(copied)
            while noted is not None and (original := noted()) is not None:
                undo.append((original, original.__dict__))
                original.__dict__ = copied.__dict__
                noted = _ORIGINALS.get(original)
        yield
    finally:
        for original, attributes in reversed(undo):
            original.__dict__ = attributes
