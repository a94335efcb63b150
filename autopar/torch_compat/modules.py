"""Modules: their hooks, their forward, and conversions that must not change them while they are captured."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from threading import get_ident
from types import MethodType
from typing import Any

import torch
from torch import nn


@contextmanager
def replaced_module_hooks(entered: Callable[..., Any], left: Callable[..., Any]) -> Iterator[None]:
    """Within it, the inputs and outputs of a module with backward hooks pass through ``entered`` and ``left``.

    They are called as ``(hook, method, values)``; ``torch.utils.hooks.BackwardHook`` is made for each call of such a module.
    """
    from torch.utils.hooks import BackwardHook

    enter, leave = BackwardHook.setup_input_hook, BackwardHook.setup_output_hook
    BackwardHook.setup_input_hook = lambda self, args: entered(self, lambda values: enter(self, values), args)
    BackwardHook.setup_output_hook = lambda self, args: left(self, lambda values: leave(self, values), args)
    try:
        yield
    finally:
        BackwardHook.setup_input_hook, BackwardHook.setup_output_hook = enter, leave


@contextmanager
def kept_modules(owned: Container[torch.nn.Module], refuse: Callable[[torch.nn.Module], None]) -> Iterator[None]:
    """Within it, ``module.to(...)``, ``float()`` and their like of this thread leave a module as it is where its tensors are already what
    is asked for; of another of these modules ``refuse`` hears. They all come to ``Module._apply``, which on stand-ins wants to swap every
    parameter all the same.
    """
    thread, plain = get_ident(), torch.nn.Module._apply

    def applied(self: torch.nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> torch.nn.Module:
        if get_ident() == thread and all(_stays(tensor, fn) for tensor in (*self.parameters(recurse), *self.buffers(recurse))):
            return self
        if get_ident() == thread and self in owned:
            refuse(self)
        return plain(self, fn, recurse)

    torch.nn.Module._apply = applied
    try:
        yield
    finally:
        torch.nn.Module._apply = plain


def _stays(tensor: torch.Tensor, fn: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    with torch.no_grad():
        made = fn(tensor)
    return (made.dtype, made.device, made.shape, made.stride()) == (tensor.dtype, tensor.device, tensor.shape, tensor.stride())


def uncompiled(copied: nn.Module) -> None:
    """A copy of a module that was given to ``torch.compile`` calls what it holds itself: what was compiled is the first one's."""
    vars(copied).pop("_compiled_call_impl", None)
    if "_orig_mod" in copied._modules:
        vars(copied)["forward"] = MethodType(_call_original, copied)


def _call_original(module: Any, *args: Any, **kwargs: Any) -> Any:
    return module._orig_mod(*args, **kwargs)


def forward_of(module: nn.Module) -> Callable[..., Any]:
    """The forward with the signature that the user wrote: that of the module which ``torch.compile`` was given, if it was."""
    original = module._modules.get("_orig_mod")
    return module.forward if original is None else forward_of(original)


STATE_HOOKS = ("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")
"""Where a module keeps what is called when its state is saved and loaded."""


CALL_HOOKS = (
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs", "_backward_hooks", "_backward_pre_hooks", "_is_full_backward_hook",
)  # fmt: skip
"""Where a module keeps what is called when it is called itself, or differentiated."""


def hooks_of_copy(hooks: Mapping[Any, Any], exchanged: Callable[[Any], Any]) -> OrderedDict[Any, Any]:
    """A module's hooks of one kind for its copy: those that are told the module (``_WrappedHook``) are told the copy, others are
    ``exchanged`` as well, since they may be methods of it."""
    from torch.nn.modules.module import _WrappedHook

    def of_copy(hook: Any) -> Any:
        if isinstance(hook, _WrappedHook):
            return _WrappedHook(exchanged(hook.hook), exchanged(hook.module()) if hook.with_module else None)
        return exchanged(hook)

    return OrderedDict((key, of_copy(hook)) for key, hook in hooks.items())
