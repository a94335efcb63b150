"""A call's tensors by their public names, and the nesting of its arguments and result as JSON."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from autopar import torch_compat
from autopar.errors import UsageError
from autopar.graph import NAMED_TUPLE, to_json
from autopar.importer.arguments.containers import opened


def named_tensors(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], loss: Callable[..., Any] | None, loss_args: tuple[Any, ...]
) -> dict[str, Tensor]:  # fmt: skip
    """The tensors of a call by the names that its capture gives them.

    Raises:
        UsageError: the arguments do not fit the signature of ``forward`` or of the loss.
    """
    tops = argument_names(model, args, kwargs, loss, loss_args)
    leaves, _ = torch_compat.flatten_with_paths(opened((args, dict(kwargs), loss_args)))
    return {input_name(path, tops): leaf for path, leaf in leaves if isinstance(leaf, Tensor)}


def argument_names(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], loss: Callable[..., Any] | None, loss_args: Sequence[Any]
) -> dict[tuple[str, ...], str]:
    """The public name of each top-level argument, by its path in ``(args, kwargs, loss_args)``.

    Raises:
        UsageError: the arguments do not fit the signature of ``forward`` or of the loss.
    """
    positional = _positional_names(torch_compat.forward_of(model), args, kwargs, "the model's forward")
    names: dict[tuple[str, ...], str] = {("0", str(index)): name for index, name in enumerate(positional)}
    names |= {("1", key): key for key in kwargs}
    if loss is not None:
        call = loss.forward if isinstance(loss, nn.Module) else loss
        for index, name in enumerate(_positional_names(call, [None, *loss_args], {}, "the loss")[1:]):
            names["2", str(index)] = f"loss.{name}" if name in names.values() else name
    return names


def _positional_names(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], what: str) -> list[str]:
    try:
        signature = inspect.signature(function)
    except ValueError:
        return [str(index) for index in range(len(args))]
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise UsageError(f"{what} takes {signature}: {error}", "give one example for each argument, in order") from None
    names: list[str] = []
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            names += [f"{parameter.name}.{index}" for index in range(len(args) - len(names))]
        elif parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            names.append(parameter.name)
    return names[: len(args)]


def input_name(path: tuple[str, ...], tops: Mapping[tuple[str, ...], str]) -> str:
    """The public name of a tensor, by its path and the names of top-level arguments."""
    return ".".join((tops[path[:2]], *path[2:]))


def tree_of(item: Any, tops: Mapping[tuple[str, ...], str], top: tuple[str, ...]) -> Any:
    """A JSON tree of one argument, tensors as ``{"tensor": NAME}``."""
    leaves, _ = torch_compat.flatten_with_paths(item)
    shown = ({"tensor": ".".join((tops[top], *path))} if isinstance(leaf, Tensor) else plain_leaf(leaf) for path, leaf in leaves)
    return nested(item, shown)


def nested(item: Any, leaves: Iterator[Any], *, result: bool = False) -> Any:
    """JSON lists and objects of containers, empty ones too.

    Args:
        leaves: what stands for each leaf, in order.
        result: whether objects say that they were named tuples.
    """
    if not torch_compat.is_known_container(item):
        return next(leaves)
    found = {name: nested(child, leaves, result=result) for name, child in torch_compat.named_children_of(item)}
    if isinstance(item, (list, tuple)) and not hasattr(item, "_fields"):
        kind: Any = type(item)
        children = list(found.values())
        return {NAMED_TUPLE: dict(zip(kind.__match_args__, children, strict=True))} if result and _is_torchs_own(item) else children
    return {NAMED_TUPLE: found} if result and isinstance(item, tuple) else found


def _is_torchs_own(item: Any) -> bool:
    """Whether it is one of ``torch.return_types``, which are tuples with names too."""
    return getattr(torch.return_types, type(item).__name__, None) is type(item)


def plain_leaf(leaf: Any) -> Any:
    """JSON of a value that is no tensor. Floats that are infinite or no number are those of ``to_json``."""
    return to_json(leaf) if leaf is None or isinstance(leaf, (bool, int, float, str)) else str(leaf)
