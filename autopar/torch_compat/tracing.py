"""Joint traces of forward and backward, where their operators come from, and what stands in for operators."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from autopar.torch_compat.tensors import dispatch_mode

ORIGIN = "autopar_origin"


@contextmanager
def recorded_origins() -> Iterator[Callable[[str], Any]]:
    """Within it, ``with origin(name):`` marks the nodes that are traced; ``origin_of`` reads the mark back.

    ``torch.fx.traceback``: AOTAutograd copies the mark of a forward node to the backward nodes that it gives rise to. Export
    itself keeps only the lines of ``forward`` methods, not those of functions that they call.
    """
    from torch.fx import traceback

    with traceback.preserve_node_meta():
        yield lambda name: traceback.annotate({ORIGIN: name})


@contextmanager
def bare_graphs() -> Iterator[None]:
    """Within it, traced graphs are written as Python only once they are called (``_use_lazy_graph_module``), and their nodes do not keep
    the stack under which they were traced (``fx.config.do_not_emit_stack_traces``). Both together take a tenth of a trace and more."""
    from torch.fx import config
    from torch.fx._lazy_graph_module import _use_lazy_graph_module

    has_setting = hasattr(config, "do_not_emit_stack_traces")  # torch 2.11 has not
    before = has_setting and config.do_not_emit_stack_traces
    if has_setting:
        config.do_not_emit_stack_traces = True
    try:
        with _use_lazy_graph_module(True):
            yield
    finally:
        if has_setting:
            config.do_not_emit_stack_traces = before


def origin_of(node: torch.fx.Node) -> str:
    """The mark under which a node was traced, empty when it has none (sums of gradients)."""
    return (node.meta.get("custom") or {}).get(ORIGIN, "")


def traced_as(tensor: torch.Tensor) -> torch.fx.Node | None:
    """The node that stands for a tensor in the graph which is being traced, None where nothing is."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot

    mode = get_proxy_mode()
    slot = None if mode is None else get_proxy_slot(tensor, mode.tracer, None)
    return None if slot is None else slot.proxy.node


def traced_in_backward(node: torch.fx.Node) -> bool:
    """Whether a joint graph's node was traced while autograd ran."""
    return node.meta.get("partitioner_tag") == "is_backward"


def trace_joint(
    module: nn.Module, inputs: tuple[torch.Tensor, ...], decompositions: Mapping[Any, Callable[..., Any]]
) -> torch.fx.GraphModule:
    """The functional graph of ``module(*inputs)`` and, where an input requires grad, of its backward.

    ``aot_export_joint_with_descriptors`` with no decompositions but those given, which take effect below autograd; what they stand for
    has no effects beside its results, so that no tokens order it. Placeholders and the output carry descriptors in ``meta["desc"]``,
    which ``role`` reads.
    """
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors

    with ExitStack() as stack:
        for operator in decompositions:
            stack.enter_context(_without_effects(operator))
        joint = aot_export_joint_with_descriptors(
            stack, module, inputs, decompositions=dict(decompositions), _disable_torch_fn_metadata_mode=True
        )
        return joint.graph_module


@contextmanager
def _without_effects(operator: Any) -> Iterator[None]:
    held = torch._library.simple_registry.singleton.find(operator.name()).effect
    before, held._effect = held._effect, None
    try:
        yield
    finally:
        held._effect = before


def role(descriptor: Any) -> tuple[str, int]:
    """What a placeholder or output of ``trace_joint`` is, with the flat position of the input or output it belongs to.

    One of ``input``, ``tangent``, ``output``, ``gradient``, ``mutation`` (an input's new value), ``mutation gradient`` (the gradient of
    that value, where autograd goes on through it), ``other``.
    """
    from torch._functorch._aot_autograd import descriptors as d

    match descriptor:
        case d.PlainAOTInput(idx):
            return "input", idx
        case d.TangentAOTInput(d.PlainAOTOutput(idx)):
            return "tangent", idx
        case d.PlainAOTOutput(idx):
            return "output", idx
        case d.TangentAOTInput(d.InputMutationAOTOutput(d.PlainAOTInput(idx))):
            return "mutation gradient", idx
        case d.GradAOTOutput(d.PlainAOTInput(idx)):
            return "gradient", idx
        case d.InputMutationAOTOutput(d.PlainAOTInput(idx)):
            return "mutation", idx
        case _:
            return "other", -1


@contextmanager
def autocast_on_cpu() -> Iterator[None]:
    """Within it, ``torch.autocast`` of any device is that of the CPU, in the dtype it has on its own: what is traced lies on the CPU, and a
    machine without that device would switch it off."""
    plain = torch.amp.autocast_mode.autocast.__init__

    def init(self: Any, device_type: str, dtype: Any = None, enabled: bool = True, cache_enabled: bool | None = None) -> None:
        plain(self, "cpu", torch.get_autocast_dtype(device_type) if dtype is None else dtype, enabled, cache_enabled)

    torch.amp.autocast_mode.autocast.__init__ = init
    try:
        yield
    finally:
        torch.amp.autocast_mode.autocast.__init__ = plain


@contextmanager
def replaced_on_cpu(operator: str, function: Callable[..., Any]) -> Iterator[None]:
    """Within it, the ATen operator (``dropout``) is ``function`` on CPU tensors wherever it is called from, C++ included."""
    library = torch.library.Library("aten", "IMPL")
    try:
        for key in ("CPU", "AutogradCPU"):
            library.impl(operator, function, key)
        yield
    finally:
        library._destroy()


@contextmanager
def real_tensors() -> Iterator[None]:
    """Within it, operators compute although an export or a fake mode is running."""
    from torch.utils._python_dispatch import _disable_current_modes

    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


def replaced_operators(functions: Mapping[Any, Callable[..., Any]]) -> Any:
    """A context in which the operators among the keys run their function instead, below autograd."""

    class Replacing(dispatch_mode()):  # type: ignore[misc]
        def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return functions.get(operator, operator)(*args, **(kwargs or {}))

    return Replacing()


def trace_operators(function: Callable[..., Any], inputs: list[torch.Tensor], bodies: Any) -> torch.fx.GraphModule:
    """The operators that ``function(*inputs)`` dispatches on fake tensors, as a graph; ``bodies`` replaces operators by functions.

    ``make_fx``: functional collectives are traced like any other operator.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(function, decomposition_table=bodies)(*inputs)


@contextmanager
def answered_as_not_exported() -> Iterator[None]:
    """Within it, code that is not torch's finds itself neither exported nor compiled (``torch.compiler.is_exporting`` and its like)."""
    import torch.compiler

    def answered(plain: Callable[[], bool]) -> Callable[[], bool]:
        def asked() -> bool:
            asking = str(sys._getframe(1).f_globals.get("__name__", ""))
            return plain() if asking.partition(".")[0] == "torch" else False

        return asked

    names = ("is_compiling", "is_dynamo_compiling", "is_exporting")
    kept = {name: getattr(torch.compiler, name) for name in names if hasattr(torch.compiler, name)}
    try:
        for name, plain in kept.items():
            setattr(torch.compiler, name, answered(plain))
        yield
    finally:
        for name, plain in kept.items():
            setattr(torch.compiler, name, plain)
