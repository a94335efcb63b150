"""Settings of a program: plain attributes of a model's modules and of its loss.

They are numbers, flags, names, functions, tensors that are no weights, and lists, dictionaries and objects of these that the code reads.
A program is made for their values. A call after a change asks for another program.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import cache, partial
from inspect import getattr_static
from operator import itemgetter
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar.runtime.programs.container_snapshot import inside, is_container, noted, put_back, still, token
from autopar.runtime.programs.parts import OwnForward
from autopar.runtime.ranks.agreement import hash_of

_PLAIN = (bool, int, float, complex, str, bytes, tuple, type(None), torch.dtype)
_NAMED = (FunctionType, BuiltinFunctionType, partial, OwnForward, Enum)
_TORCHS = frozenset(dir(nn.Module())) - {"forward"}
_MISSING = "missing"


class Values(NamedTuple):
    """What stands for a tensor."""

    hash: str


def holds_values(token: Hashable) -> bool:
    """Whether a token is that of a tensor, or of a container with one."""
    return isinstance(token, Values) or (isinstance(token, tuple) and any(map(holds_values, token)))


Change = tuple[int, str, Hashable]
"""The place of a module among ``Module.modules``, the loss's own after them, the name of its attribute, and what stands for the value: of a
function or a member of an enumeration its name and a number, the same on ranks that do the same."""


@dataclass(frozen=True)
class _Part:
    """What one module held.

    Args:
        size: of all its attributes.
        names, values, read: the plain ones, and functions.
        tensors: by name the tensor and its version.
        containers: by name the container and what it held.
        passed_over: names of what is not looked at.
        reads: the names that the code of its class, or of the loss, reads.
    """

    size: int
    names: tuple[str, ...]
    values: Any
    read: Callable[[dict[str, Any]], Any]
    tensors: dict[str, tuple[Tensor, int]]
    containers: dict[str, tuple[Any, Any]]
    passed_over: frozenset[str]
    reads: Set[str]

    def changes(self, held: dict[str, Any], kind: type, of: Callable[[Any], Hashable]) -> Iterator[tuple[str, Hashable]]:
        before = dict(zip(self.names, (self.values,) if len(self.names) == 1 else self.values, strict=True)) if self.names else {}
        for name, (tensor, version) in self.tensors.items():
            now = held.get(name)
            if tensor._version != version or now is not tensor:
                yield name, of(now)
        for name, (_, was) in self.containers.items():
            if not still(was, now := held.get(name, _MISSING)):
                yield name, token(now, self.reads, of)
        others = (name for name in held if name not in before and name not in self.containers and name not in self.passed_over)
        for name in (*before, *(name for name in others if hasattr(kind, name))):
            now, was = held.get(name, _MISSING), before.get(name, getattr(kind, name, None))
            if _is_followed(was) and (type(now) is not type(was) or now != was):
                yield name, of(now)


class Settings:
    """The attributes of a model's modules, and of its loss, as a program was made with them.

    Args:
        others: what the loss holds (``held_by``): copies of the module share it.
    """

    def __init__(self, parts: Sequence[nn.Module] = (), others: Sequence[Holder] = ()) -> None:
        self._others = tuple(others)
        self._parts = [_noted(vars(part), _TORCHS, _read_by_forward(part.__class__)) for part in parts]
        self._parts += [_noted(other.attributes, other.passed_over, other.reads) for other in others]
        self._sizes = [part.size for part in self._parts]
        self._readers = [(at, part.read) for at, part in enumerate(self._parts) if part.names]
        self._values = [part.values for part in self._parts if part.names]
        self._tensors = [(at, name, *one) for at, part in enumerate(self._parts) for name, one in part.tensors.items()]
        self._held = [(at, name, one) for at, part in enumerate(self._parts) for name, (one, _) in part.containers.items()]
        contents = {(id(one), part.reads): (one, was) for part in self._parts for one, was in part.containers.values()}
        self._contents = tuple(contents.values())  # of what many parts hold once
        self._changing = {id(one): one for part in self._parts for kept, _ in part.containers.values() for one in inside(kept, part.reads)}
        self._seen: list[Any] = []

    def changes(self, parts: Sequence[nn.Module]) -> tuple[Change, ...]:
        """What is otherwise now, in the same modules or copies of them. Attributes that a module's class does not know and that it did not
        have are not read by its forward."""
        held = [part.__dict__ for part in parts] + [other.attributes for other in self._others]
        if self._are_as_they_were(held) and (not self._contents or all(still(was, one) for one, was in self._contents)):
            return ()
        kinds = map(type, (*parts, *(other.one for other in self._others)))
        places = enumerate(zip(self._parts, held, kinds, strict=False))
        return tuple((index, *change) for index, (part, one, kind) in places for change in part.changes(one, kind, self._token))

    def _are_as_they_were(self, held: Sequence[dict[str, Any]]) -> bool:
        """Whether the parts hold what they held, as far as they were looked at; not what is in containers."""
        try:
            same = list(map(len, held)) == self._sizes and [read(held[at]) for at, read in self._readers] == self._values
        except KeyError:
            return False
        if same and self._tensors:
            same = all(one._version == version and held[at].get(name) is one for at, name, one, version in self._tensors)
        return same and (not self._held or all(held[at].get(name) is one for at, name, one in self._held))

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Within it a loss may count how often it is called, and a model note what it does: it is captured, which is no call."""
        objects = [vars(other.one) for other in self._others if not isinstance(other.one, FunctionType)]
        before = [(one, copy.copy(one)) for one in (*objects, *self._changing.values())]
        try:
            yield
        finally:
            for one, was in before:
                put_back(one, was)

    def _token(self, value: Any) -> Hashable:
        if _is_plain(value):
            return value
        if isinstance(value, Tensor):
            return Values(hash_of(value))
        number = next((number for number, other in enumerate(self._seen) if other == value), len(self._seen))
        self._seen += [value] * (number == len(self._seen))
        return f"{getattr(value, '__qualname__', type(value).__name__)} ({number})"


@dataclass(frozen=True)
class Holder:
    """What a loss computes with.

    Args:
        one: a module, an object, a function, whose attributes are what its code names, in its file and around it, and the values that its
            arguments have by themselves, or a function with arguments (``partial``), whose attributes they are.
        names: the attributes of an object that count; all when not given.
    """

    one: Any
    names: frozenset[str] | None = None

    @property
    def attributes(self) -> dict[str, Any]:
        """Buffers too, which are no DTensors here."""
        if isinstance(self.one, partial):
            return {**{str(place): value for place, value in enumerate(self.one.args)}, **self.one.keywords}
        if isinstance(self.one, FunctionType):
            around = zip(self.one.__code__.co_freevars, self.one.__closure__ or (), strict=True)
            own = {name: self.one.__globals__[name] for name in self.one.__code__.co_names if name in self.one.__globals__}
            own |= {name: cell.cell_contents for name, cell in around if cell != CellType()}  # an empty one is not bound yet
            return own | _defaults_of(self.one)
        held = {**vars(self.one), **vars(self.one).get("_buffers", {})}
        return held if self.names is None else {name: value for name, value in held.items() if name in self.names}

    @property
    def passed_over(self) -> frozenset[str]:
        return _TORCHS - {"training"} if isinstance(self.one, nn.Module) else frozenset()

    @property
    def reads(self) -> frozenset[str]:
        """The names in its code."""
        if isinstance(self.one, partial):
            return frozenset(self.attributes) | Holder(self.one.func).reads
        if isinstance(self.one, FunctionType):
            return frozenset({*_names_in(self.one.__code__), *self.one.__code__.co_freevars, *_defaults_of(self.one)})
        return _read_by_forward(self.one.__class__) if self.names is None else self.names


def held_by(loss: Any, model: nn.Module) -> tuple[Holder, ...]:
    """What a loss is, is a method of, names or has in a closure: modules, functions of the same file, and objects with attributes, but for
    what is the model's. Of an object that is no function, a trainer that counts its steps say, what the functions read that name it."""
    seen, found = {id(part) for part in model.modules()}, list[Holder]()

    def look(value: Any, by: FunctionType) -> None:
        if id(value) in seen or not hasattr(value, "__dict__") or isinstance(value, (type, ModuleType, BuiltinFunctionType, Tensor)):
            return
        if isinstance(value, MethodType):
            method = value.__func__
            look(value.__self__, method if isinstance(method, FunctionType) else by)
            return
        seen.add(id(value))
        if isinstance(value, partial):
            found.append(Holder(value))
            further: Iterable[Any] = (value.func, *value.args, *value.keywords.values())
        elif isinstance(value, FunctionType):
            if str(value.__module__).partition(".")[0] == "torch" or (value.__globals__ is not by.__globals__ and by is not _NOBODY):
                return
            found.append(Holder(value))
            further, by = found[-1].attributes.values(), value
        else:
            found.append(Holder(value, None if callable(value) else frozenset(_read_by(by, type(value)))))
            further = value.children() if isinstance(value, nn.Module) else found[-1].attributes.values()
        for one in further:
            look(one, by)

    look(loss, _NOBODY)
    return tuple(found)


def _defaults_of(function: FunctionType) -> dict[str, Any]:
    """The values that a function's arguments have by themselves."""
    code, values = function.__code__, function.__defaults__ or ()
    names = code.co_varnames[code.co_argcount - len(values) : code.co_argcount]
    return dict(zip(names, values, strict=True)) | (function.__kwdefaults__ or {})


_NOBODY = FunctionType((lambda: None).__code__, globals())


def _read_by(function: FunctionType, kind: type) -> set[str]:
    """The names in the code of a function, and of the methods of a class that it calls."""
    names, further = set[str](), [function]
    while further:
        new = _names_in(further.pop().__code__) - names
        names |= new
        further += [one for name in new if isinstance(one := getattr_static(kind, name, None), FunctionType)]
    return names


def _names_in(code: CodeType) -> set[str]:
    """The names in code, and in what is written in it: comprehensions and functions."""
    return set(code.co_names).union(*(_names_in(part) for part in code.co_consts if isinstance(part, CodeType)))


@cache
def _read_by_forward(kind: type) -> frozenset[str]:
    """The names that the forward of a class reads, or what is called of another."""
    first = getattr_static(kind, "forward" if issubclass(kind, nn.Module) else "__call__", None)
    return frozenset(_read_by(first, kind)) if isinstance(first, FunctionType) else frozenset()


def _noted(held: dict[str, Any], passed_over: frozenset[str], reads: Set[str]) -> _Part:
    looked_at = {name: value for name, value in held.items() if name not in passed_over}
    containers = {
        name: (value, noted(value, reads, _is_followed))
        for name, value in looked_at.items() if name in reads and not _is_followed(value) and is_container(value)
    }  # fmt: skip
    names = tuple(name for name, value in looked_at.items() if _is_followed(value))
    read = itemgetter(*names) if names else dict
    tensors = {name: (value, value._version) for name, value in held.items() if _is_constant(value)}
    return _Part(len(held), names, read(held) if names else (), read, tensors, containers, passed_over, reads)


def _is_plain(value: Any) -> bool:
    return isinstance(value, _PLAIN) and (not isinstance(value, tuple) or all(map(_is_plain, value)))


def _is_followed(value: Any) -> bool:
    return isinstance(value, _NAMED) or _is_plain(value)


def _is_constant(value: Any) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, nn.Parameter | DTensor)
