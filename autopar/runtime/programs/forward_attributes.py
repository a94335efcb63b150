"""Attributes that forward sets, such as a router's loss or attention weights.

The program does not update them. Reading one raises an error instead of returning a stale value.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from autopar.errors import UsageError
from autopar.torch_compat import leaves_of

_MISSING = object()


class Left(Tensor):
    """What stands in an attribute where the model's own forward would have left a tensor, or tensors.

    Attributes:
        path: of the attribute.
        was: what was there before.
    """

    path: str
    was: Any

    @staticmethod
    def __new__(cls, path: str, was: Any) -> Left:
        made = torch.tensor(torch.nan).as_subclass(cls)
        made.path, made.was = path, was
        return made

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Raises UsageError: whatever is asked of it."""
        raise _not_there(next(one for one in leaves_of((args, kwargs or {})) if type(one) is cls))

    def __getattr__(self, name: str) -> Any:
        """Raises UsageError: what a list or a dictionary of tensors is asked."""
        raise AttributeError(name) if name.startswith("__") else _not_there(self)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"<{self.path}: left by the model's own forward alone>"


def _not_there(left: Left) -> UsageError:
    message = f"{left.path} is read, where the model's forward leaves a tensor: the program that runs in its place leaves nothing there"
    return UsageError(message, "return it from forward, or have it added to the loss there, and plan the model again")


def leave(model: nn.Module, paths: Iterable[str]) -> None:
    """After a call: the attributes do not hold what they did before it."""
    for path in paths:
        held, name = _holder(model, path)
        if type(held.get(name)) is not Left:
            held[name] = Left(path, held.get(name, _MISSING))


def put_back(model: nn.Module, paths: Iterable[str]) -> None:
    """Before the next call: they do, unless somebody has set them since."""
    for path in paths:
        held, name = _holder(model, path)
        if type(left := held.get(name)) is Left:
            del held[name]
            held.update({} if left.was is _MISSING else {name: left.was})


def _holder(model: nn.Module, path: str) -> tuple[dict[str, Any], str]:
    part, _, name = path.rpartition(".")
    return vars(model.get_submodule(part)), name
