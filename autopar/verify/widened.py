"""The same trial in float64, to tell rounding from error.

Sums over ranks are made in another order than on one device, and gradients that almost cancel show it (of what a norm divides out again,
of a key's bias): in float32 and more so in half precision a right program may differ by more than any fixed tolerance. In float64 rounding
is nine digits and more smaller, and an error as large as it was.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from autopar.graph import DTYPE_BYTES, Argument, Dtype, Graph, Op
from autopar.schedule import Schedule
from autopar.sharding import Strategy
from autopar.torch_compat import map_tensors
from autopar.verify.trials import Case

WIDER: Mapping[str, str] = {"bfloat16": "float64", "float16": "float64", "float32": "float64", "complex64": "complex128"}
_TORCH = {getattr(torch, narrow): getattr(torch, wide) for narrow, wide in WIDER.items()}
_METHODS = {
    "float": torch.Tensor.double, "half": torch.Tensor.double, "bfloat16": torch.Tensor.double, "cfloat": torch.Tensor.cdouble,
}  # fmt: skip


def _grouped_mm(x: torch.Tensor, w: torch.Tensor, *, offs: torch.Tensor, bias: None = None, out_dtype: Any = None) -> Any:
    return torch.ops.autopar.grouped_mm.default(x, w, offs, 0, 0)


_KERNELS = {"grouped_mm": _grouped_mm, "_grouped_mm": _grouped_mm}
"""Functions of torch whose kernels know no float64."""


def widened(schedule: Schedule) -> Schedule:
    """The schedule with every tensor of fewer digits in float64; what it costs stays as it was."""
    return replace(
        schedule,
        graph=_graph(schedule.graph),
        operations={
            name: item._replace(op=_op(item.op), strategy=_strategy(item.strategy, item.op, schedule.graph))
            for name, item in schedule.operations.items()
        },
        collectives={
            name: replace(call, parts=tuple(p._replace(dtype=_dtype(p.dtype), itemsize=DTYPE_BYTES[_dtype(p.dtype)]) for p in call.parts))
            for name, call in schedule.collectives.items()
        },
    )


def widened_case(case: Case, graph: Graph) -> Case:
    """The case on the graph of ``widened``. Its model is changed: call it in a process of its own."""
    args, kwargs, loss_args, tangents = wide_tensors((case.args, dict(case.kwargs), case.loss_args, dict(case.tangents)))
    model = case.model
    for part in model.modules():
        for name, value in list(vars(part).items()):
            if isinstance(value, torch.Tensor):
                vars(part)[name] = wide_tensors(value)
    return replace(case, graph=graph, model=model.double(), args=args, kwargs=kwargs, loss_args=loss_args, tangents=tangents)


def wide_tensors(tree: Any) -> Any:
    """The same containers with tensors of fewer digits in float64."""
    return map_tensors(lambda tensor: tensor.detach().to(_TORCH.get(tensor.dtype)).requires_grad_(tensor.requires_grad)
                       if tensor.dtype in _TORCH else tensor, tree)  # fmt: skip


class Widening(TorchFunctionMode):
    """Within it, what a model makes in fewer digits or converts to them is float64; what torch has no kernel for in that has one."""

    def __torch_function__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        function = (_METHODS | _KERNELS).get(name, function) if args else function
        wide = [_TORCH.get(item, item) if isinstance(item, torch.dtype) else item for item in args]
        named = {name: _TORCH.get(item, item) if isinstance(item, torch.dtype) else item for name, item in (kwargs or {}).items()}
        return function(*wide, **named)


def _graph(graph: Graph) -> Graph:
    tensors = {name: replace(tensor, dtype=_dtype(tensor.dtype)) for name, tensor in graph.tensors.items()}
    return replace(graph, tensors=tensors, ops=tuple(map(_op, graph.ops)))


def _op(op: Op) -> Op:
    return replace(op, args=tuple(map(_argument, op.args)), kwargs=tuple((name, _argument(value)) for name, value in op.kwargs))


def _strategy(strategy: Strategy, op: Op, graph: Graph) -> Strategy:
    """With the operator's own collectives, which carry statistics in what its first operand is made of, as large as they are then."""
    if not strategy.inner:
        return strategy
    dtype = graph.tensors[(*op.inputs, *op.outputs)[0]].dtype
    wider = DTYPE_BYTES[_dtype(dtype)] // DTYPE_BYTES[dtype]
    inner = tuple(replace(item, bytes=item.bytes * wider) for item in strategy.inner)
    return replace(strategy, inner=inner, workspace=strategy.workspace * wider)


def _argument(argument: Argument) -> Argument:
    if isinstance(argument, tuple):
        return tuple(map(_argument, argument))
    return Dtype(_dtype(argument.name)) if isinstance(argument, Dtype) else argument


def _dtype(name: str) -> str:
    return WIDER.get(name, name)
