"""Half-precision computing with whole parameters, as mixed-precision training does it.

Parameters, their gradients and the optimizer's states keep their dtype. ``bfloat16``: a call casts parameters and inputs to the dtype it
computes in, and its results back to float32. ``autocast-bfloat16``: the model is captured under ``torch.autocast``, which casts operator by
operator. The casts are operators of the graph like any others: the plan says where they run, so that a weight may be gathered after it was
narrowed, and gradients are summed over ranks in the dtype where that is cheaper.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from autopar.errors import UsageError
from autopar.graph import CONVERSION, Graph, Op
from autopar.importer.arguments.containers import changed
from autopar.importer.naming import renamed

_HALVES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_AUTOCAST = {f"autocast-{name}": dtype for name, dtype in _HALVES.items()}
COMPUTE_DTYPES: Mapping[str, torch.dtype] = {**_HALVES, **_AUTOCAST}
WITH_STATISTICS = (
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d,
)  # fmt: skip
"""Their kernels take values in half precision beside weights and running statistics of one dtype, which is that of the model."""


def is_autocast(name: str | None) -> bool:
    """Whether a compute dtype of that name is ``torch.autocast``'s."""
    return name in _AUTOCAST


def check_compute_dtype(name: str | None) -> None:
    """Raises UsageError: nothing that a model is computed in beside its own dtype."""
    if name is not None and name not in COMPUTE_DTYPES:
        raise UsageError(f"unknown compute dtype {name!r}", f"use one of {', '.join(COMPUTE_DTYPES)}")


def autocast_of(name: str | None) -> AbstractContextManager[object]:
    """``torch.autocast`` of the CPU where a compute dtype of that name is one: model and loss are called within it, backward outside.

    Casts are not kept between operators, since a trace has no use for those of another; ``share_casts`` finds equal ones.
    """
    return torch.autocast("cpu", _AUTOCAST[name], cache_enabled=False) if name in _AUTOCAST else nullcontext()


def call_in(
    model: nn.Module, name: str | None, args: tuple[Any, ...], kwargs: Mapping[str, Any], parameters: Mapping[str, Tensor] | None = None
) -> Any:
    """``model(*args, **kwargs)``, computed in the dtype of that name where one is given; buffers, and weights beside running statistics,
    stay as they are.

    Args:
        parameters: those that are read, where that is not all of them.
    """
    if name not in _HALVES:
        return model(*args, **kwargs)
    dtype = _HALVES[name]

    def narrow(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    norms = (module for module in model.modules() if isinstance(module, WITH_STATISTICS))
    kept = {id(parameter) for norm in norms for parameter in norm.parameters(recurse=False)}
    read = dict(model.named_parameters()) if parameters is None else parameters
    narrowed = {name: item if id(item) in kept else narrow(item) for name, item in read.items()}
    result = functional_call(model, narrowed, *changed(narrow, (args, dict(kwargs))), tie_weights=True)
    return changed(lambda tensor: tensor.float() if tensor.is_floating_point() else tensor, result)


def share_casts(graph: Graph) -> Graph:
    """The graph with one conversion in forward of what modules beside each other convert alike: queries, keys and values of one input.

    ``torch.autocast`` converts at each operator. Values are the same; gradients are converted and summed as it does.
    """
    first: dict[tuple[str, str, str], str] = {}
    shared: dict[str, str] = {}
    kept: list[Op] = []
    for op in graph.ops:
        if op.target == CONVERSION and op.phase == "forward":
            key = op.inputs[0], graph.tensors[op.outputs[0]].dtype, op.module.rpartition(".")[0]
            made = first.setdefault(key, op.outputs[0])
            if made != op.outputs[0]:
                shared[op.outputs[0]] = made
                continue
        kept.append(replace(op, inputs=tuple(shared.get(name, name) for name in op.inputs)))
    outputs = [replace(output, tensor=shared.get(output.tensor, output.tensor)) for output in graph.outputs]
    ordered = renamed(graph, {item: graph.tensors[item.tensor] for item in graph.inputs}, kept, outputs, graph.tensors)
    assert ordered is not None, "what is converted is there"
    return ordered


def where_used(graph: Graph) -> Graph:
    """The graph with conversions of parameters, and of their gradients, in the parameter's module: they are of its layer. For training the
    first stand before all else, in the order in which they are read, so that what came of them may be gathered ahead; and gradients are
    converted as soon as they are made: a call narrows all parameters before the model runs, so that backward widens all gradients when it
    has ended, and none could leave before that. Operators are named in the order they have then."""
    home = {item.tensor: item.name.rpartition(".")[0] for item in graph.of_kind("parameter")}
    leaving = {output.tensor: home.get(owner) for output, owner in graph.owners.items() if output.kind == "gradient"}
    shown = {output.tensor for output in graph.outputs}
    narrowed, widened = list[tuple[int, Op]](), defaultdict[str, list[Op]](list)
    for op in graph.ops:
        if op.target != CONVERSION:
            continue
        (read,), (made,) = op.inputs, op.outputs
        readers = [index for index, _ in graph.consumers[made]]
        module, maker = leaving.get(made), graph.producer.get(read)
        if read in home and made not in shown and readers and graph.ops[readers[0]].phase == "forward":
            narrowed.append((readers[0], replace(op, module=op.module or home[read])))
        elif op.phase == "backward" and module is not None and not readers and maker is not None and maker.phase == "backward":
            widened[maker.name].append(replace(op, module=op.module or module))
    first = [op for _, op in sorted(narrowed, key=lambda item: item[0])]
    moved = {op.name for some in (first, *widened.values()) for op in some}
    if graph.mode != "train":
        named = {op.name: op for op in first}
        return replace(graph, ops=tuple(named.get(op.name, op) for op in graph.ops))
    ops = [*first, *(one for op in graph.ops if op.name not in moved for one in (op, *widened[op.name]))]
    ordered = renamed(graph, {item: graph.tensors[item.tensor] for item in graph.inputs}, ops, graph.outputs, graph.tensors)
    assert ordered is not None, "what is converted is there"
    return ordered
