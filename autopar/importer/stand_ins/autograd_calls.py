"""Calls of autograd in a model's Python: carried through export, and made again in the joint trace.

Export keeps operators. It drops the backward of a ``torch.autograd.Function``, of a hook, of ``requires_grad_`` and of a gradient taken
inside of forward, so that captured gradients would be wrong. Here each such call becomes one operator, ``autopar::deferred``, over its
tensors. Running it on fake tensors gives the shapes of its results; the joint trace makes the call itself.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from autopar import torch_compat
from autopar.dialect.library import define
from autopar.errors import CaptureError
from autopar.importer.diagnosis.errors import at_line
from autopar.importer.stand_ins.known_values import running_user_frame

Users = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Wraps a function of the user's for the joint trace: in it, dialect operators run in place of torch's."""

_TENSOR = object()


@dataclass
class Deferred:
    """One call.

    Args:
        shapes: gives results of the call's shapes for detached fake tensors.
        call: the call, for the joint trace's tensors; the user's own Python in it goes through ``Users``.
        requires_grad: what the call's one tensor is said to do from here on; None for other calls.
        leaves, structure: of the result, ``_TENSOR`` for tensors; known once ``shapes`` ran.
    """

    shapes: Callable[[list[Tensor]], Any]
    call: Callable[[list[Tensor], Users], Any]
    requires_grad: bool | None = None
    leaves: list[Any] = field(default_factory=list)
    structure: Any = None

    def run(self, tensors: list[Tensor], users: Users) -> list[Tensor]:
        """The tensors of the call's result, in the joint trace."""
        found = [leaf for leaf in torch_compat.leaves_of(self.call(tensors, users)) if isinstance(leaf, Tensor)]
        assert len(found) == sum(leaf is _TENSOR for leaf in self.leaves), "a call gives other results when it is made again"
        return found


_CALLS: ContextVar[list[Deferred] | None] = ContextVar("autopar_deferred_calls", default=None)
"""The calls of the export that is running; None outside of one, and while a call runs for its shapes."""


@contextmanager
def deferring(calls: list[Deferred]) -> Iterator[None]:
    """While a model runs to be exported: its calls to autograd are added to ``calls``."""
    token = _CALLS.set(calls)
    try:
        with (
            torch_compat.replaced_function_apply(_apply), torch_compat.replaced_module_hooks(_entered, _left),
            torch_compat.replaced_transforms(_transform),
        ):  # fmt: skip
            yield
    finally:
        _CALLS.reset(token)


def _shapes(tensors: list[Tensor], call: int) -> list[Tensor]:
    calls = _CALLS.get()
    assert calls is not None, "a deferred call has a meaning in its capture alone"
    made, given = calls[call], [tensor.detach() for tensor in tensors]
    token = _CALLS.set(None)
    try:
        leaves, made.structure = torch_compat.flatten_with_paths(made.shapes(given))
    finally:
        _CALLS.reset(token)
    made.leaves = [_TENSOR if isinstance(leaf, Tensor) else leaf for _, leaf in leaves]
    return [leaf.detach().clone() for _, leaf in leaves if isinstance(leaf, Tensor)]


define("deferred(Tensor[] tensors, int call) -> Tensor[]", _shapes, _shapes)
OPERATOR = torch.ops.autopar.deferred.default
torch.fx.node.has_side_effect(OPERATOR)


def defer(made: Deferred, tensors: list[Tensor]) -> Any:
    """Puts a call into the exported graph and gives its result."""
    calls = _CALLS.get()
    assert calls is not None
    calls.append(made)
    found = iter(OPERATOR(tensors, len(calls) - 1))
    return torch_compat.unflatten([next(found) if leaf is _TENSOR else leaf for leaf in made.leaves], made.structure)


def _listening(*tensors: Any, recording: bool | None = None) -> bool:
    """Whether autograd would hear of a call with these among its arguments; ``recording`` if that is not as it is now."""
    recording = torch.is_grad_enabled() if recording is None else recording
    return _CALLS.get() is not None and recording and any(isinstance(t, Tensor) and t.requires_grad for t in tensors)


def _split(tree: Any) -> tuple[list[Tensor], Callable[[list[Tensor]], Any]]:
    """The tensors of nested containers, and the containers around others in their place."""
    leaves, structure = torch_compat.flatten_with_paths(tree)
    plain = [_TENSOR if isinstance(leaf, Tensor) else leaf for _, leaf in leaves]

    def rebuilt(tensors: list[Tensor]) -> Any:
        found = iter(tensors)
        return torch_compat.unflatten([next(found) if leaf is _TENSOR else leaf for leaf in plain], structure)

    return [leaf for _, leaf in leaves if isinstance(leaf, Tensor)], rebuilt


# --- torch.autograd.Function ------------------------------------------------------------------------------------------


def _apply(function: type[torch.autograd.Function], apply: Callable[..., Any], args: tuple[Any, ...], recording: bool) -> Any:
    """``function.apply(*args)`` of the user's code; ``apply`` is torch's own, ``recording`` whether autograd was on."""
    if torch_compat.is_reentrant_checkpoint(function):
        body, _, *inputs = args
        warn_of_checkpoint()
        return body(*inputs)
    if not _listening(*args, recording=recording) or function.__module__.partition(".")[0] == "torch":
        return apply(*args)
    tensors, rebuilt = _split(args)

    def shapes(given: list[Tensor]) -> Any:
        versions = [tensor._version for tensor in given]
        result = function.apply(*rebuilt(given))
        if versions != [tensor._version for tensor in given]:
            raise CaptureError(f"the forward of {function.__name__} changes its input in place", "return a new tensor from it")
        return result

    def call(given: list[Tensor], users: Users) -> Any:
        return users(torch_compat.with_backward(function, users).apply)(*rebuilt(given))

    return defer(Deferred(shapes, call), tensors)


class CheckpointWarning(UserWarning):
    """The model says itself what is to be computed again in backward."""


def warn_of_checkpoint() -> None:
    """Gradients are the same; what is kept and what is made again is the plan's to choose."""
    if not torch.is_grad_enabled():
        return
    frame = running_user_frame()
    place = f"{frame.f_code.co_filename}:{frame.f_lineno}: " if frame is not None else ""
    text = f"{place}torch.utils.checkpoint is not followed: the plan chooses what is computed again, where memory asks for it"
    warnings.warn(text, CheckpointWarning, stacklevel=2)


# --- hooks ------------------------------------------------------------------------------------------------------------


def _entered(hook: Any, enter: Callable[[Any], Any], args: Any) -> Any:
    """A module with backward hooks is called: its inputs, watched. ``hook`` is torch's ``BackwardHook`` of this call."""
    hook.twins = []
    return _watched(hook, enter, args, lambda twin, values: twin.setup_input_hook(values), new=True)


def _left(hook: Any, leave: Callable[[Any], Any], result: Any) -> Any:
    """Its outputs, watched."""
    return _watched(hook, leave, result, lambda twin, values: twin.setup_output_hook(values), new=False)


def _watched(hook: Any, plain: Callable[[Any], Any], values: Any, watch: Callable[[Any, Any], Any], *, new: bool) -> Any:
    """``watch`` by a twin of the hook, of which every walk of the joint trace makes its own."""
    if not _listening(*torch_compat.leaves_of(values)):
        return plain(values)
    entered = new or hook.n_inputs < 0
    tensors, rebuilt = _split(values)

    def call(given: list[Tensor], users: Users) -> Any:
        if new or not entered:
            twin = type(hook)(hook.module, [*map(users, hook.user_hooks)], [*map(users, hook.user_pre_hooks)])
            twin.n_inputs = hook.n_inputs
            hook.twins.append(twin)
        return watch(hook.twins[-1], rebuilt(given))

    return defer(Deferred(rebuilt, call), tensors)


def _register_hook(tensor: Tensor, hook: Callable[..., Any]) -> Any:
    handle = tensor.register_hook(hook)  # torch refuses here what it refuses always
    defer(Deferred(lambda given: (), lambda given, users: (given[0].register_hook(users(hook)), ())[1]), [tensor])
    return handle


class _Hooked(torch.autograd.Function):
    """A tensor whose gradient goes through hooks."""

    @staticmethod
    def forward(context: Any, tensor: Tensor, hooks: list[Callable[..., Any]]) -> Tensor:
        context.hooks = hooks
        return tensor.view_as(tensor)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        for hook in context.hooks:
            changed = hook(gradient)
            gradient = gradient if changed is None else changed
        return gradient, None


def with_hooks(tensor: Tensor, hooks: Sequence[Callable[..., Any]], users: Users) -> Tensor:
    """The joint trace's tensor of a parameter that has hooks of its own."""
    return _Hooked.apply(tensor, [*map(users, hooks)]) if hooks and tensor.requires_grad else tensor


def check_hooks(model: nn.Module) -> None:
    """Refuses the hooks whose gradients cannot be had.

    Raises:
        CaptureError: names the module or parameter.
    """
    for path, part in model.named_modules():
        if part._backward_hooks and part._is_full_backward_hook is False:
            raise CaptureError(
                f"module {path or type(part).__name__} has a hook by register_backward_hook, which sees no certain gradients",
                "use register_full_backward_hook",
            )
    for name, parameter in model.named_parameters():
        if getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise CaptureError(
                f"parameter {name} has a hook for when its gradient is accumulated, which a plan does not hold",
                "remove it before planning, and register it on the compiled module's parameter",
            )


# --- torch.func -------------------------------------------------------------------------------------------------------


def _transform(transform: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A transform of ``torch.func``: the operators that it comes to, since export cannot look into one that takes gradients."""
    if transform.__name__ != "_vjp_with_argnums":
        return run_by_operators(lambda *given: transform(*given, **kwargs), args)
    function, *primals = args

    def pull(cotangents: Any, *_: Any, **__: Any) -> Any:
        return run_by_operators(lambda given, *at: transform(function, *at, **kwargs)[1](given), (cotangents, *primals))

    value, *aux = run_by_operators(lambda *at: transform(function, *at, **kwargs)[::2], tuple(primals))
    return value, pull, *aux


def run_by_operators(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """``function(*args)`` by plain operators; within one that is run so already, or outside of an export, as it is."""
    if _CALLS.get() is None:
        return function(*args)
    tensors, rebuilt = _split(args)
    structure: Any = None

    def flat(*given: Tensor) -> list[Any]:
        nonlocal structure
        leaves, structure = torch_compat.flatten_with_paths(function(*rebuilt(list(given))))
        return [leaf for _, leaf in leaves]

    token = _CALLS.set(None)
    try:
        operators = torch_compat.traced_apart(flat, tensors)
    finally:
        _CALLS.reset(token)
    return torch_compat.unflatten(operators.run(*tensors), structure)


# --- requires_grad_ and gradients inside of forward -------------------------------------------------------------------


def _set_requires_grad(tensor: Tensor, flag: bool = True) -> Tensor:
    """From here on the tensor is one that does, or does not, require grad."""
    if _CALLS.get() is not None and tensor.requires_grad != flag and torch.is_grad_enabled():
        tensor.requires_grad_(flag)
        defer(Deferred(lambda given: (), lambda given, users: (), requires_grad=flag), [tensor])
        return tensor
    return tensor.requires_grad_(flag)


def _assign_requires_grad(tensor: Tensor, flag: bool) -> None:
    _set_requires_grad(tensor, flag)


def _grad(
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    only_inputs: bool = True,
    allow_unused: bool | None = None,
    is_grads_batched: bool = False,
    materialize_grads: bool = False,
) -> Any:
    if is_grads_batched or (allow_unused and not materialize_grads):
        raise CaptureError(
            "torch.autograd.grad with is_grads_batched or allow_unused is not supported in forward",
            "take the gradients of what is used, or pass materialize_grads=True",
        )
    single = isinstance(inputs, Tensor)
    tensors, rebuilt = _split((outputs, [inputs] if single else list(inputs), grad_outputs))

    def call(given: list[Tensor], users: Users) -> Any:
        of, by, seeds = rebuilt(given)
        return torch.autograd.grad(of, by, seeds, retain_graph=True, create_graph=create_graph, materialize_grads=materialize_grads)

    def shapes(given: list[Tensor]) -> Any:
        return tuple(torch.empty_like(tensor) for tensor in rebuilt(given)[1])

    found = defer(Deferred(shapes, call), tensors)
    return tuple(found if create_graph else (gradient.detach() for gradient in found))


def _data(tensor: Tensor) -> Tensor:
    """``tensor.data``: to export a new tensor from nowhere, were it not said by an operator."""
    return tensor.detach() if _CALLS.get() is not None else tensor.data


def _set_data(tensor: Tensor, value: Tensor) -> None:
    if _CALLS.get() is None:
        tensor.data = value
    elif value.shape != tensor.shape or value.dtype != tensor.dtype:
        raise CaptureError("forward gives a tensor data of another shape or dtype", "make a new tensor")
    else:
        tensor.detach().copy_(value)


def _backward(*_: Any, **__: Any) -> Any:
    raise CaptureError("forward calls backward() itself", "take the gradient as a value: torch.autograd.grad(..., create_graph=True)")


class _Refusing(TorchFunctionMode):
    """Within it, a backward that the user's Python runs itself adds to no parameter's ``.grad``, which nobody would ask for."""

    def __torch_function__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in (Tensor.backward, torch.autograd.backward) and kwargs.get("inputs") is None:
            of = [leaf for leaf in torch_compat.leaves_of(args[:1] or kwargs.get("tensors")) if isinstance(leaf, Tensor)]
            reached = [leaf for leaf in torch_compat.accumulating(of) if isinstance(leaf, nn.Parameter)]
            if reached:
                frame = running_user_frame()
                message = f"backward() here adds to the .grad of parameters ({_sizes(reached)}), which a plan has no place for"
                raise CaptureError(
                    at_line(message, None if frame is None else (frame.f_code.co_filename, frame.f_lineno)),
                    "give the parameters to the function as arguments, take their gradients by torch.autograd.grad and return them; where "
                    "it only saves memory call the layers without it: a plan chooses what is computed again",
                )
        return function(*args, **kwargs)


REFUSING = _Refusing()


def _sizes(parameters: list[nn.Parameter]) -> str:
    return ", ".join(str(list(parameter.shape)) for parameter in parameters[:3]) + (", ..." if len(parameters) > 3 else "")


def _accumulated(*_: Any, **__: Any) -> Any:
    raise CaptureError("forward registers a hook for when a gradient is accumulated", "use register_hook")


REPLACED: dict[Any, Callable[..., Any]] = {
    Tensor.register_hook: _register_hook,
    Tensor.requires_grad_: _set_requires_grad,
    Tensor.requires_grad.__set__: _assign_requires_grad,
    Tensor.data.__get__: _data,
    Tensor.data.__set__: _set_data,
    Tensor.register_post_accumulate_grad_hook: _accumulated,
    Tensor.backward: _backward,
    torch.autograd.backward: _backward,
    torch.autograd.grad: _grad,
}
"""torch functions whose calls are deferred, as a mode of torch functions sees them while a model is exported."""


def replaced(function: Any) -> Callable[..., Any]:
    """What is called in place of a torch function."""
    return REPLACED.get(function, function) if _CALLS.get() is not None else function
