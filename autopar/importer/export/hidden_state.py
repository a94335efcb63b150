"""Hidden state: tensors that a forward keeps for its next call in attributes that are no buffers.

Examples are a recurrent state, a running mean, the batch before. A program starts every call from the captured model, so that such a state
would never change. Where modules or the loss hold new tensors after a forward, it runs a second time on fake tensors. A tensor of the
first run that the second reads is refused with an error. Tables that follow from sizes alone are made again by every call, and allowed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from autopar import torch_compat
from autopar.errors import CaptureError
from autopar.importer.diagnosis.errors import at_line
from autopar.importer.layers.repeats import as_before
from autopar.importer.stand_ins.known_values import running_user_frame

_DEEP = 3
"""Depth of nested containers that are searched."""


def keeps_tensors(parts: Iterable[object], weights: Iterable[Tensor]) -> bool:
    """Whether an attribute of these objects, or a container in one, holds a tensor without values that stands for no weight."""
    known = {id(weight) for weight in weights}
    tensors = (item for part in parts for value in _own(part) for item in _tensors(value, _DEEP))
    return any(torch_compat.is_fake(item) and id(item) not in known for item in tensors)


def check_kept(
    model: nn.Module, run: Callable[[tuple[Any, ...]], object], calls: Iterable[tuple[Any, ...]], weights: Iterable[Tensor]
) -> tuple[str, ...]:
    """The attributes, by path, in which a call leaves what it made of its inputs. A run that fails says so elsewhere.

    Raises:
        CaptureError: the second of two calls reads what the first has left.
    """
    first, second = calls
    inputs = [item for item in torch_compat.leaves_of(first) if isinstance(item, Tensor)]
    made, left = _Made(inputs, {id(weight) for weight in weights}), tuple[str, ...]()
    with as_before(model), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with made:
                run(first)
            left = tuple(_left(model, made.tensors))
            read = _Read(made.tensors)
            with read:
                run(second)
        except Exception:
            return left
    if read.place is not None:
        shape, place = read.place
        raise CaptureError(
            at_line(f"the forward reads a tensor {shape} that the call before it left in an attribute, which a plan does not keep", place),
            "register it as a buffer, whose new value is kept: self.register_buffer(name, tensor, persistent=False)",
        )
    return left


def _left(model: nn.Module, made: Mapping[int, Tensor]) -> Iterator[str]:
    """The attributes that hold some of these tensors, by path."""
    for path, part in model.named_modules():
        for name, value in _attributes(part):
            if any(id(item) in made for item in _tensors(value, _DEEP)):
                yield f"{path}.{name}" if path else name


class _Made(TorchFunctionMode):
    """Follows what is made of some tensors; what is written into weights is theirs."""

    def __init__(self, tensors: Iterable[Tensor], weights: set[int]) -> None:
        super().__init__()
        self.tensors, self.weights = {id(item): item for item in tensors}, weights

    def __torch_function__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        given = _given(args, kwargs)
        versions = [item._version for item in given]
        result = function(*args, **(kwargs or {}))
        if any(id(item) in self.tensors for item in given):
            written = [item for item, version in zip(given, versions, strict=True) if item._version != version]
            found = [item for item in (*torch_compat.leaves_of(result), *written) if isinstance(item, Tensor)]
            self.tensors.update((id(item), item) for item in found if id(item) not in self.weights)
        return result


class _Read(TorchFunctionMode):
    """Notes where one of some tensors is computed with first; its shape or dtype may be asked."""

    def __init__(self, tensors: dict[int, Tensor]) -> None:
        super().__init__()
        self.tensors = tensors
        self.place: tuple[list[int], tuple[str, int] | None] | None = None

    def __torch_function__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        read = [item for item in _given(args, kwargs) if id(item) in self.tensors]
        result = function(*args, **(kwargs or {}))
        if read and self.place is None and (result is None or any(isinstance(item, Tensor) for item in torch_compat.leaves_of(result))):
            frame = running_user_frame()
            self.place = list(read[0].shape), (frame.f_code.co_filename, frame.f_lineno) if frame is not None else None
        return result


def _given(args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> list[Tensor]:
    return [item for item in torch_compat.leaves_of((args, kwargs or {})) if isinstance(item, Tensor)]


def _own(part: object) -> Iterator[Any]:
    return (value for _, value in _attributes(part))


def _attributes(part: object) -> Iterator[tuple[str, Any]]:
    held = getattr(part, "__dict__", {})
    return (item for item in held.items() if not (isinstance(part, nn.Module) and item[0] in ("_parameters", "_buffers", "_modules")))


def _tensors(value: Any, deep: int) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif deep and not isinstance(value, (nn.Module, type, str, torch.Generator)):
        items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple, set)) else _own(value)
        for item in list(items):
            yield from _tensors(item, deep - 1)
