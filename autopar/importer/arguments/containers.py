"""Arguments and results as nested dictionaries, lists and tuples, whatever classes hold the tensors, and the way back.

torch.export knows the containers that torch's pytrees know. Models also pass dataclasses, dictionaries of classes of their
own and objects that keep tensors in attributes (the caches of transformers): those are opened into dictionaries by attribute, so that
export sees tensors alone, and closed again into objects of the same class before the model runs.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from autopar import torch_compat

_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def opened(value: Any) -> Any:
    """The value with every container that export does not know as a dictionary.

    >>> from types import SimpleNamespace
    >>> import torch
    >>> opened([SimpleNamespace(x=SimpleNamespace(), y=1, z=torch.ones(2)), 3])
    [{'y': 1, 'z': tensor([1., 1.])}, 3]
    """
    parts = _parts(value)
    if parts is not None:
        return {name: opened(part) for name, part in parts.items()}
    if not torch_compat.is_known_container(value):
        return value
    items, build = torch_compat.children_of(value)
    return build([opened(item) for item in items])


def closed(tree: Any, like: Any) -> Any:
    """The tree of ``opened(like)``, with whatever tensors it holds now, in the classes of ``like``. ``like`` itself is not changed."""
    parts = _parts(like)
    if parts is not None:
        made = copy.copy(like)
        for name, part in parts.items():
            _put(made, name, closed(tree[name], part))
        return made
    if not torch_compat.is_known_container(like):
        return tree
    items, build = torch_compat.children_of(like)
    return build([closed(item, other) for item, other in zip(torch_compat.children_of(tree)[0], items, strict=True)])


def renewed(value: Any) -> Any:
    """The same tensors in containers of their own, for a call that may put others in their place (a cache that grows)."""
    return closed(opened(value), value)


def changed(function: Callable[[Tensor], Any], value: Any) -> Any:
    """The value with ``function`` of every tensor in its place."""
    return closed(torch_compat.map_tensors(function, opened(value)), value)


@dataclass(frozen=True)
class Kind:
    """The class of a result, and of what it holds, by key, field or place."""

    cls: type
    parts: Mapping[Any, Kind]

    def of(self, made: Any) -> Any:
        """What was made in this one's place, in the class of a model's own: a dataclass, a list, or a tuple with names; a mapping with its
        own keys. Else as it is."""
        if isinstance(made, Mapping):
            kind: Any = type(made)
            keys = {str(key): key for key in self.parts}
            known = ((keys[name], self.parts[keys[name]].of(part)) if name in keys else (name, part) for name, part in made.items())
            return self._filled(kind(known))
        if isinstance(made, tuple):
            parts = [self.parts[place].of(part) if place in self.parts else part for place, part in enumerate(made)]
            if self.cls is list or hasattr(self.cls, "_fields"):
                return parts if self.cls is list else self.cls(*parts)
            return type(made)(*parts) if hasattr(made, "_fields") else tuple(parts)
        return made

    def _filled(self, made: Mapping[str, Any]) -> Any:
        """The dataclass with these fields; as it is where that is none, or had what is not here."""
        if not dataclasses.is_dataclass(self.cls):
            return made
        whole = made.keys() == self.parts.keys() <= {item.name for item in dataclasses.fields(self.cls) if item.init}
        return self.cls(**made) if whole else made


def kind_of(value: Any) -> Kind:
    """The classes of a result, for results of the same nesting; no tensor of it is held."""
    parts: Mapping[Any, Any] = {}
    if isinstance(value, (list, tuple)):
        parts = dict(enumerate(value))
    elif isinstance(value, Mapping) or (dataclasses.is_dataclass(value) and not isinstance(value, type)):
        parts = value if isinstance(value, Mapping) else {item.name: getattr(value, item.name) for item in dataclasses.fields(value)}
    return Kind(type(value), {name: kind_of(part) for name, part in parts.items()})


def parts_of(value: Any) -> dict[str, Any]:
    """What a container holds, by the names that its capture gives; nothing of what is none."""
    parts = _parts(value)
    if parts is None:
        return dict(torch_compat.named_children_of(value)) if torch_compat.is_known_container(value) else {}
    return {str(name): part for name, part in parts.items()}


def _put(made: Any, name: Any, value: Any) -> None:
    if isinstance(made, Mapping):
        made[name] = value  # type: ignore[index]
    else:
        object.__setattr__(made, name, value)


def _parts(value: Any) -> dict[Any, Any] | None:
    """What an object of a class unknown to export holds, by name; None for tensors, plain values and known containers."""
    if isinstance(value, (Tensor, nn.Module, type, *_PLAIN)) or torch_compat.is_known_container(value):
        return None
    if isinstance(value, Mapping):
        return {key: part for key, part in value.items() if part is not None}
    if dataclasses.is_dataclass(value):
        fields = {item.name: getattr(value, item.name) for item in dataclasses.fields(value)}
        return {name: part for name, part in fields.items() if _is_plain(part) or holds_tensors(part)}
    if not hasattr(value, "__dict__") or not holds_tensors(value):
        return None
    return {name: part for name, part in vars(value).items() if _is_plain(part) or holds_tensors(part)}


def _is_plain(value: Any) -> bool:
    """Whether nothing but plain values, and containers that can be opened, is in the value."""
    if isinstance(value, _PLAIN):
        return True
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return all(_is_plain(getattr(value, item.name)) for item in dataclasses.fields(value))
    return (torch_compat.is_known_container(value) or isinstance(value, Mapping)) and all(map(_is_plain, parts_of(value).values()))


def holds_tensors(value: Any, within: tuple[int, ...] = ()) -> bool:
    """Whether tensors are among the value's items and attributes, at any depth."""
    if isinstance(value, Tensor):
        return True
    if isinstance(value, (nn.Module, type, *_PLAIN)) or id(value) in within:
        return False
    within = (*within, id(value))
    if isinstance(value, Mapping):
        return any(holds_tensors(part, within) for part in value.values())
    if isinstance(value, (list, tuple)):
        return any(holds_tensors(part, within) for part in value)
    return any(holds_tensors(part, within) for part in getattr(value, "__dict__", {}).values())
