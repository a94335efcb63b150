"""Operators by target, and their arguments with local tensors put in.

Devices and attention kernels are bound here, at run time: a graph names neither. Views run as reshapes, since a local part
may lie in memory otherwise than the whole tensor did, and copies are contiguous.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from types import BuiltinFunctionType
from typing import Any, cast

import torch

import autopar.dialect  # noqa: F401  registers torch.ops.autopar
from autopar.dialect.library import BODIES
from autopar.errors import MismatchError
from autopar.graph import Argument, Dtype, Op, Ref
from autopar.torch_compat import called_by


def _copied(place: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """``copy`` into memory of the result's size: torch's takes that of all that ``place`` is a part of."""
    return source.expand(place.shape).to(place.dtype, copy=True, memory_format=torch.contiguous_format)


def _replacing(part: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The operator that gives a tensor with a part of it replaced, likewise."""

    def run(whole: torch.Tensor, source: torch.Tensor, *where: Any, **named: Any) -> torch.Tensor:
        result = whole.clone(memory_format=torch.contiguous_format)
        part(result, *where, **named).copy_(source)
        return result

    return run


def _fold(x: torch.Tensor, size: Sequence[int], kernel: Sequence[int], *rest: Sequence[int]) -> torch.Tensor:
    """Likewise: torch's result lies in as much memory as the columns that it is folded of."""
    made = x.new_empty((*x.shape[:-2], x.shape[-2] // math.prod(kernel), *size))
    return torch.ops.aten.col2im.out(x, size, kernel, *rest, out=made)


def _conjugate(x: torch.Tensor) -> torch.Tensor:
    """torch's gives what it is given, marked; of what is sent and of gradients that leave nobody asks for the mark."""
    return torch.ops.aten._conj.default(x).resolve_conj()


def _negated(x: torch.Tensor) -> torch.Tensor:
    """Likewise."""
    return torch.ops.aten._neg_view.default(x).resolve_neg()


_INSTEAD: Mapping[str, Callable[..., Any]] = {
    **dict.fromkeys(("aten.view.default", "aten._unsafe_view.default", "aten.reshape.default"), torch.reshape),
    "aten.clone.default": partial(torch.clone, memory_format=torch.contiguous_format),
    "aten._conj.default": _conjugate,
    "aten._neg_view.default": _negated,
    "aten.copy.default": _copied,
    "aten.col2im.default": _fold,
    "aten.slice_scatter.default": _replacing(torch.ops.aten.slice.Tensor),
    "aten.select_scatter.default": _replacing(torch.ops.aten.select.int),
}
"""Functions that run in place of an operator. A graph does not say how tensors lie in memory: copies are made contiguous at once, so that
they are not copied again."""
_READS_MEMORY = ("aten.native_group_norm.default", "aten.native_group_norm_backward.default")
"""Kernels that need all operands in one memory order; torch's own callers ensure it. Otherwise they fail or give wrong numbers."""


@lru_cache(maxsize=4096)
def find_operator(target: str) -> Callable[..., Any]:
    """What runs for the operator: torch's of that name, if nothing runs in its place.

    Raises:
        MismatchError: see ``registered``.
    """
    function = _INSTEAD[target] if target in _INSTEAD else registered(target)
    return _of_contiguous(function) if target in _READS_MEMORY else function


def registered(target: str) -> Callable[..., Any]:
    """The torch operator named ``aten.add.Tensor``.

    Raises:
        MismatchError: torch has none of this name.
    """
    found: Any = torch.ops
    try:
        for word in target.split("."):
            found = getattr(found, word)
    except AttributeError:
        hint = "use the torch version that the plan was made with, and import the package that registers the operator"
        raise MismatchError(f"this torch ({torch.__version__}) has no operator {target}", hint) from None
    return cast(Callable[..., Any], found)


SOONER: Mapping[str, Callable[..., Any]] = {
    "aten.gelu.default": torch.nn.functional.gelu,
    "aten.silu.default": torch.nn.functional.silu,
    "aten.expand.default": torch.Tensor.expand,
}
"""Functions that compute an operator and stand elsewhere than in ``torch``: calls take 2 to 3 us less (gelu 15 -> 12, silu 5 -> 2)."""


@lru_cache(maxsize=4096)
def find_function(target: str) -> Callable[..., Any]:
    """What computes the operator soonest: the body of one of the dialect, else torch's own function of the name (``torch.add``), which
    takes half as long to call as ``torch.ops.aten.add.Tensor``, else what that calls. Outside autograd, and not for a trace."""
    namespace, name, *_ = target.split(".")
    operator = find_operator(target)
    if namespace == "autopar":
        return BODIES.get(name, operator)
    if target in SOONER:
        return SOONER[target]
    function, schema = getattr(torch, name, None), getattr(operator, "_schema", None)
    if schema is None:
        return operator
    lists = any("List[Optional" in str(argument.type) for argument in schema.arguments)
    return function if namespace == "aten" and isinstance(function, BuiltinFunctionType) and not lists else called_by(operator)


def _of_contiguous(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        return function(*(item.contiguous() if isinstance(item, torch.Tensor) else item for item in args))

    return run


def takes_device(op: Op) -> bool:
    """Whether the operator makes tensors from nothing, so that it must be told where."""
    function = find_operator(op.target)
    schema = getattr(function, "_schema", None)
    return not op.inputs and schema is not None and any(argument.name == "device" for argument in schema.arguments)


def with_torch_values(argument: Argument) -> Any:
    """Dtypes by their torch objects; ``Ref`` stays."""
    match argument:
        case Dtype(name):
            return getattr(torch, name)
        case tuple() | list():
            return [with_torch_values(item) for item in argument]
        case dict():
            return {key: with_torch_values(item) for key, item in argument.items()}
        case _:
            return argument


def with_tensors(argument: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """``Ref(i)`` replaced by ``tensors[i]``."""
    match argument:
        case Ref(index):
            return tensors[index]
        case list():
            return [with_tensors(item, tensors) for item in argument]
        case dict():
            return {key: with_tensors(item, tensors) for key, item in argument.items()}
        case _:
            return argument


def named_results(op: Op, result: Any) -> list[torch.Tensor]:
    """The operator's results in the order of ``op.outputs``; results that are None have no name."""
    found = list(_flat(result))
    if len(found) != len(op.outputs):
        found = [item for item in found if item is not None]
    assert len(found) == len(op.outputs), f"{op.target} gave {len(found)} results, the graph names {len(op.outputs)}"
    return found


def _flat(result: Any) -> Iterator[Any]:
    if isinstance(result, (tuple, list)):
        for item in result:
            yield from _flat(item)
    else:
        yield result
