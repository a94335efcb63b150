"""Calls of autograd and its transforms that a model makes itself, and the backward pass that runs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import FrameType
from typing import Any

import torch


@contextmanager
def replaced_function_apply(function: Callable[..., Any]) -> Iterator[None]:
    """Within it, ``SomeFunction.apply(*args)`` is ``function(SomeFunction, apply, args, recording)``, however the method was come by;
    ``recording``: whether autograd was on where it was called.

    In torch 2.13 ``torch.autograd.Function.apply`` ends in ``super().apply`` of ``_SingleLevelFunction``, which has none of its own. Later
    it is C alone: what it asks of the class, through the metaclass, is how who took ``apply`` before is met.
    """
    from torch.autograd.function import FunctionMeta, _SingleLevelFunction

    def apply(cls: Any, *args: Any) -> Any:
        return function(cls, super(_SingleLevelFunction, cls).apply, args, torch.is_grad_enabled())

    in_python = hasattr(torch.autograd.Function.apply, "__func__")
    holder, name, replaced = (
        (_SingleLevelFunction, "apply", classmethod(apply)) if in_python else (FunctionMeta, "__getattribute__", _asked(function))
    )
    setattr(holder, name, replaced)
    try:
        yield
    finally:
        delattr(holder, name)


def _asked(function: Callable[..., Any]) -> Callable[[Any, str], Any]:
    """The ``__getattribute__`` of classes whose ``apply`` is C: that asks for ``_backward_cls`` as autograd is where the call is made, then
    for ``forward`` with autograd off, and calls what it gets."""
    calls: list[bool] = []  # of each that did not come to its forward yet, whether autograd hears it
    own: list[bool] = []  # calls made by ``function`` itself

    def direct(apply: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            own.append(True)
            return apply(*args)

        return run

    def get(cls: Any, name: str) -> Any:
        found = type.__getattribute__(cls, name)
        if name == "apply":
            return lambda *args: function(cls, direct(found), args, torch.is_grad_enabled())
        if name == "_backward_cls":
            calls.append(torch.is_grad_enabled() and not own)
            own.clear()
        if name == "forward" and not torch.is_grad_enabled() and calls and calls.pop():
            old_style = type.__getattribute__(cls, "setup_context") is _SingleLevelFunction.setup_context
            return lambda *args: heard(cls, found, args[:old_style], args[old_style:])
        return found

    def heard(cls: Any, forward: Callable[..., Any], context: tuple[Any, ...], args: tuple[Any, ...]) -> Any:
        return function(cls, lambda *given: forward(*context, *given), args, True)

    from torch.autograd.function import _SingleLevelFunction

    return get


def with_backward(function: Any, wrapped: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Any:
    """The ``torch.autograd.Function`` with its backward wrapped, whichever of its two names it has."""
    names = [name for name in ("backward", "vjp") if getattr(function, name) is not getattr(torch.autograd.Function, name)]
    return type(function.__name__, (function,), {name: staticmethod(wrapped(getattr(function, name))) for name in names})


def accumulating(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The leaves to whose ``.grad`` a backward from these would add."""
    found: dict[int, torch.Tensor] = {id(tensor): tensor for tensor in tensors if tensor.is_leaf and tensor.requires_grad}
    waiting = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    seen = dict.fromkeys(waiting)
    while waiting:
        node = waiting.pop()
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            found[id(leaf)] = leaf
        before = dict.fromkeys(source for source, _ in node.next_functions if source is not None and source not in seen)
        seen |= before
        waiting += before
    return list(found.values())


@contextmanager
def replaced_transforms(run: Callable[..., Any]) -> Iterator[None]:
    """Within it, the transforms of ``torch.func`` are ``run(transform, *args, **kwargs)``.

    What users import, under several names, ends in these five: ``vmap``, ``grad``, ``grad_and_value``, ``jvp`` and ``vjp``; jacobians and
    hessians are made of them. Called while one of them runs, they are called so too.
    """
    from torch._functorch import apis, eager_transforms

    own = ("grad_impl", "grad_and_value_impl", "_jvp_with_argnums", "_vjp_with_argnums")
    places: list[tuple[Any, str]] = [(apis, "vmap_impl"), *((eager_transforms, name) for name in own)]
    kept = [getattr(module, name) for module, name in places]
    for (module, name), transform in zip(places, kept, strict=True):
        setattr(module, name, partial(run, transform))
    try:
        yield
    finally:
        for (module, name), transform in zip(places, kept, strict=True):
            setattr(module, name, transform)


def traced_apart(function: Callable[..., Any], tensors: list[torch.Tensor]) -> torch.fx.Interpreter:
    """The operators below autograd and ``torch.func`` that ``function(*tensors)`` runs on fake tensors, as what runs them again.

    Nothing that traces now sees them. Other tensors that the function takes from where it was written are held as they are.
    """
    from torch._guards import detect_fake_mode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.overrides import _get_current_function_mode_stack, _pop_mode_temporarily
    from torch.utils._python_dispatch import _disable_current_modes

    mode = detect_fake_mode(tensors)
    with ExitStack() as stack:
        for _ in _get_current_function_mode_stack():
            stack.enter_context(_pop_mode_temporarily())
        stack.enter_context(_disable_current_modes())
        if mode is not None:
            stack.enter_context(mode)
        return torch.fx.Interpreter(make_fx(function, decomposition_table=dict(_MADE))(*tensors))


_MADE: Mapping[Any, Callable[..., torch.Tensor]] = {
    torch.ops.aten._efficientzerotensor.default: lambda size, dtype=None, **_: torch.zeros(size, dtype=dtype, device="cpu"),
    torch.ops.aten.zeros_like.default: lambda x, dtype=None, **_: torch.zeros(x.shape, dtype=dtype or x.dtype, device=x.device),
    torch.ops.aten.ones_like.default: lambda x, dtype=None, **_: torch.ones(x.shape, dtype=dtype or x.dtype, device=x.device),
}
"""Seeds of derivatives: forward differentiation makes them on a device that fake tensors do not have, backward like a result that nothing
else may ask for."""


def is_reentrant_checkpoint(function: Any) -> bool:
    """Whether a ``torch.autograd.Function`` is ``torch.utils.checkpoint``'s; it is applied to (function, flag, *arguments)."""
    from torch.utils.checkpoint import CheckpointFunction

    return function is CheckpointFunction


_ASKED_OF = {name: getattr(torch, name) for name in ("is_grad_enabled", "is_inference_mode_enabled")}


@contextmanager
def noticed_questions(noticed: Callable[[str, bool, FrameType], None]) -> Iterator[None]:
    """Within it, ``noticed`` is told of each call of ``torch.is_grad_enabled`` and ``torch.is_inference_mode_enabled``: the name, the
    answer, and the frame that asks. They are C, which no mode of torch functions hears of. One imported by its name alone is not heard."""

    def hearing(name: str, plain: Callable[[], bool]) -> Callable[[], bool]:
        def asked() -> bool:
            answer = plain()
            noticed(name, answer, sys._getframe(1))
            return answer

        return asked

    for name, plain in _ASKED_OF.items():
        setattr(torch, name, hearing(name, plain))
    try:
        yield
    finally:
        for name, plain in _ASKED_OF.items():
            setattr(torch, name, plain)


@contextmanager
def without_checkpoints(noticed: Callable[[], None]) -> Iterator[None]:
    """Within it, a function given to ``torch.utils.checkpoint`` runs as if it were called by itself, and ``noticed`` is called.

    Reentrant ones are as ever.
    ``_checkpoint_without_reentrant_generator``, from torch 2.15 on with ``_impl`` behind it: what the public function, under whichever name
    it was imported, comes to. Its hooks switch recording off as they run. Where one call stands in another, an export takes that for the
    model's own.
    """
    from torch.utils import checkpoint

    name = "_checkpoint_without_reentrant_generator"
    name = f"{name}_impl" if hasattr(checkpoint, f"{name}_impl") else name
    plain = getattr(checkpoint, name)

    def passed(*args: Any, **kwargs: Any) -> Iterator[None]:
        noticed()
        yield

    setattr(checkpoint, name, passed)
    try:
        yield
    finally:
        setattr(checkpoint, name, plain)


def profiler_records() -> bool:
    """Whether a profiler of torch records what this thread does."""
    return bool(torch.autograd._profiler_enabled())


def keeps_autograd_graph() -> bool:
    """Whether the backward pass that is running was asked to keep the graph (``retain_graph=True``)."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def computes_again() -> bool:
    """Whether a backward pass computes again what was not kept: for ``torch.utils.checkpoint``, or a function's own backward.

    A hook is called by the pass itself. Which of these called comes last is told by the frames of this thread.
    """
    from torch.autograd.function import BackwardCFunction
    from torch.autograd.graph import _engine_run_backward

    if torch._C._current_graph_task_id() == -1:
        return False
    applies = {getattr(BackwardCFunction, name).__code__ for name in ("apply", "apply_boxed") if hasattr(BackwardCFunction, name)}
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _engine_run_backward.__code__:
        code = frame.f_code
        if code in applies or (code.co_name == "unpack_hook" and frame.f_globals["__name__"] == "torch.utils.checkpoint"):
            return True
        frame = frame.f_back
    return False


def apply_alone(function: Any) -> Callable[..., Any]:
    """``apply`` of an ``autograd.Function`` where no transform of ``torch.func`` runs.

    In torch 2.13 it is Python, which looks at each argument for what a transform left. What it ends in (``_FunctionBase.apply``) does not.
    """
    in_python = hasattr(torch.autograd.Function.apply, "__func__")
    return super(torch.autograd.Function, function).apply if in_python else function.apply


NOBODYS = torch.empty((), device="cpu", requires_grad=True)
"""A leaf whose gradient nobody asks for: a backward pass that comes to it comes to all leaves."""
_TO_NOBODY = torch.autograd.graph.get_gradient_edge(NOBODYS).node
"""Its node in every graph; a graph's list of its nodes is made anew each time that it is asked for."""


def store_gradients(leaves: Sequence[Any], gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Puts gradients where autograd would, and gives those that are left to it: None for each that is stored.

    Autograd stores a detached gradient, and to detach a DTensor takes it several times as long as all the rest. Left to it are
    those that it does not store (``autograd.grad``, ``backward(inputs=...)``, a leaf frozen since forward), or adds up, or calls hooks
    with; and the last on a GPU, by which it learns which streams must wait for which.

    ``_will_engine_execute_node`` says whether the pass comes to a leaf, ``_backward_hooks`` and ``_post_accumulate_grad_hooks`` are a
    leaf's hooks. Without ``DisableTorchFunctionSubclass`` each of them asks DTensor first, which takes as long again.

    Args:
        leaves: the tensors of the ``autograd.Function`` whose backward runs, behind ``NOBODYS``; None where it is not known.
    """
    left, last = list(gradients), len(gradients) - 1
    if not _stores_all():
        return left
    with torch._C.DisableTorchFunctionSubclass():
        for place, (leaf, gradient) in enumerate(zip(leaves, gradients, strict=True)):
            if leaf is None or gradient is None or not leaf.is_leaf or not leaf.requires_grad or leaf.grad is not None:
                continue
            if place == last and not gradient.is_cpu:
                continue
            if not leaf._backward_hooks and not leaf._post_accumulate_grad_hooks:
                leaf.grad, left[place] = gradient, None
    return left


def _stores_all() -> bool:
    """Whether the backward pass that is running stores the gradient of every leaf that it comes to, and looks at none of them before."""
    if torch.is_anomaly_enabled():
        return False
    try:
        return bool(torch._C._will_engine_execute_node(_TO_NOBODY))
    except RuntimeError:  # it is autograd compiled
        return False
