"""Submodules of a compiled module.

They hold its weights, and are read, frozen and saved as before. Their computation runs inside the program of the whole model. So hooks on
them, new parameters and calls of a part by itself are refused with an error.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, wraps
from inspect import Signature, signature, unwrap
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar.errors import UsageError
from autopar.torch_compat import mixes_dtensors

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_ITSELF = "autopar"
"""The key of the hook that looks at how a part is called."""
_HINT = (
    "call the compiled module itself, or plan and compile a module whose forward is this call; what is given DTensors"
    " (distribute_tensor(x, module.place.device_mesh)) runs operator by operator, as DTensors do"
)


def keep_within(path: str, part: nn.Module) -> None:
    """Makes a submodule of a copied tree a part of a compiled module."""
    held = vars(part)
    held.update({kind: NoHooks(path, held[kind]) for kind in HOOKS}, _parameters=Known(path, held["_parameters"]))
    if held["_parameters"] or held["_buffers"]:
        held["_forward_pre_hooks"] = NoHooks(path, {_ITSELF: _Called(path), **held["_forward_pre_hooks"]})
        held["_forward_pre_hooks_with_kwargs"] = OrderedDict({**held["_forward_pre_hooks_with_kwargs"], _ITSELF: True})
        if isinstance(held.get("forward", _NOBODYS), OwnForward):
            held["forward"] = OwnForward(path, part)


@contextmanager
def captured_again(parts: Iterable[nn.Module]) -> Iterator[None]:
    """Within it hooks are registered as on any model's parts: the forward itself may, in its first call, and capture takes them away."""
    tables = [(vars(part), kind, vars(part)[kind]) for part in parts for kind in HOOKS]
    for held, kind, table in tables:
        held[kind] = OrderedDict(table)
    try:
        yield
    finally:
        for held, kind, table in tables:
            held[kind] = table


def copied_alone() -> UsageError:
    """The refusal of a copy of a part by itself, whose weights would be parted from those that the program has."""
    hint = "copy the whole and take the part of the copy: copy.deepcopy(module).part"
    return UsageError("a part of a compiled module is copied by itself, without the program that computes with it", hint)


class NoHooks(OrderedDict[Any, Any]):
    """The hooks of a submodule that was captured: those it had are in the program, others would never be called."""

    def __init__(self, path: str, held: Mapping[Any, Any]) -> None:
        super().__init__()
        self.path = path
        for key, hook in held.items():
            super().__setitem__(key, hook)

    def __setitem__(self, key: Any, hook: Any) -> None:
        hint = "register it before the model is planned, or on the compiled module itself; wrap the compiled module as a whole"
        raise UsageError(f"a hook on {self.path}, a part of a compiled module, would never be called: parts run inside the program", hint)


class Known(dict[str, Any]):
    """The parameters of a submodule that was captured: another one would be in no program."""

    def __init__(self, path: str, held: Mapping[str, Any]) -> None:
        super().__init__(held)
        self.path, self.names = path, frozenset(held)

    def __deepcopy__(self, memo: Any) -> Any:
        """Raises UsageError: a part is copied by itself."""
        raise copied_alone()

    def __setitem__(self, name: str, parameter: Any) -> None:
        if name not in self.names:
            message = f"{self.path}, a part of a compiled module, is given a parameter {name}, which its program does not have"
            hint = "change the model before it is planned; torch.nn.utils.parametrizations (weight_norm, orthogonal) may come later"
            raise UsageError(message, hint)
        super().__setitem__(name, parameter)


@dataclass(frozen=True)
class _Called:
    """Looks at what a part with weights is called with: plain tensors and DTensors do not go together. While the whole is captured, the
    weights are no DTensors."""

    path: str

    def __call__(self, part: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        given = next((one for one in (*args, *kwargs.values()) if isinstance(one, Tensor) and _is_plain(one)), None)
        weights = [*part._parameters.items(), *part._buffers.items()]
        name = next((name for name, one in weights if isinstance(one, DTensor)), None)
        if given is not None and name is not None:
            message = (
                f"{self.path} ({type(part).__name__}), a part of a compiled module, is called by itself with a plain tensor"
                f" {list(given.shape)}, its {name} is a DTensor: parts run inside the program of the whole"
            )
            raise UsageError(message, _HINT)


@dataclass(frozen=True)
class OwnForward:
    """The forward of a part with weights, where it is called itself: hooks, and what they say, are passed by."""

    path: str
    part: nn.Module | None = field(compare=False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        assert self.part is not None
        _Called(self.path)(self.part, args, kwargs)
        kind: Any = type(self.part)
        return kind.forward(self.part, *args, **kwargs)

    @property
    def __signature__(self) -> Signature:
        kind: Any = type(self.part)
        return signature(MethodType(kind.forward, self.part))


_NOBODYS = OwnForward("", None)


def _is_plain(tensor: Tensor) -> bool:
    """Whether operators refuse it beside DTensors, as they do but for single numbers."""
    return not isinstance(tensor, DTensor) and (tensor.dim() > 1 or tensor.numel() > 1)


def calls_super(method: Any) -> bool:
    """Whether a method or property of a class may call ``super()``, which takes instances of the class alone."""
    own: Any = method.fget if isinstance(method, property) else method
    function = unwrap(own)
    return isinstance(function, FunctionType) and "__class__" in function.__code__.co_freevars


@lru_cache
def told_of_weights(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of the model's own, which says what it means that weights are DTensors where it computes with them."""

    @wraps(method)
    def run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(module, *args, **kwargs)
        except RuntimeError as error:
            if not mixes_dtensors(error):
                raise
            called = getattr(method, "__qualname__", "a method")
            message = f"{called}, a method of a compiled module, computes with plain tensors and weights, which are DTensors: {error}"
            raise UsageError(message, _HINT) from error

    return run
