"""Fake tensors, trees of arguments, tensors of one's own, and what an operator's schema says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch


def fake_mode() -> Any:
    """A mode in which tensors have shape, dtype and device but no memory (``FakeTensorMode``); what export traces with.

    Real tensors met on the way (constants in the model's code) are converted rather than refused.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    _start_autograd()
    return FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv(), static_shapes=True)


def adaptive_result(output: torch.Tensor, loss: torch.Tensor) -> Any:
    """What ``nn.AdaptiveLogSoftmaxWithLoss`` returns, a named tuple that torch does not export."""
    from torch.nn.modules.adaptive import _ASMoutput

    return _ASMoutput(output, loss)


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no memory because it belongs to a fake mode."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)




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


def named_children_of(value: Any) -> list[tuple[str, Any]]:
    """The items of a known container, by dict key, attribute name or index as text."""
    from torch.utils import _pytree

    items, _ = _pytree.tree_flatten_with_path(value, is_leaf=lambda item: item is not value)
    return [(_step(path[0]), item) for path, item in items]



NO_TORCH_FUNCTION = torch._C._disabled_torch_function_impl
"""``__torch_function__`` of a tensor class whose results are not of the class."""


def wrapper_of(cls: type[torch.Tensor], like: torch.Tensor) -> Any:
    """A tensor of the class with the shape, strides, dtype and device of another and no memory: the class's ``__torch_dispatch__`` is
    asked for everything else (``_make_wrapper_subclass``)."""
    return torch.Tensor._make_wrapper_subclass(cls, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device)




def is_operator(target: Any) -> bool:
    """Whether a node's target is a torch operator (``torch._ops.OpOverload``), as against a Python function."""
    return isinstance(target, torch._ops.OpOverload)


def runs_a_graph(target: Any) -> bool:
    """Whether a node's target is an operator that runs graphs of its own (``torch.cond``, regions under ``no_grad``)."""
    return isinstance(target, torch._ops.HigherOrderOperator)


def schema_of(target: Any) -> Any:
    """An operator's schema: ``name``, ``arguments`` and ``returns``, ``is_mutable``."""
    return target._schema


def called_by(target: Any) -> Any:
    """What a call of an operator calls in turn, one Python frame further down (``OpOverload._op``)."""
    return target._op


def draws(target: Any) -> bool:
    """Whether an operator takes numbers from torch's own random generators."""
    return torch.Tag.nondeterministic_seeded in target.tags


@cache
def _start_autograd() -> None:
    """Autograd's first backward pass in this process, of nothing, outside of fake modes.

    Autograd counts devices once, at its first backward pass, and starts a thread for each. Under a fake mode a torch built for CUDA counts
    GPUs that are not there; forked ranks do not have their threads, and refuse to go backward.
    """
    with torch.enable_grad():
        torch.zeros((), requires_grad=True).clone().backward()


def transforms_run() -> bool:
    """Whether a transform of ``torch.func`` (vmap, grad, jvp) or forward-mode differentiation is under way."""
    return torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0


def add_to_each(tensors: list[torch.Tensor], number: complex) -> None:
    """Adds a number to each tensor where it lies, in one call (``_foreach_add_``)."""
    torch._foreach_add_(tensors, number)


def sums_with(tensors: list[torch.Tensor], number: complex) -> tuple[torch.Tensor, ...]:
    """The sum of each tensor with a number, in one call (``_foreach_add``)."""
    return torch._foreach_add(tensors, number)


def versions_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """What counts each tensor's changes in place (``_version``), without asking its class, which takes as long again."""
    with torch._C.DisableTorchFunctionSubclass():
        return [tensor._version for tensor in tensors]


def copy_each(into: list[torch.Tensor], given: list[torch.Tensor]) -> None:
    """Copies each tensor into the one at its place, in one call (``_foreach_copy_``)."""
    torch._foreach_copy_(into, given)


def assert_later(condition: torch.Tensor, message: str) -> None:
    """Fails on the condition's device when it gets there, without anybody waiting for it; on a CPU at once, with a RuntimeError."""
    torch._assert_async(condition, message)


def is_assertion(target: Any) -> bool:
    """Whether a node's target is what ``assert_later`` runs."""
    return target is torch.ops.aten._assert_async.msg


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


def unknown_sizes(value: Any) -> set[str]:
    """The names of the sizes in a result, or in the condition that an error of export is about, that only values tell (``SymNode.expr``,
    ``GuardOnDataDependentSymNode.cond``)."""
    if isinstance(value, Exception):
        expressions = [getattr(value, "cond", None)]
    else:
        sizes = [*value.shape] if isinstance(value, torch.Tensor) else [value]
        expressions = [size.node.expr for size in sizes if isinstance(size, torch.SymInt | torch.SymFloat | torch.SymBool)]
    return {str(symbol) for expression in expressions for symbol in getattr(expression, "free_symbols", ())}


def values_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor where it has values and this rank has all of it: of a DTensor that every rank has whole, its part (``_local_tensor``)."""
    from torch.distributed.tensor import DTensor

    if isinstance(tensor, DTensor):
        return tensor._local_tensor if all(placement.is_replicate() for placement in tensor.placements) else None
    return None if tensor.is_meta or is_fake(tensor) or type(tensor) not in (torch.Tensor, torch.nn.Parameter) else tensor
