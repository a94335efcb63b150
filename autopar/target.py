"""Target: a model with example inputs, as the built-in models, the command line's TARGET and ``verify`` pass it on."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from autopar.errors import AutoparError, CaptureError, UsageError


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
        """The target of ``(model, args)``, ``(model, args, kwargs)``, or an object with ``model`` and any of the other fields.

        Raises:
            UsageError: a tuple of another length, or something else.
        """
        if isinstance(given, (tuple, list)):
            if len(given) not in (2, 3):
                raise UsageError(f"the target has {len(given)} parts", "give (model, args) or (model, args, kwargs)")
            model, args, *rest = given
            return cls(model, tuple(args), dict(rest[0] if rest else {}))
        if not hasattr(given, "model"):
            hint = "give (model, args), (model, args, kwargs), or an object with model, args, kwargs, loss, loss_args"
            raise UsageError(f"the target is a {type(given).__name__}", hint)
        kwargs, loss_args = getattr(given, "kwargs", None) or {}, getattr(given, "loss_args", None) or ()
        return cls(given.model, tuple(getattr(given, "args", ())), dict(kwargs), getattr(given, "loss", None), tuple(loss_args))

    @classmethod
    def made(cls, function: Callable[..., Any], settings: Mapping[str, Any]) -> Target:
        """The target that a user's function returns for these settings.

        Raises:
            UsageError: no function, other settings than it takes, or something else that is returned. CaptureError: what it raises.
        """
        name = getattr(function, "__name__", type(function).__name__)
        try:
            inspect.signature(function).bind(**settings)
        except TypeError as error:
            hint = "give a function that is called with one value of each setting by name and returns the model and its inputs"
            raise UsageError(f"{name} cannot be called with {', '.join(settings) or 'no arguments'}: {error}", hint) from None
        except ValueError:
            pass  # no signature is known
        try:
            given = function(**settings)
        except AutoparError:
            raise
        except Exception as error:  # the user's own code: anything can come out of it
            said = next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")
            shown = ", ".join(f"{key}={value!r}" for key, value in settings.items())
            raise CaptureError(f"{name}({shown}) raised {type(error).__name__}: {said:.200}", "call it on its own to see where") from error
        return cls.of(given)
