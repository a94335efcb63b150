"""Target: a model with example inputs, as the built-in models, the command line's TARGET and ``verify`` pass it on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from autopar.errors import UsageError


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

    @classmethod
    def of(cls, given: Any) -> Target:
        """That of ``(model, args)``, ``(model, args, kwargs)``, or an object with ``model`` and what else there is of these.

        Raises:
            UsageError: a tuple of another length.
        """
        if isinstance(given, (tuple, list)):
            if len(given) not in (2, 3):
                raise UsageError(f"the target has {len(given)} parts", "give (model, args) or (model, args, kwargs)")
            model, args, *rest = given
            return cls(model, tuple(args), dict(rest[0] if rest else {}))
        kwargs, loss_args = getattr(given, "kwargs", None) or {}, getattr(given, "loss_args", None) or ()
        return cls(given.model, tuple(getattr(given, "args", ())), dict(kwargs), getattr(given, "loss", None), tuple(loss_args))
