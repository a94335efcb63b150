"""What attributes of objects hold, exchanged for something else: modules and tensors stand in plain containers too."""

from __future__ import annotations

from collections.abc import Mapping
from operator import is_
from types import MethodType
from typing import Any


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
