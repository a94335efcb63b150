"""A call's arguments matched to the graph's inputs, and the graph's outputs put back into the result's nesting.

The graph records the call as a JSON tree (``Graph.arguments``): ``{"tensor": NAME}`` where a tensor was, containers, and the plain
values that were baked into the graph, which a later call must repeat.
"""

from __future__ import annotations

import inspect
import math
from collections import namedtuple
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from autopar.errors import UsageError
from autopar.graph import NAMED_TUPLE, from_json
from autopar.importer.arguments.calls import nested
from autopar.importer.arguments.containers import Kind, opened, parts_of
from autopar.torch_compat import flatten_with_paths


class OtherCallError(UsageError):
    """A call that is nested otherwise than the captured one, or that has other plain values: one with a program of its own."""


class LacksLossError(UsageError):
    """A call that has what the model takes, and not all that the loss does."""


_HINT = "call the module with the arguments it was planned with, or plan it again with these"


Nesting = str
"""Where in a call tensors and plain values stand, and empty containers."""
TENSOR = "tensor"
"""What stands for a tensor in it."""
_NO_NUMBERS = ("inf", "-inf", "nan")
_VALUES = (bool, int, float, complex, str, type(None), torch.dtype, torch.device)


def is_leaf(tree: Any) -> bool:
    """Whether a node of the tree stands for a tensor."""
    return isinstance(tree, Mapping) and set(tree) == {"tensor"} and isinstance(tree["tensor"], str)


def read_plain(tree: Any) -> Any:
    """A node of the tree, as the float that it may stand for."""
    return from_json(tree) if isinstance(tree, Mapping) and set(tree) == {"float"} and tree["float"] in _NO_NUMBERS else tree


@dataclass(frozen=True)
class CallTree:
    """The nesting of the tensors in a captured call's arguments and result.

    Args:
        arguments: ``Graph.arguments``, the recorded trees.
        forward: the original forward, so that an argument captured by position may be passed by name, and the other way round; None
            where it is not known, and arguments come as they were captured.
        loss: likewise, for what it takes beside the outputs.
        kind: the classes of the result, where they are known.
    """

    arguments: Mapping[str, Any]
    forward: Callable[..., Any] | None
    loss: Callable[..., Any] | None = None
    kind: Kind | None = None

    def tensors(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The tensor for each input name of a call with the model's arguments, then the loss's.

        Raises:
            UsageError: naming the argument that differs from the captured call.
        """
        names = self._names_by_position
        if names is not None and not kwargs and len(args) == len(names) and all(isinstance(one, torch.Tensor) for one in args):
            return dict(zip(names, args, strict=True))
        try:
            own, own_kwargs, loss_args = self.parted(args, kwargs)
            found = self._of_model(own, own_kwargs)
        except UsageError:
            self._check_loss(args, kwargs)
            raise
        for index, (tree, value) in enumerate(zip(self.arguments.get("loss_args", []), loss_args, strict=True)):
            found.update(leaves(tree, value, f"loss argument {index}"))
        return found

    @cached_property
    def _names_by_position(self) -> tuple[str, ...] | None:
        """The tensors of a call that has nothing else and names none; None of another."""
        trees = (*self.arguments["args"], *self.arguments.get("loss_args", []))
        plain = not self.arguments.get("kwargs") and all(map(is_leaf, trees))
        return tuple(tree["tensor"] for tree in trees) if plain else None

    def _of_model(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The tensors of the model's own arguments."""
        recorded, named = self.arguments["args"], self.arguments.get("kwargs", {})
        found: dict[str, Any] = {}
        if self.forward is not None and (len(args) != len(recorded) or set(kwargs) != set(named)):
            (recorded, named), (args, kwargs) = self._by_name(recorded, named), self._by_name(args, kwargs)
        if set(kwargs) != set(named) or len(args) != len(recorded):
            counts = [f"{len(args)} arguments by position where it had {len(recorded)}"] if len(args) != len(recorded) else []
            differing = [*counts, *sorted(set(kwargs) ^ set(named))]
            raise OtherCallError(f"the call differs from the captured one in {', '.join(differing)}", self._hint)
        for index, (tree, value) in enumerate(zip(recorded, args, strict=True)):
            found.update(leaves(tree, value, f"argument {index}"))
        for key, tree in named.items():
            found.update(leaves(tree, kwargs[key], f"argument {key}"))
        return found

    def is_of_model_alone(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether a call has nothing for the loss: the model's arguments as planned, or others that do not fit the model and the loss."""
        if not self._taken_by_loss or any(name in kwargs for name in self._loss_names if name is not None):
            return False
        if self._is_as_planned(args, kwargs):
            return True
        try:
            own, own_kwargs, _ = self.parted(args, kwargs)
        except UsageError:
            return self._fits_forward(args, kwargs)
        return self._fits_forward(args, kwargs) and not self._fits_forward(own, own_kwargs)

    def _is_as_planned(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        try:
            self._of_model(args, kwargs)
        except UsageError:
            return False
        return True

    def _fits_forward(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        try:
            return self.forward is not None and inspect.signature(self.forward).bind(*args, **kwargs) is not None
        except TypeError:
            return False

    def _check_loss(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Raises LacksLossError: the call has what the model takes, and not all that the loss does."""
        lacking = [name or "one that the model has too" for name in self._taken_by_loss if name not in kwargs]
        own = {key: value for key, value in kwargs.items() if key not in self._taken_by_loss}
        for given in range(min(len(lacking), len(args) + 1)):
            if not self._is_as_planned(args[: len(args) - given], own) and (given or not self.is_of_model_alone(args, kwargs)):
                continue
            missing = ", ".join(lacking[given:])
            raise LacksLossError(f"the call has what the model takes, and of the loss's arguments lacks {missing}", self._hint)

    def parted(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Sequence[Any], Mapping[str, Any], tuple[Any, ...]]:
        """What of a call is the model's, by position and by name, and the loss's, in the order in which it takes them.

        Raises:
            UsageError: too few for the loss.
        """
        extra = self.arguments.get("loss_args", [])
        if not extra:
            return args, kwargs, ()
        by_name = {name: kwargs[name] for name in self._loss_names if name is not None and name in kwargs}
        count = len(extra) - len(by_name)
        if len(args) < count:
            raise UsageError(f"the call has {len(args)} arguments by position, the loss alone takes {count}", self._hint)
        own, last = args[: len(args) - count], iter(args[len(args) - count :])
        loss_args = tuple(by_name[name] if name in by_name else next(last) for name in self._taken_by_loss)
        return own, {key: value for key, value in kwargs.items() if key not in by_name}, loss_args

    def nesting(self, args: Sequence[Any], kwargs: Mapping[str, Any], loss_args: Sequence[Any]) -> Nesting:
        """What a call with the model's own arguments and the loss's has beside the values of its tensors, the same however they are passed.

        Raises:
            UsageError: an argument of a kind that no program can be made for.
        """
        if self.forward is not None:
            args, kwargs = self._by_name(args, kwargs)
        call = opened((tuple(args), dict(kwargs), tuple(loss_args)))
        leaves, _ = flatten_with_paths(call)
        for path, leaf in leaves:
            if not isinstance(leaf, (*_VALUES, torch.Tensor)):
                raise UsageError(f"argument {'.'.join(path[1:])} is a {type(leaf).__name__}, which no program can be made for", self._hint)
        shown = (TENSOR if isinstance(leaf, torch.Tensor) else (type(leaf).__name__, str(leaf)) for _, leaf in leaves)
        return repr(nested(call, shown))

    @cached_property
    def _loss_names(self) -> tuple[str | None, ...]:
        """What the loss calls its arguments after the outputs, as far as they were captured; None for those that the model takes."""
        taken = {*(item.name for item in _parameters(self.forward)), *self.arguments.get("kwargs", {})}
        given = [item.name for item in _parameters(self.loss) if item.kind is item.POSITIONAL_OR_KEYWORD]
        return tuple(None if name in taken else name for name in given[1 : 1 + len(self.arguments.get("loss_args", []))])

    @cached_property
    def _taken_by_loss(self) -> tuple[str | None, ...]:
        """A name for each argument of the loss after the outputs, None where it has none of its own."""
        count = len(self.arguments.get("loss_args", []))
        return (*self._loss_names, *(None for _ in range(count - len(self._loss_names))))

    @cached_property
    def _hint(self) -> str:
        count = len(self.arguments.get("loss_args", []))
        if not count:
            return _HINT
        names = ", ".join(name or "one that the model has too" for name in self._loss_names) or f"{count} of them"
        return f"call the module with the model's arguments and then, or by name, those that the loss takes after the outputs: {names}"

    def _by_name(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Sequence[Any], dict[str, Any]]:
        """The model's arguments by the names of its forward."""
        assert self.forward is not None
        try:
            bound = inspect.signature(self.forward).bind(*args, **kwargs)
        except TypeError as error:
            raise UsageError(f"the arguments do not fit the model's forward: {error}", self._hint) from None
        bound.apply_defaults()
        return (), dict(bound.arguments)

    @cached_property
    def gives_one_tensor(self) -> bool:
        """Whether the result is a tensor."""
        return is_leaf(read_plain(self.arguments["outputs"]))

    def result(self, outputs: Mapping[str, Any]) -> Any:
        """The outputs, by tensor name, in the nesting of the captured result. Where its classes are known lists, dataclasses and named
        tuples are of their own, else tuples and ``Record``, as other named parts are."""
        made = _rebuild(self.arguments["outputs"], outputs)
        return made if self.kind is None else self.kind.of(made)


def _parameters(function: Callable[..., Any] | None) -> list[inspect.Parameter]:
    """Those of a function's signature, as far as it is known."""
    called = function.forward if isinstance(function, nn.Module) else function
    try:
        return list(inspect.signature(called).parameters.values()) if called is not None else []
    except (TypeError, ValueError):
        return []


def leaves(tree: Any, value: Any, place: str = "the value") -> Iterator[tuple[str, Any]]:
    """The tensors of ``value`` with their names in ``tree``.

    Raises:
        UsageError: when the value is not nested as the tree is; ``place`` is what the error calls it.
    """
    tree = read_plain(tree)
    if is_leaf(tree):
        if not isinstance(value, torch.Tensor):
            kind = OtherCallError if value is None else UsageError
            raise kind(f"{place} is a {type(value).__name__}, the plan was made for a tensor", _HINT)
        if value.layout is not torch.strided or value.is_nested:
            layout = "nested" if value.is_nested else str(value.layout).removeprefix("torch.")
            raise UsageError(f"{place} is a {layout} tensor; plans are made of dense ones", "use to_dense() or to_padded_tensor()")
        yield tree["tensor"], value
    elif isinstance(tree, Mapping):
        parts = parts_of(value)
        further = [] if NAMED_TUPLE in tree else [name for name in parts if name not in tree]
        if further:
            raise OtherCallError(f"{place} has {', '.join(further)}, the captured call had none", _HINT)
        for key, child in tree.get(NAMED_TUPLE, tree).items():
            try:
                below = parts[key] if key in parts or isinstance(value, Mapping) else getattr(value, key)
            except (KeyError, AttributeError):
                raise OtherCallError(f"{place} has no {key}, the captured call had one", _HINT) from None
            yield from leaves(child, below, f"{place}.{key}")
    elif isinstance(tree, (list, tuple)):
        if not isinstance(value, (list, tuple)) or len(value) != len(tree):
            raise OtherCallError(f"{place} is {_shown(value):.80}, the captured call had {len(tree)} items there", _HINT)
        for index, (child, below) in enumerate(zip(tree, value, strict=True)):
            yield from leaves(child, below, f"{place}[{index}]")
    elif isinstance(value, torch.Tensor) or _told(value) != _told(tree):
        raise OtherCallError(f"{place} is {_shown(value):.80}, the plan was made for {tree!r:.80}", _HINT)


def _told(value: Any) -> Any:
    """A plain value beside the kind of number that it is: torch computes otherwise with 2.0 than with 2."""
    kind = next((kind for kind in (bool, int, float) if isinstance(value, kind)), None)
    return kind, "nan" if kind is float and math.isnan(value) else value


def _shown(value: Any) -> str:
    """A value of a call on one line, tensors by dtype and shape."""
    if isinstance(value, torch.Tensor):
        return f"a tensor, {str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_shown, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {_shown(item)}' for key, item in value.items())}}}"
    return " ".join(repr(value).split())


class Record(dict[str, Any]):
    """A result with named parts, read as ``result["loss"]``, ``result.loss`` or by place: what stands for a dictionary,
    and for an output class that is not known."""

    def __missing__(self, key: Any) -> Any:
        """What a number names in the model's own dictionary, else the part at that place."""
        if isinstance(key, int | slice):
            return self[str(key)] if str(key) in self else tuple(self.values())[key]
        raise KeyError(key)

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"the result has no {name!r}; it has {', '.join(self)}") from None


def _rebuild(tree: Any, outputs: Mapping[str, Any]) -> Any:
    tree = read_plain(tree)
    if is_leaf(tree):
        return outputs[tree["tensor"]]
    if isinstance(tree, Mapping) and set(tree) == {NAMED_TUPLE}:
        fields = tree[NAMED_TUPLE]
        return namedtuple("Result", fields)(*(_rebuild(child, outputs) for child in fields.values()))
    if isinstance(tree, Mapping):
        return Record((key, _rebuild(child, outputs)) for key, child in tree.items())
    if isinstance(tree, (list, tuple)):
        return tuple(_rebuild(child, outputs) for child in tree)
    return tree
