"""The only file that touches private torch names. Each is named once, with what it is for.

A torch release that moves one of them breaks ``tests/test_torch_compat.py`` by name, not a user's capture. Imports are
inside the functions, so that importing this module costs only torch itself.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import cache, partial
from threading import get_ident
from types import MethodType
from typing import Any

import torch
from torch import nn

from autopar.errors import UsageError

TESTED = ("2.13", "2.14", "2.15")
"""The minor versions of torch that the tests pass with: all of them with the first, which is installed; the quick ones with the others
(``.ci/torch-versions``)."""


class UntestedTorchWarning(UserWarning):
    """A torch that autopar was not tested with: the private names used here may have changed."""


@cache
def check_tested() -> None:
    """Says once, at the first capture or compile, that this torch is none of ``TESTED``."""
    if ".".join(torch.__version__.split(".")[:2]) not in TESTED:
        warnings.warn(
            f"autopar was tested with torch {' and '.join(TESTED)}, this is torch {torch.__version__}: what fails may be due to that, and "
            "autopar verify shows whether a plan computes what the model does",
            UntestedTorchWarning,
            stacklevel=3,
        )


# --- fake tensors -----------------------------------------------------------------------------------------------------


def fake_mode() -> Any:
    """A mode in which tensors have shape, dtype and device but no memory (``FakeTensorMode``); what export traces with.

    Real tensors met on the way (constants in the model's code) are converted rather than refused.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    _start_autograd()
    return FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv(), static_shapes=True)


@cache
def _start_autograd() -> None:
    """A first backward pass, outside of fake modes, where there is no GPU.

    Autograd counts devices once, at its first backward pass. Under a fake mode a torch built for CUDA counts GPUs that are not there, and
    starts threads for them: no process that is forked later can differentiate.
    """
    if not torch.cuda.is_available():
        with torch.enable_grad():
            torch.ones((), requires_grad=True).backward()


def adaptive_result(output: torch.Tensor, loss: torch.Tensor) -> Any:
    """What ``nn.AdaptiveLogSoftmaxWithLoss`` returns, a named tuple that torch does not export."""
    from torch.nn.modules.adaptive import _ASMoutput

    return _ASMoutput(output, loss)


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no memory because it belongs to a fake mode."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)


# --- trees of arguments -----------------------------------------------------------------------------------------------


def flatten_with_paths(tree: Any) -> tuple[list[tuple[tuple[str, ...], Any]], Any]:
    """Leaves of nested containers with their paths (dict keys, attribute names and indices as text), and the structure.

    ``torch.utils._pytree``: the registry of containers that export itself uses, third-party output classes included.
    """
    from torch.utils import _pytree

    leaves, structure = _pytree.tree_flatten_with_path(tree)
    return [(tuple(_step(key) for key in path), leaf) for path, leaf in leaves], structure


def _step(key: Any) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def unflatten(leaves: list[Any], structure: Any) -> Any:
    """The containers of ``flatten_with_paths`` around other leaves."""
    from torch.utils import _pytree

    return _pytree.tree_unflatten(leaves, structure)


def map_tensors(function: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    """The same containers with ``function`` applied to every tensor."""
    return map_only(torch.Tensor, function, tree)


def map_only(kind: type, function: Callable[[Any], Any], tree: Any) -> Any:
    """The same containers with ``function`` applied to every leaf of a kind."""
    from torch.utils import _pytree

    return _pytree.tree_map_only(kind, function, tree)


def is_known_container(value: Any) -> bool:
    """Whether export sees what is inside the value: its class is registered with ``torch.utils._pytree``, with names for its items."""
    from torch.utils import _pytree

    known = _pytree.SUPPORTED_NODES.get(_pytree._get_node_type(value))
    return known is not None and known.flatten_with_keys_fn is not None


def children_of(value: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """The items of a known container, and what puts others in their place."""
    from torch.utils import _pytree

    items, structure = _pytree.tree_flatten(value, is_leaf=lambda item: item is not value)
    return items, lambda others: _pytree.tree_unflatten(others, structure)


# --- tensors of one's own ---------------------------------------------------------------------------------------------

NO_TORCH_FUNCTION = torch._C._disabled_torch_function_impl
"""``__torch_function__`` of a tensor class whose results are not of the class."""


def wrapper_of(cls: type[torch.Tensor], like: torch.Tensor) -> Any:
    """A tensor of the class with the shape, strides, dtype and device of another and no memory: the class's ``__torch_dispatch__`` is
    asked for everything else (``_make_wrapper_subclass``)."""
    return torch.Tensor._make_wrapper_subclass(cls, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device)


# --- operators --------------------------------------------------------------------------------------------------------


def is_operator(target: Any) -> bool:
    """Whether a node's target is a torch operator (``torch._ops.OpOverload``), as against a Python function."""
    return isinstance(target, torch._ops.OpOverload)


def runs_a_graph(target: Any) -> bool:
    """Whether a node's target is an operator that runs graphs of its own (``torch.cond``, regions under ``no_grad``)."""
    return isinstance(target, torch._ops.HigherOrderOperator)


def schema_of(target: Any) -> Any:
    """An operator's schema: ``name``, ``arguments`` and ``returns``, ``is_mutable``."""
    return target._schema


def draws(target: Any) -> bool:
    """Whether an operator takes numbers from torch's own random generators."""
    return torch.Tag.nondeterministic_seeded in target.tags


# --- tracing ----------------------------------------------------------------------------------------------------------

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


def origin_of(node: torch.fx.Node) -> str:
    """The mark under which a node was traced, empty when it has none (sums of gradients)."""
    return (node.meta.get("custom") or {}).get(ORIGIN, "")


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


@cache
def start_autograd() -> None:
    """Autograd's first backward in this process, of nothing: the threads that it starts then are one for each device that there is.

    Where the first is that of a trace, builds for CUDA (2.15) start threads on machines without a GPU too, and forked ranks, which do not
    have them, refuse to go backward.
    """
    with torch.enable_grad():
        torch.zeros((), requires_grad=True).clone().backward()


# --- calls to autograd from Python ------------------------------------------------------------------------------------


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


@contextmanager
def noticed_checkpoints(noticed: Callable[[], None]) -> Iterator[None]:
    """Within it, ``noticed`` is called for every call of ``torch.utils.checkpoint`` that is not reentrant.

    ``_checkpoint_without_reentrant_generator``, from torch 2.15 on with ``_impl`` behind it: what the public function, under whichever name
    it was imported, comes to.
    """
    from torch.utils import checkpoint

    name = "_checkpoint_without_reentrant_generator"
    name = f"{name}_impl" if hasattr(checkpoint, f"{name}_impl") else name
    plain = getattr(checkpoint, name)

    def watched(*args: Any, **kwargs: Any) -> Any:
        noticed()
        return plain(*args, **kwargs)

    setattr(checkpoint, name, watched)
    try:
        yield
    finally:
        setattr(checkpoint, name, plain)


_COMMUNICATING = (
    "_allgather_base", "_reduce_scatter_base", "all_gather_single", "all_gather_single_coalesced", "all_to_all_single", "allgather",
    "allgather_coalesced", "allgather_into_tensor_coalesced", "allreduce", "allreduce_coalesced", "alltoall", "alltoall_base", "barrier",
    "broadcast", "gather", "monitored_barrier", "recv", "recv_anysource", "reduce", "reduce_scatter", "reduce_scatter_single",
    "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced", "scatter", "send",
)  # fmt: skip


@contextmanager
def refused_collectives(refuse: Callable[[str], None]) -> Iterator[None]:
    """Within it, ``refuse`` is called with the name of each collective that this thread asks a process group for, before it runs.

    The methods of ``ProcessGroup``: what torch.distributed's functions, under whichever name they were imported, come to.
    """
    with _watched_group(_COMMUNICATING, lambda name: refuse(name.strip("_"))):
        yield


@contextmanager
def refused_ranks(refuse: Callable[[], None]) -> Iterator[None]:
    """Within it, ``refuse`` is called where code of this thread that is not torch's asks a process group or a mesh which rank it is.

    torch asks for itself too, in collectives and for its logs.
    """

    def asked(name: str) -> None:
        if _is_asked_by_users(_RANKS_OF):
            refuse()

    with _watched_group(("rank",), asked):
        yield


def _is_asked_by_users(through: Container[str]) -> bool:
    """Whether the function that called the caller was called by code that is not torch's, if by way of these functions of it."""
    frame: Any = sys._getframe(3)
    while frame is not None and frame.f_code.co_name in through and frame.f_globals["__name__"].startswith("torch.distributed."):
        frame = frame.f_back
    return frame is None or frame.f_globals.get("__name__", "").partition(".")[0] != "torch"


@contextmanager
def answered_as_one_device() -> Iterator[None]:
    """Within it, code of this thread that is not torch's finds one rank: no group is initialized, and groups and meshes have size 1.

    So is what ``torchrun`` puts into the environment: sizes are 1, and which rank this is, is not there.
    """
    from torch.distributed import DeviceMesh, ProcessGroup, distributed_c10d

    thread, world = get_ident(), distributed_c10d._WorldMeta

    def answered(plain: Callable[..., Any], answer: Callable[..., Any]) -> Callable[..., Any]:
        def method(*args: Any, **kwargs: Any) -> Any:
            found = plain(*args, **kwargs)
            return answer(found) if get_ident() == thread and _is_asked_by_users(_SIZES_OF) else found

        return method

    def default_group(cls: Any) -> Any:
        asks = sys._getframe(1).f_code is distributed_c10d.is_initialized.__code__ and get_ident() == thread
        return None if asks and _is_asked_by_users(()) else distributed_c10d._world.default_pg

    replaced: list[tuple[Any, str, Any]] = [
        (ProcessGroup, "size", answered(ProcessGroup.size, lambda size: 1)),
        (DeviceMesh, "size", answered(DeviceMesh.size, lambda size: 1)),
        (DeviceMesh, "shape", property(answered(DeviceMesh.shape.fget, lambda shape: (1,) * len(shape)))),
        (world, "WORLD", property(default_group, world.WORLD.fset)),
    ]
    kept = [(owner, name, vars(owner)[name]) for owner, name, _ in replaced]
    variables = {name: os.environ[name] for name in _LAUNCHED if name in os.environ}
    try:
        for owner, name, method in replaced:
            setattr(owner, name, method)
        for name in variables:
            if name.endswith("SIZE"):
                os.environ[name] = "1"
            else:
                del os.environ[name]
        yield
    finally:
        for owner, name, method in kept:
            setattr(owner, name, method)
        os.environ.update(variables)


_SIZES_OF = ("get_world_size", "_get_group_size")
"""The functions of torch.distributed that answer with what ``ProcessGroup.size`` says."""
_LAUNCHED = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK")
"""Environment variables of torchrun."""


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


_RANKS_OF = ("get_rank", "get_local_rank", "get_group_rank")
"""The functions and methods of torch.distributed that answer with what ``ProcessGroup.rank`` says."""


@contextmanager
def _watched_group(names: Iterable[str], told: Callable[[str], None]) -> Iterator[None]:
    """Within it, ``told`` hears of each call by this thread of these methods of ``ProcessGroup``, by name, before it is made.

    Versions of torch differ in which of them there are.
    """
    from torch.distributed import ProcessGroup

    thread = get_ident()

    def watched(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        def method(*args: Any, **kwargs: Any) -> Any:
            if get_ident() == thread:
                told(name)
            return plain(*args, **kwargs)

        return method

    own = vars(ProcessGroup)  # as they stand in the class: they bind to their group there
    kept = {name: own[name] for name in names if name in own}
    for name in kept:
        setattr(ProcessGroup, name, watched(name, getattr(ProcessGroup, name)))
    try:
        yield
    finally:
        for name, plain in kept.items():
            setattr(ProcessGroup, name, plain)


# --- runtime: DTensor placements, collectives on process groups, the running backward ----------------------------------


def strided_shard(dim: int, split_factor: int) -> Any:
    """DTensor's placement of a dim that ``split_factor`` blocks of later mesh axes have already cut (``_StridedShard``)."""
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard(dim, split_factor=split_factor)


def split_factor_of(placement: Any) -> int | None:
    """1 for a plain shard, the split factor for a strided one, None for anything else."""
    from torch.distributed.tensor.placement_types import Shard, _StridedShard

    if isinstance(placement, _StridedShard):
        return placement.split_factor
    return 1 if isinstance(placement, Shard) else None


Chunk = tuple[tuple[int, ...], torch.Tensor]
"""Offsets in a whole tensor, and what lies there."""


def has_blocks(tensor: Any) -> bool:
    """Whether a DTensor may hold more than one part of a dim: it has a strided shard."""
    return any((split_factor_of(placement) or 1) > 1 for placement in tensor.placements)


@cache
def checkpoint_in_chunks(chunks: Callable[[Any], list[Chunk] | None]) -> None:
    """Lets checkpoints store a DTensor as several parts of a rank (DTensor's side of ``_Checkpointable``, which knows one part a rank).

    Args:
        chunks: the parts that this rank holds; None where torch's own way does.
    """
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
    from torch.distributed.tensor import DTensor

    kept = {name: vars(DTensor)[name] for name in ("__create_write_items__", "__create_chunk_list__", "__get_tensor_shard__")}

    def stored(chunk: Chunk) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(offsets=torch.Size(chunk[0]), sizes=chunk[1].size())

    def write_items(self: Any, name: str, value: Any) -> Any:
        found = chunks(self)
        if found is None:
            return kept["__create_write_items__"](self, name, value)
        properties = TensorProperties.create_from_tensor(self.to_local())
        return [
            WriteItem(
                index=MetadataIndex(name, torch.Size(chunk[0])), type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=stored(chunk), properties=properties, size=self.size()),
            )
            for chunk in found
        ]  # fmt: skip

    def chunk_list(self: Any) -> Any:
        found = chunks(self)
        return kept["__create_chunk_list__"](self) if found is None else list(map(stored, found))

    def shard(self: Any, index: Any) -> Any:
        found = chunks(self)
        if found is None or index.offset is None:
            return kept["__get_tensor_shard__"](self, index)
        return dict(found)[tuple(index.offset)]

    for name, method in (("__create_write_items__", write_items), ("__create_chunk_list__", chunk_list), ("__get_tensor_shard__", shard)):
        setattr(DTensor, name, method)
    refuse_several_parts()


@cache
def refuse_several_parts() -> None:
    """A file of safetensors holds one part of a tensor for each rank; of several parts ``HuggingFaceStorageWriter`` would keep the last."""
    from torch.distributed.checkpoint import HuggingFaceStorageWriter

    usual: Any = HuggingFaceStorageWriter.write_data

    def write_data(self: Any, plan: Any, planner: Any) -> Any:
        names = [item.index.fqn for item in plan.items]
        if several := sorted({name for name in names if names.count(name) > 1}):
            message = f"{several[0]} lies in blocks, so that a rank holds several parts of it; safetensors keep one part for each rank"
            hint = "save get_model_state_dict(module, options=StateDictOptions(full_state_dict=True)), or by dcp.save(checkpoint_id=...)"
            raise UsageError(message, hint)
        return usual(self, plan, planner)

    HuggingFaceStorageWriter.write_data = write_data


def dtensor_like(local: torch.Tensor, like: Any) -> Any:
    """The DTensor of which this rank holds ``local``, placed as ``like`` is, of its shape and dtype.

    The public way derives placements and strides anew each time, which for a model's gradients takes milliseconds a step; ``__init__`` does
    nothing, behind a wrapper that takes as long as all the rest.
    """
    kind = _dtensor_class()
    return kind.__new__(kind, local, like._spec, requires_grad=False)


@cache
def _dtensor_class() -> Any:
    """Imported once: the import of a thing that is there already takes a fifth of the time that making a DTensor does."""
    from torch.distributed.tensor import DTensor

    return DTensor


def local_of(tensor: Any) -> torch.Tensor:
    """The part of a DTensor that this rank holds, as it is kept: outside autograd, and without the view that ``to_local`` makes."""
    return tensor._local_tensor


def spec_of(tensor: Any) -> Any:
    """A DTensor's mesh, placements, shape and dtype: the same object as long as none of them changes. None of another tensor."""
    return getattr(tensor, "_spec", None)


def lie_as_before(tensors: Iterable[tuple[Any, Any, torch.Tensor]]) -> bool:
    """Whether each DTensor has the spec and the part that it is given with."""
    return all(tensor._spec is spec and tensor._local_tensor is local for tensor, spec, local in tensors)


def teach_dtensors() -> None:
    """What DTensors of weights and gradients are to do beside what torch's do."""
    update_local_parts()
    detach_local_parts()
    reduce_where_asked()
    reduce_beside_numbers()
    reduce_parameters()
    write_where_masked()
    write_through_views()
    pair_complex()
    reduce_odd_parts()
    choose_rules()
    assign_data()
    place_states()
    format_numbers()
    make_orthogonal()
    gather_unequal_parts()
    take_plain_in_backward()
    reduce_looked_up()
    convolve_in_whole()
    reshape_in_place()
    shard_beside_blocks()


@cache
def gather_unequal_parts() -> None:
    """Parts of a dim that two axes split unequally are gathered one axis after the other (``_optimize_transform_infos``).

    Where the user's mesh has a flattened one, torch gathers over both axes at once, as if ``torch.chunk`` had cut the dim once: 13 rows on
    2x2 lie as 4, 3, 3, 3; it takes them for 4, 4, 4, 1, and the whole is corrupt without a word.
    """
    from torch.distributed.tensor import _redistribute

    merged = _redistribute._optimize_transform_infos

    def is_unequal(infos: list[Any], mesh: Any) -> bool:
        extents: dict[int, int] = {}
        counts: dict[int, int] = {}
        for info in infos:
            if info._comm_type_key() == "all_gather":
                dim = info.src_dst_placements[0].dim
                extents[dim] = max(extents.get(dim, 0), info.logical_shape[dim])
                counts[dim] = counts.get(dim, 1) * mesh.size(info.mesh_dim)
        return any(extents[dim] % count for dim, count in counts.items())

    def optimize(infos: list[Any], mesh: Any, *ends: Any) -> list[Any]:
        is_strided = any((split_factor_of(placement) or 1) > 1 for placements in ends for placement in placements)
        return infos if is_strided or is_unequal(infos, mesh) else merged(infos, mesh, *ends)

    _redistribute._optimize_transform_infos = optimize


PartOf = Callable[[torch.Tensor, Iterable[Any], Any], torch.Tensor | None]
"""From a whole tensor, placements and a mesh to what this rank holds; None where the placements say no layout of ours."""


@cache
def lay_by_parts(part_of: PartOf) -> None:
    """Lets DTensors be cut as ``part_of`` cuts where torch's own way is wrong for strided shards (``S10``, weights in blocks).

    - A full state dict that one rank reads and sends (``_distribute_tensors``): torch takes one contiguous box for each rank.
    - Redistribution from and into such placements (``redistribute_local_tensor``): torch fails on some ranks, while others wait, or takes
      other rows.
    """
    from torch.distributed import _state_dict_utils
    from torch.distributed.tensor import Replicate, _api, _dispatch, _dtensor_spec, _redistribute

    def distribute(local: dict[str, Any], keys: list[str], device: torch.device, pg: Any = None) -> None:
        for key in keys:
            held = local.get(key)
            if held is None or isinstance(held, torch.Tensor):
                continue
            tensor, whole = held
            part = part_of(whole, tensor.placements, tensor.device_mesh)
            if part is None:
                message = f"the state dict holds {key} whole, whose DTensor lies as {list(tensor.placements)}: its parts are not known"
                raise UsageError(message, "load it by torch.distributed.checkpoint, or distribute it with Shard placements")
            if tensor.is_meta:
                local[key] = dtensor_like(part.detach().clone(), tensor)
            else:
                tensor.to_local().copy_(part)
                local[key] = tensor

    usual = _redistribute.redistribute_local_tensor

    def redistribute(local: torch.Tensor, current: Any, target: Any, **named: Any) -> torch.Tensor:
        is_plain = not any((split_factor_of(one) or 1) > 1 for one in (*current.placements, *target.placements))
        if is_plain or current.placements == target.placements or all(one.is_replicate() for one in target.placements):
            return usual(local, current, target, **named)
        everywhere = _dtensor_spec.DTensorSpec(current.mesh, (Replicate(),) * current.mesh.ndim, tensor_meta=current.tensor_meta)
        whole = usual(local, current, everywhere)
        part = part_of(whole, target.placements, target.mesh)
        return usual(whole, everywhere, target, **named) if part is None else part.contiguous()

    _state_dict_utils._distribute_tensors = distribute
    for module in (_redistribute, _dispatch, _api):
        module.redistribute_local_tensor = redistribute


@cache
def shard_beside_blocks() -> None:
    """``fully_shard`` cuts a parameter that is in blocks along another dim; one without such a dim, a bias, is whole on the plan's axes.

    FSDP cuts the rows that a rank has (``FSDPParam``), and says of them that they are cut once more: of rows in blocks no DTensor can say
    which those are, and its whole has other rows. The compiled module takes such a bias whole.
    """
    from torch.distributed.fsdp._fully_shard import _fsdp_param
    from torch.distributed.tensor import DTensor, Replicate, Shard

    usual = _fsdp_param.FSDPParam._init_sharded_param

    def init(self: Any, param: Any, device: Any, placement_of: Any, mesh_info: Any, *rest: Any) -> None:
        count = getattr(mesh_info, "shard_mesh_size", 1)
        given: Any = placement_of(param) if callable(placement_of) else None
        placement = getattr(given, "placement", given)
        dim = 0 if placement is None else placement.dim % param.dim()
        if not isinstance(param, DTensor) or count == 1 or not (strided := strided_dims(param)) & {dim}:
            return usual(self, param, device, placement_of, mesh_info, *rest)
        free = [other for other in range(param.dim()) if other not in strided and local_of(param).shape[other] % count == 0]
        if not free:
            param = nn.Parameter(param.detach().redistribute(placements=[Replicate()] * len(param.placements)), param.requires_grad)
        shard = Shard(free[0] if free else dim)
        chosen = replace(given, placement=shard) if hasattr(given, "placement") else shard
        return usual(self, param, device, lambda _: chosen, mesh_info, *rest)

    def strided_dims(param: Any) -> set[int]:
        return {placement.dim for placement in param.placements if (split_factor_of(placement) or 1) > 1}

    _fsdp_param.FSDPParam._init_sharded_param = init


@cache
def update_local_parts() -> None:
    """Lets fused optimizers update what this rank holds of DTensors that lie alike (``_custom_op_handlers`` of DTensor's dispatcher).

    That is what the dispatcher would do, but it derives and wraps every result first, which for a model's parameters takes a millisecond
    a step and more. What does not lie alike, and what is still a sum over ranks, is left to it.
    """
    from torch.distributed.tensor import DTensor

    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers

    def local(item: Any) -> Any:
        if isinstance(item, (list, tuple)):
            return [local(entry) for entry in item]
        return item._local_tensor if isinstance(item, DTensor) else item

    def lie_alike(lists: Iterable[Any]) -> bool:
        for tensors in zip(*(item for item in lists if item), strict=True):
            specs = [tensor._spec for tensor in tensors if isinstance(tensor, DTensor)]
            if any(tensor.dim() for tensor in tensors if not isinstance(tensor, DTensor)) and specs:
                return False
            if any(spec is not specs[0] and (spec.placements != specs[0].placements or spec.mesh != specs[0].mesh) for spec in specs):
                return False
            if any(placement.is_partial() for placement in (specs[0].placements if specs else ())):
                return False
        return True

    def update(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if lie_alike(item for item in args if isinstance(item, (list, tuple))):
            operator(*local(args), **{name: local(item) for name, item in kwargs.items()})
            return None
        return as_torch_does(operator, args, kwargs)

    for name in ("_fused_adamw_", "_fused_adam_", "_fused_sgd_", "_fused_adagrad_", "_foreach_copy_"):
        handlers.setdefault(getattr(torch.ops.aten, name).default, update)


@cache
def detach_local_parts() -> None:
    """``detach`` of a DTensor detaches its part (``_custom_op_handlers`` of DTensor's dispatcher).

    Autograd detaches each gradient that it stores. The dispatcher takes twice as long: half a millisecond more a step for 100 weights.
    Under ``torch.compile`` of a whole step, autograd calls this too: Dynamo is told to pass it over.
    """
    from torch._dynamo.eval_frame import skip_code
    from torch.distributed.tensor import DTensor

    def detach(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return dtensor_like(args[0]._local_tensor.detach(), args[0])

    for function in (detach, dtensor_like):
        skip_code(function.__code__)
    DTensor._op_dispatcher._custom_op_handlers.setdefault(torch.ops.aten.detach.default, detach)


@cache
def reduce_where_asked() -> None:
    """Numbers read from DTensors that are still to be reduced over ranks, and such DTensors changed in place, are reduced first.

    Of what is not reduced DTensor's dispatcher gives each rank its own number, without a word: ``parameter.norm().item()`` in an optimizer
    takes the ranks apart. A square in place it refuses, which torch's Adafactor makes of norms.
    """

    def reduce(args: tuple[Any, ...]) -> None:
        for tensor in leaves_of(args):
            reduce_partial(tensor)

    before(reduce, torch.ops.aten._local_scalar_dense.default, torch.ops.aten.pow_.Scalar, torch.ops.aten._foreach_mul_.List)


def before(prepare: Callable[[tuple[Any, ...]], None], *operators: Any) -> None:
    """Has these operators of DTensors ``prepare`` their arguments; torch does the rest (``_custom_op_handlers`` of its dispatcher)."""
    from torch.distributed.tensor import DTensor

    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers

    def run(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        prepare(args)
        return as_torch_does(operator, args, kwargs)

    for operator in operators:
        handlers.setdefault(operator, run)


def as_torch_does(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What DTensor's dispatcher does of an operator that has a handler, without it."""
    from torch.distributed.tensor import DTensor

    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    handler = handlers.pop(operator)
    try:
        return operator(*args, **kwargs)
    finally:
        handlers[operator] = handler


def reduce_partial(tensor: Any) -> None:
    """Reduces a DTensor over ranks where it is still to be, in its place."""
    from torch.distributed.tensor import DTensor, Replicate

    if isinstance(tensor, DTensor) and any(placement.is_partial() for placement in tensor.placements):
        whole = tensor.redistribute(placements=[Replicate() if item.is_partial() else item for item in tensor.placements])
        tensor._local_tensor, tensor._spec = whole._local_tensor, whole._spec


@cache
def reduce_beside_numbers() -> None:
    """A number is added to what DTensors come to over ranks.

    DTensor's dispatcher takes a number for a tensor without dims of all ranks, when it looks up how it did the same before: where that was
    such a tensor, of which each rank had added its share, each adds all of the number (counts of zeros, and whatever is float64).
    """

    def reduce(args: tuple[Any, ...]) -> None:
        if not all(isinstance(item, torch.Tensor) for item in args):
            for tensor in args:
                reduce_partial(tensor)

    before(reduce, torch.ops.aten.add.Tensor, torch.ops.aten.sub.Tensor)  # in place, gradients are added up with no time to lose


@cache
def reduce_parameters() -> None:
    """A DTensor that becomes a parameter is reduced over ranks first, to be trained and saved: ``weight_norm`` makes norms so."""
    from torch.distributed.tensor import DTensor, Replicate

    def reduced(module: nn.Module, name: str, parameter: Any) -> Any:
        if not isinstance(parameter, DTensor) or not any(placement.is_partial() for placement in parameter.placements):
            return None
        placements = [Replicate() if placement.is_partial() else placement for placement in parameter.placements]
        return nn.Parameter(parameter.detach().redistribute(placements=placements), parameter.requires_grad)

    nn.modules.module.register_module_parameter_registration_hook(reduced)


@cache
def make_orthogonal() -> None:
    """``parametrizations.orthogonal`` of a DTensor makes the whole matrix on every rank: DTensor has none of the factorisations for it."""
    from torch.distributed.tensor import DTensor, Replicate
    from torch.nn.utils import parametrizations

    def whole(method: Callable[..., Any]) -> Callable[..., Any]:
        def made(self: Any, matrix: Any) -> Any:
            if not isinstance(matrix, DTensor):
                return method(self, matrix)
            mesh, held = matrix.device_mesh, self._buffers
            replicated = [Replicate()] * mesh.ndim
            if isinstance(held.get("base"), DTensor):
                held["base"] = held["base"].to_local()
            result = method(self, matrix.full_tensor())
            if held.get("base") is not None:
                held["base"] = DTensor.from_local(held["base"], mesh, replicated, run_check=False)
            return DTensor.from_local(result, mesh, replicated, run_check=False)

        return made

    kind = parametrizations._Orthogonal
    kind.forward, kind.right_inverse = whole(kind.forward), whole(kind.right_inverse)


@cache
def write_where_masked() -> None:
    """``dtensor[mask] = number`` writes into each rank's part where its part of the mask says so, as Rprop does.

    DTensor's dispatcher takes such a mask for whole on every rank, and has no way to cut it (``index_put_``).
    """
    from torch.distributed.tensor import DTensor

    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers

    def write(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensor, (mask, *more), value, *rest = args
        masked = not more and isinstance(mask, DTensor) and mask.dtype == torch.bool and mask.shape == tensor.shape and value.dim() == 0
        if masked and isinstance(tensor, DTensor) and not any(placement.is_partial() for placement in tensor.placements):
            here = mask.redistribute(placements=tensor.placements)._local_tensor
            number = value.full_tensor() if isinstance(value, DTensor) else value
            operator(tensor._local_tensor, [here], number, *rest, **kwargs)
            return tensor
        return as_torch_does(operator, args, kwargs)

    handlers.setdefault(torch.ops.aten.index_put_.default, write)


@cache
def write_through_views() -> None:
    """``dtensor[0].zero_()``, ``dtensor.grad[:5] = 0`` and the like write into the DTensor where the dim is split too, on all ranks alike.

    DTensor's dispatcher gathers what such a view is taken of, and what is written into that is lost, without a word. Here the whole is made
    once more, written into, and cut again.
    """
    from torch.distributed.tensor import DTensor

    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    Taken = tuple[tuple[Any, tuple[Any, ...], dict[str, Any], int | None], ...]

    class View(DTensor):
        """What was taken ``of`` a DTensor whose memory it does not share, and how."""

        of: Any
        taken: Taken

        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return see(func, args, kwargs or {}, lambda: super(View, cls).__torch_dispatch__(func, types, args, kwargs))

        def __deepcopy__(self, memo: dict[int, Any]) -> Any:
            return self.detach().clone()

        def __reduce_ex__(self, protocol: Any) -> Any:
            return self.detach().clone().__reduce_ex__(protocol)

    def see(operator: Any, args: Any, kwargs: dict[str, Any], usual: Callable[[], Any]) -> Any:
        """What an operator makes that reads or writes a view."""
        if written := written_by(operator, args):
            return write(operator, args, kwargs) if written[0] is args[0] else write_each(operator, args, kwargs, written)
        made, first = usual(), args[0] if args else None
        if isinstance(first, View) and any(item.alias_info for item in operator._schema.returns):
            note(made, first.of, first.taken, (operator, args[1:], kwargs))
        return made

    class Seeing(dispatch_mode()):  # type: ignore[misc]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return see(func, args, kwargs or {}, lambda: func(*args, **(kwargs or {})))

    def called(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with Seeing(), torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def assign(self: Any, index: Any, value: Any) -> None:
        with Seeing():
            torch.Tensor.__setitem__(self, index, value)

    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 12):  # it asks no class of DTensors what an operator does
        View.__torch_function__, DTensor.__setitem__ = classmethod(called), assign

    def note(made: Any, of: Any, before: Taken, taken: tuple[Any, tuple[Any, ...], dict[str, Any]]) -> None:
        several = isinstance(made, (list, tuple))
        for index, one in enumerate(made if several else [made]):
            if isinstance(one, DTensor) and one is not of:
                one.__class__ = View
                one.of, one.taken = of, (*before, (*taken, index if several else None))

    def written_by(operator: Any, args: tuple[Any, ...]) -> list[Any]:
        pairs = zip(operator._schema.arguments, args, strict=False)
        given = [one for argument, one in pairs if argument.alias_info and argument.alias_info.is_write]
        return [one for one in leaves_of(given) if isinstance(one, View)]

    @torch.no_grad()
    def write(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        view, of = args[0], args[0].of
        if draws(operator):
            message = f"{operator} draws for a part of a DTensor that lies as {list(of.placements)}: each rank would draw its own"
            raise UsageError(message, "draw for the whole DTensor, before the model is compiled or in its forward")
        whole = of.full_tensor().clone()
        here = whole
        for taken, more, named, index in view.taken:
            here = taken(here, *more, **named)
            here = here if index is None else here[index]
        operator(here, *map_tensors(whole_of, args[1:]), **map_tensors(whole_of, kwargs))
        cut_into(of, whole)
        cut_into(view, here)
        return view

    def write_each(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], written: list[Any]) -> Any:
        """Of lists (``_foreach_mul_``): what the operator makes of copies is written into one after another."""
        copies = {id(one): one.detach().clone() for one in leaves_of((args, kwargs)) if isinstance(one, View)}
        given, named = map_tensors(lambda item: copies.get(id(item), item), (args, kwargs))
        made = operator(*given, **named)
        for one in written:
            write(aten.copy_.default, (one, copies[id(one)]), {})
        return made

    def look(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        del handlers[operator]
        try:
            made = operator(*args, **kwargs)
        except RuntimeError:  # of unequal parts, or along a dim that is split
            if not isinstance(args[0], DTensor):
                raise
            mesh = args[0].device_mesh
            made = map_tensors(lambda item: on_all(item, mesh), operator(args[0].full_tensor(), *args[1:], **kwargs))
        finally:
            handlers[operator] = look
        one = made[0] if isinstance(made, (list, tuple)) else made
        if type(args[0]) is DTensor and storage_key(one._local_tensor) != storage_key(args[0]._local_tensor):
            note(made, args[0], (), (operator, args[1:], kwargs))
        return made

    aten = torch.ops.aten
    for operator in (
        aten.select.int, aten.slice.Tensor, aten.split.Tensor, aten.split_with_sizes.default, aten.diagonal.default, aten.view.default,
        aten._reshape_alias.default, aten.unfold.default, aten.unbind.int, aten.expand.default,
    ):  # fmt: skip
        handlers.setdefault(operator, look)


@cache
def pair_complex() -> None:
    """``view_as_real`` of a DTensor lies as that does: DTensor's dispatcher gathers it where the last dim is in unequal parts, and what
    optimizers of complex weights write there is lost, without a word."""
    from torch.distributed.tensor import DTensor

    def paired(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        (tensor,) = args
        stride = (*(2 * step for step in tensor.stride()), 1)
        local, shape = operator(tensor._local_tensor), (*tensor.shape, 2)
        return DTensor.from_local(local, tensor.device_mesh, tensor.placements, run_check=False, shape=torch.Size(shape), stride=stride)

    DTensor._op_dispatcher._custom_op_handlers.setdefault(torch.ops.aten.view_as_real.default, paired)


def whole_of(tensor: torch.Tensor) -> torch.Tensor:
    """Of a DTensor all of it. Collective."""
    from torch.distributed.tensor import DTensor

    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def cut_into(tensor: Any, whole: torch.Tensor) -> None:
    """Writes into a DTensor what all ranks hold whole."""
    made = on_all(whole, tensor.device_mesh)
    if any(placement.is_partial() for placement in tensor.placements):
        tensor._local_tensor, tensor._spec = made._local_tensor, made._spec
    else:
        tensor._local_tensor.copy_(made.redistribute(placements=tensor.placements)._local_tensor)


def on_all(tensor: torch.Tensor, mesh: Any) -> Any:
    """A DTensor of what all ranks hold whole."""
    from torch.distributed.tensor import DTensor, Replicate

    return DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)


@torch.no_grad()
def in_whole(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs an operator on whole tensors, on all ranks alike; what it writes to is cut again. Numbers that it draws are the first rank's."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._collective_utils import mesh_broadcast

    given = [item for item in leaves_of((args, kwargs)) if isinstance(item, DTensor)]
    wholes = {id(item): item.full_tensor().clone() for item in given}
    taken_args, taken = map_tensors(lambda item: wholes.get(id(item), item), (args, kwargs))
    made, mesh = operator(*taken_args, **taken), given[0].device_mesh
    if draws(operator):
        for tensor in {id(one): one for one in (*leaves_of(made), *wholes.values()) if isinstance(one, torch.Tensor)}.values():
            for axis in range(mesh.ndim):
                mesh_broadcast(tensor, mesh, axis)
    own = {id(wholes[id(item)]): item for item in given}
    for index, argument in enumerate(operator._schema.arguments):
        if argument.alias_info and argument.alias_info.is_write:
            for tensor in leaves_of(args[index] if index < len(args) else kwargs.get(argument.name)):
                if id(tensor) in wholes:  # a plain one, a count of steps, is written to as it is
                    cut_into(tensor, wholes[id(tensor)])
    return map_tensors(lambda item: own[id(item)] if id(item) in own else on_all(item, mesh), made)


@cache
def reduce_odd_parts() -> None:
    """The largest number of a DTensor of which some rank has no part, or several, is looked for in the whole: there torch raises, of no
    parts on that rank alone, and the other ranks wait for it."""
    from torch.distributed.tensor import DTensor

    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers

    def has_empty_part(tensor: Any) -> bool:
        least = list(tensor.shape)
        for placement, size in zip(tensor.placements, tensor.device_mesh.shape, strict=True):
            if placement.is_shard():
                least[placement.dim] -= -(-least[placement.dim] // size) * (size - 1)
        return tensor.numel() > 0 and any(extent <= 0 for extent in least)

    def run(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if any(isinstance(item, DTensor) and (has_blocks(item) or has_empty_part(item)) for item in leaves_of(args)):
            return in_whole(operator, args, kwargs)
        if operator in torchs:
            return torchs[operator](operator, args, kwargs)
        return as_torch_does(operator, args, kwargs)

    aten, torchs = torch.ops.aten, dict(handlers)
    for operator in (
        aten.max.default, aten.min.default, aten.max.dim, aten.min.dim, aten.amax.default, aten.amin.default, aten.aminmax.default,
        aten.argmax.default, aten.argmin.default, aten.linalg_vector_norm.default, aten._foreach_norm.Scalar,
    ):  # fmt: skip
        handlers[operator] = run


@cache
def choose_rules() -> None:
    """Where DTensor's own rule of an operator is none, or is wrong, another way is taken (``_propagate_op_sharding_dispatch_slow_path``).

    DTensor's dispatcher asks for a rule once for each operator, layout and shape, and keeps it; what is computed another way is asked for
    each time. The ways, in this order:

    - What is still to be reduced over ranks is reduced first, but for linear operators of sums: torch adds up parts of norms as if they
      were sums, and takes some elementwise operators for linear.
    - A loss is made of its formula. torch runs it on each rank's part, where a mean is that of the part: gradients are too large by the
      number of ranks, and a rank without a target that counts has none.
    - Views that join or split dims are of the whole where a rank holds several parts of a dim, or parts differ. A sum over no dims is one
      over all.
    - What else has no rule of its own is done with whole tensors, on all ranks alike, and what was written to is cut again. Anomaly
      detection looks for NaN so; weights are normalised so. ``torch.stack([grad.isfinite().all() for ...])`` is made so where some weights
      are whole: what holds on all ranks is a product over them, and DTensor makes no parts of one. Views are left to torch's error, since
      what is written to them would be lost.
    - What draws numbers is done so too where torch has no generator that all ranks share: on CPUs, each rank would draw its own for what
      all hold, and ranks of one seed the same for their parts.
    """
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._random import is_rng_supported_mesh

    dispatcher = DTensor._op_dispatcher
    usual, rules = dispatcher._propagate_op_sharding_dispatch_slow_path, dispatcher.sharding_propagator

    def has_rule(operator: Any) -> bool:
        tables = (rules.op_strategy_funcs, rules.op_single_dim_strategy_funcs, rules.op_to_rules)
        return torch.Tag.pointwise in operator.tags or any(operator in table for table in tables)

    def propagate(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], info: Any, *rest: Any) -> Any:
        tensors = [item for item in leaves_of((args, kwargs)) if isinstance(item, DTensor)]
        if unreduced := [item for item in tensors if must_be_reduced(item, operator, args)]:
            for tensor in unreduced:
                reduce_partial(tensor)
            return operator(*args, **kwargs)
        if operator.namespace == "aten" and (not has_rule(operator) or means_over_parts(operator, args, kwargs)):
            return by_formula(operator, args, kwargs)
        if operator.namespace == "aten" and draws(operator) and not is_rng_supported_mesh(tensors[0].device_mesh):
            return by_whole(operator, args, kwargs)
        regroups = operator in REGROUPING and any(has_blocks(tensor) or has_unequal_parts(tensor) for tensor in tensors)
        if regroups or argument_of(operator, "dim", args, kwargs, None) == []:
            return by_whole(operator, args, kwargs)
        try:
            made = usual(operator, args, kwargs, info, *rest)
            if not any(moved(info, made)) and not replaces(operator, args, made):
                return made
        except (NotImplementedError, RuntimeError):
            if operator.namespace != "aten" or is_view(operator):
                raise
        return in_whole(operator, args, kwargs)

    def by_whole(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if is_view(operator):
            raise NotImplementedError(f"DTensor has no rule for {operator} of such parts")
        return in_whole(operator, args, kwargs)

    def replaces(operator: Any, args: tuple[Any, ...], made: Any) -> bool:
        """Whether what is written in place is to lie otherwise, which torch refuses later on, before 2.13."""
        first, after = operator._schema.arguments[:1], getattr(getattr(made, "output_spec", None), "placements", None)
        written = any(item.alias_info and item.alias_info.is_write for item in first) and operator is not torch.ops.aten.squeeze_.dim
        return written and isinstance(args[0], DTensor) and after is not None and args[0].placements != after

    def moved(info: Any, made: Any) -> Iterator[bool]:
        """Whether an argument is to become a product over ranks, which torch does not know how to make of it."""
        if getattr(made, "needs_redistribute", False):
            for held, wanted in zip(info.flat_args_schema, leaves_of(made.redistribute_schema.args_schema), strict=False):
                pairs = zip(getattr(held, "placements", ()), getattr(wanted, "placements", ()), strict=False)
                yield any(one != other and getattr(other, "reduce_op", "") == "product" for one, other in pairs)

    dispatcher._propagate_op_sharding_dispatch_slow_path = propagate
    torch._C._clear_DTensor_sharding_propagator_cache()  # of what was computed with DTensors before


_aten = torch.ops.aten
ALIKE_FOR_PARTS = {
    _aten.stack.default, _aten.cat.default, _aten.linalg_vector_norm.default, _aten.detach.default, _aten.clone.default,
    _aten.alias.default,
}  # fmt: skip
"""Operators that do the same to parts of a norm or of a maximum as to the whole."""


REGROUPING = {_aten.view.default, _aten._unsafe_view.default, _aten._reshape_alias.default, _aten.reshape.default}
"""Views that join or split dims. torch's rule follows one contiguous part of a dim."""


def _overloads(names: str) -> set[Any]:
    kinds = ("default", "Tensor", "Scalar")
    return {getattr(getattr(_aten, name), kind) for name in names.split() for kind in getattr(_aten, name).overloads() if kind in kinds}


def has_unequal_parts(tensor: Any) -> bool:
    """Whether the ranks' parts of a DTensor differ in size."""
    counts: dict[int, int] = {}
    for placement, size in zip(tensor.placements, tensor.device_mesh.shape, strict=True):
        if split_factor_of(placement) is not None:
            counts[placement.dim] = counts.get(placement.dim, 1) * size
    return any(tensor.shape[dim] % count for dim, count in counts.items())


LINEAR = _overloads("add add_ sub sub_ neg neg_ clone detach alias copy_ _to_copy mul mul_ div div_")
"""Elementwise operators that torch applies to sums that are still to be made over ranks; products and quotients are linear in the first."""
PRODUCTS = _overloads("mul mul_ div div_")


def must_be_reduced(tensor: Any, operator: Any, args: tuple[Any, ...]) -> bool:
    """Whether a DTensor is still to be reduced over ranks, and an operator of its parts would not be one of the whole."""
    from torch.distributed.tensor import Partial

    partial = [placement for placement in tensor.placements if placement.is_partial()]
    if any(type(placement) is not Partial or placement.reduce_op not in ("sum", "avg") for placement in partial):
        return operator not in ALIKE_FOR_PARTS
    linear = operator in LINEAR and not (operator in PRODUCTS and tensor is args[1])
    elementwise = torch.Tag.pointwise in operator.tags or operator.name().startswith("aten::_foreach_")
    return bool(partial) and (elementwise or operator._schema.is_mutable) and not linear


def means_over_parts(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operator is a loss, or a loss's gradient, with a mean in it."""
    return bool(argument_of(operator, "reduction", args, kwargs, 0) == 1)


def is_view(operator: Any) -> bool:
    """Whether what an operator gives shares memory with what it is given."""
    return any(item.alias_info and not item.alias_info.is_write for item in operator._schema.returns)


def argument_of(operator: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], otherwise: Any) -> Any:
    """The argument of an operator's call with this name; ``otherwise`` where the operator has none of it."""
    for index, argument in enumerate(operator._schema.arguments):
        if argument.name == name:
            return args[index] if index < len(args) else kwargs.get(name, argument.default_value)
    return otherwise


def by_formula(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A loss as torch decomposes it, each step of it on DTensors; any other operator on whole tensors.

    Not all that torch decomposes comes to the same values: attention has no normalisers then, which its backward reads.

    Raises:
        NotImplementedError: a view, whose memory would be another's.
    """
    from torch._decomp import decomposition_table

    if torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), torch._C.DispatchKey.CompositeImplicitAutograd):
        return operator.decompose(*args, **kwargs)
    if is_view(operator):
        raise NotImplementedError(f"DTensor has no rule for {operator}")
    formula = decomposition_table.get(operator)
    if formula is not None and argument_of(operator, "reduction", args, kwargs, None) is not None:
        try:
            return formula(*args, **kwargs)
        except Exception:  # it makes plain tensors; what the user got wrong is said below
            pass
    return in_whole(operator, args, kwargs)


@cache
def take_plain_in_backward() -> None:
    """Plain tensors that a derivative's formula makes are taken as the same on all ranks, where DTensor refuses them beside DTensors.

    Autograd makes zeros where nobody read a part of ``x.chunk(2)``, and indices for ``trace``. What a hook or another function of Python
    gives is refused as before: it may differ by rank.
    """
    from torch.distributed.tensor import DTensor

    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers

    def comes_of_formula() -> bool:
        if torch._C._current_graph_task_id() == -1:
            return False
        frame: Any = sys._getframe(2)
        while frame is not None and frame.f_code.co_name != "_engine_run_backward":
            if frame.f_globals["__name__"] != __name__ and frame.f_globals["__name__"].partition(".")[0] != "torch":
                return False
            frame = frame.f_back
        return True

    def run(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = [item for item in leaves_of(args) if isinstance(item, torch.Tensor)]
        if any(not isinstance(item, DTensor) and item.numel() != 1 for item in tensors) and comes_of_formula():
            mesh = next(item.device_mesh for item in tensors if isinstance(item, DTensor))
            args = map_tensors(lambda item: item if isinstance(item, DTensor) else on_all(item, mesh), args)
            return operator(*args, **kwargs)
        return as_torch_does(operator, args, kwargs)

    for operator in (
        _aten.cat.default, _aten.where.self, _aten.index_fill.int_Tensor, _aten.scatter_add.default, _aten.index_put.default,
    ):  # fmt: skip
        handlers.setdefault(operator, run)


@cache
def reduce_looked_up() -> None:
    """Rows that ranks looked up in their parts of a table are reduced at once.

    torch keeps which rows a rank has beside the placement, for the next call too, which fails where the first is not reduced yet. So does a
    look-up along a dim that two axes split, which is done with the whole table.
    """
    from torch.distributed.tensor import DTensor

    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers

    def run(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        table, dim = args[0], argument_of(operator, "dim", args, kwargs, 0)
        placements = table.placements if isinstance(table, DTensor) else ()
        if sum(split_factor_of(placement) is not None and placement.dim == dim % table.dim() for placement in placements) > 1:
            return in_whole(operator, args, kwargs)
        made = as_torch_does(operator, args, kwargs)
        reduce_partial(made)
        return made

    for operator in (_aten.embedding.default, _aten.gather.default, _aten.index_select.default):
        handlers.setdefault(operator, run)


@cache
def convolve_in_whole() -> None:
    """A convolution of split tensors is done in whole: torch's own handler knows one axis along the width, and of other splits it fails on
    some ranks, while others wait."""
    from torch.distributed.tensor import DTensor

    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers

    def run(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = [item for item in leaves_of(args) if isinstance(item, DTensor)]
        if all(placement.is_replicate() for tensor in tensors for placement in tensor.placements):
            return torchs[operator](operator, args, kwargs)
        return in_whole(operator, args, kwargs)

    torchs = {operator: handlers[operator] for operator in (_aten.convolution.default, _aten.convolution_backward.default)}
    handlers.update(dict.fromkeys(torchs, run))


@cache
def reshape_in_place() -> None:
    """``squeeze_`` and its like give a DTensor its new shape: torch changes what lies below, and the DTensor keeps the shape it had."""
    from torch.distributed.tensor import DTensor

    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    plain: Any = torch.Tensor.data

    def run(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensor, made = args[0], views[operator](*args, **kwargs)
        plain.__set__(tensor, made)
        tensor._local_tensor, tensor._spec = made._local_tensor, made._spec
        return tensor

    views = {
        _aten.squeeze_.default: _aten.squeeze.default, _aten.squeeze_.dim: _aten.squeeze.dim, _aten.squeeze_.dims: _aten.squeeze.dims,
        _aten.unsqueeze_.default: _aten.unsqueeze.default, _aten.transpose_.default: _aten.transpose.int, _aten.t_.default: _aten.t.default,
    }  # fmt: skip
    handlers.update(dict.fromkeys(views, run))


@cache
def assign_data() -> None:
    """``dtensor.data = other`` gives it the part of the other, placed as it is; torch leaves it with the part it had, without a word."""
    from torch.distributed.tensor import DTensor

    plain: Any = torch.Tensor.data

    def assign(self: Any, value: Any) -> None:
        if not isinstance(value, DTensor):
            hint = "write into it (copy_), or make a DTensor of what is assigned (distribute_tensor)"
            raise UsageError(f"a plain tensor {list(value.shape)} is assigned to .data of a DTensor, of which each rank holds a part", hint)
        if value.placements != self.placements and value.device_mesh == self.device_mesh:
            value = value.detach().redistribute(placements=self.placements)
        plain.__set__(self, value)
        self._local_tensor, self._spec = value._local_tensor, value._spec

    DTensor.data = property(plain.__get__, assign)


@cache
def place_states() -> None:
    """Whole states that an optimizer loads for a parameter that is a DTensor are cut as the parameter is: one device's checkpoint."""
    from torch.distributed.tensor import DTensor, Replicate
    from torch.optim import Optimizer

    usual: Any = Optimizer._process_value_according_to_param_policy

    def placed(param: torch.Tensor, value: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
        made: torch.Tensor = usual(param, value, *rest, **named)
        if not isinstance(param, DTensor) or isinstance(made, DTensor) or not made.dim() or made.shape != param.shape:
            return made
        mesh = param.device_mesh
        whole: torch.Tensor = DTensor.from_local(made, mesh, [Replicate()] * mesh.ndim, run_check=False)
        return whole.redistribute(placements=param.placements).clone()

    Optimizer._process_value_according_to_param_policy = staticmethod(placed)


@cache
def format_numbers() -> None:
    """``f"{norm:.3f}"`` of what ``clip_grad_norm_`` returns is the number, as of any tensor without dims; so are those of ``tolist()``."""
    from torch.distributed.tensor import DTensor

    plain: Any = DTensor.__format__

    def formatted(self: Any, spec: str) -> str:
        return format(self.item(), spec) if spec and self.dim() == 0 else plain(self, spec)

    DTensor.__format__ = formatted
    DTensor.tolist = lambda self: self.full_tensor().tolist()


def transforms_run() -> bool:
    """Whether a transform of ``torch.func`` (vmap, grad, jvp) or forward-mode differentiation is under way."""
    return torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0


class WithinReplicas:
    """A module that is told when DistributedDataParallel goes around it (``_ddp_params_and_buffers_to_ignore``)."""

    def left_alone(self) -> list[str]:
        """The names of what it is to leave alone. Raises UsageError: it cannot go around this module."""
        raise NotImplementedError

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> list[str]:
        return self.left_alone()


def functional_collectives() -> Any:
    """``torch.ops._c10d_functional``, with its operators registered."""
    import torch.distributed._functional_collectives  # registers them

    return torch.ops._c10d_functional


def timeout_of(group: Any) -> timedelta:
    """How long a process group's collectives wait for other ranks; groups made later do not take it over by themselves."""
    device = group._device_types[0]
    return group._get_backend(device).options._timeout


def copy_each(into: list[torch.Tensor], given: list[torch.Tensor]) -> None:
    """Copies each tensor into the one at its place, in one call (``_foreach_copy_``)."""
    torch._foreach_copy_(into, given)


def assert_later(condition: torch.Tensor, message: str) -> None:
    """Fails on the condition's device when it gets there, without anybody waiting for it; on a CPU at once, with a RuntimeError."""
    torch._assert_async(condition, message)


def new_group(ranks: list[int], **options: Any) -> Any:
    """``torch.distributed.new_group`` of ranks in the order given. Before torch 2.12 it sorts them: ``sorted`` is another there."""
    import inspect

    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    if "sort_ranks" in inspect.signature(dist.new_group).parameters:
        return dist.new_group(ranks, sort_ranks=False, **options)
    distributed_c10d.sorted = list  # a global of the module comes before the built-in function
    try:
        return dist.new_group(ranks, **options)
    finally:
        del distributed_c10d.sorted


def all_gather_single() -> Callable[..., Any]:
    """An all-gather of one tensor into one: ``all_gather_into_tensor`` before torch 2.13."""
    import torch.distributed as dist

    return getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def reduce_scatter_single() -> Callable[..., Any]:
    """A reduce-scatter of one tensor into one: ``reduce_scatter_tensor`` before torch 2.13."""
    import torch.distributed as dist

    return getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def keeps_autograd_graph() -> bool:
    """Whether the backward pass that is running was asked to keep the graph (``retain_graph=True``)."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def dispatch_mode() -> type:
    """``TorchDispatchMode``: a context that sees every operator torch dispatches."""
    from torch.utils._python_dispatch import TorchDispatchMode

    return TorchDispatchMode


def leaves_of(tree: Any) -> list[Any]:
    """The leaves of nested containers, in order."""
    from torch.utils import _pytree

    return _pytree.tree_leaves(tree)


def storage_key(tensor: torch.Tensor) -> int:
    """What identifies a tensor's storage among those alive."""
    return tensor.untyped_storage()._cdata


def shares_memory(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether one is a view of the other, or both are of a third; also while they are traced, where storages are not to be looked at."""
    return torch._C._is_alias_of(tensor, other)


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


def hooks_of_copy(hooks: Mapping[Any, Any], exchanged: Callable[[Any], Any]) -> OrderedDict[Any, Any]:
    """A module's hooks of one kind for its copy: those that are told the module (``_WrappedHook``) are told the copy, others are
    ``exchanged`` as well, since they may be methods of it."""
    from torch.nn.modules.module import _WrappedHook

    def of_copy(hook: Any) -> Any:
        if isinstance(hook, _WrappedHook):
            return _WrappedHook(exchanged(hook.hook), exchanged(hook.module()) if hook.with_module else None)
        return exchanged(hook)

    return OrderedDict((key, of_copy(hook)) for key, hook in hooks.items())


def mixes_dtensors(error: Exception) -> bool:
    """Whether DTensor's dispatcher refused an operator for a plain tensor beside a DTensor; it has no class of errors for it."""
    return "got mixed torch.Tensor and DTensor" in str(error)
