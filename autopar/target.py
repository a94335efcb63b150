"""Target: a model with example inputs, as the built-in models, the command line's TARGET and ``verify`` pass it on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Target:
    """A model and how it is called.

    Args:
        model: an ``nn.Module``.
        args, kwargs: example inputs of ``model.forward``.
        loss, loss_args: ``loss(outputs, *loss_args) -> scalar``; None when forward returns the loss.
    """

    model: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    loss: Callable[..., Any] | None = None
    loss_args: tuple[Any, ...] = ()
