"""Propagation of blocks through operators: which inputs are in blocks for a result in blocks, and how the operator runs on them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from autopar import torch_compat
from autopar.dialect import experts
from autopar.importer.rewrite.contractions import addmm, linear, matmul
from autopar.importer.rewrite.patterns import recognised
from autopar.sharding import Blocks

aten = torch.ops.aten
Wanted = Mapping[Node, Blocks]
Given = Mapping[Node, Any]


@dataclass(frozen=True)
class Carrier:
    """How a kind of operator carries blocks.

    Args:
        reads: the inputs that are read in blocks where the result is to be in these; none where it cannot be.
        run: the result in blocks, from its inputs by node, those in blocks.
        of: the place of the argument that it must come from; None: all inputs of the result's size.
    """

    reads: Callable[[Node, Blocks], Wanted]
    run: Callable[[Node, Blocks, Given, Callable[..., Any]], Any]
    of: int | None = None


def carrier_of(node: Node) -> Carrier | None:
    if node.op != "call_function" or recognised(node)[0] is not node.target or not isinstance(node.meta.get("val"), Tensor):
        return None
    found = _CARRIERS.get(node.target)
    if found is None and torch_compat.is_operator(node.target) and not torch_compat.schema_of(node.target).is_mutable:
        return _ELEMENTWISE if node.target in _LIKE_ELEMENTWISE or torch.Tag.pointwise in node.target.tags else None
    return found


_LIKE_ELEMENTWISE = frozenset({
    aten.dropout.default, aten.clone.default, aten.contiguous.default, aten.to.dtype, aten._to_copy.default, aten.to.dtype_layout,
    aten.alias.default, aten.detach.default,
})  # fmt: skip


def _with_dim(node: Node, out: Blocks, source: Node) -> int:
    """The dim of an elementwise operator's input that the result's blocks are of; negative where it has none."""
    return out.dim - (node.meta["val"].dim() - source.meta["val"].dim())


def _reads_elementwise(node: Node, out: Blocks) -> Wanted:
    if node.kwargs.get("memory_format", torch.contiguous_format) not in (torch.contiguous_format, torch.preserve_format):
        return {}
    extent = node.meta["val"].shape[out.dim]
    dims = {source: _with_dim(node, out, source) for source in node.all_input_nodes if isinstance(source.meta["val"], Tensor)}
    return {source: Blocks(dim, out.count) for source, dim in dims.items() if dim >= 0 and source.meta["val"].shape[dim] == extent}


def _run_elementwise(node: Node, out: Blocks, given: Given, call: Callable[..., Any]) -> Any:
    reads = _reads_elementwise(node, out)

    def value(source: Node) -> Any:
        spread = source not in reads and isinstance(given[source], Tensor) and _with_dim(node, out, source) >= 0
        return given[source].unsqueeze(_with_dim(node, out, source)) if spread else given[source]

    return call(*torch.fx.node.map_arg(node.args, value), **torch.fx.node.map_arg(node.kwargs, value))


def _reads_linear(node: Node, out: Blocks) -> Wanted:
    _, weight, *bias = node.args
    if out.dim != node.meta["val"].dim() - 1 or weight.meta["val"].dim() != 2:
        return {}
    return {source: Blocks(0, out.count) for source in (weight, *bias) if isinstance(source, Node)}


def _run_linear(node: Node, out: Blocks, given: Given, call: Callable[..., Any]) -> Any:
    return linear(*(given.get(source) for source in node.args))


def _reads_product(node: Node, out: Blocks) -> Wanted:
    """Of ``matmul(a, b)`` and ``addmm(bias, a, b)``: the last dim of ``b``, and of the bias where it has it."""
    *bias, _, b = node.args
    rank = b.meta["val"].dim()
    if out.dim != node.meta["val"].dim() - 1 or rank < 2:
        return {}
    extent = node.meta["val"].shape[-1]
    found = {b: Blocks(rank - 1, out.count)}
    for source in bias:
        shape = source.meta["val"].shape
        if shape and shape[-1] != extent:
            return {}
        if shape:
            found[source] = Blocks(len(shape) - 1, out.count)
    return found


def _run_product(node: Node, out: Blocks, given: Given, call: Callable[..., Any]) -> Any:
    function = addmm if len(node.args) == 3 else matmul
    return function(*(given[source] for source in node.args), **node.kwargs, blocks=True)


def _reads_experts(node: Node, out: Blocks) -> Wanted:
    """Of a product of rows by their experts' matrices: the dim of the matrices that is the result's."""
    _, matrices, _, result = experts.parse(node.args[3])
    name = result[out.dim]
    return {node.args[1]: Blocks(matrices.index(name), out.count)} if name in matrices else {}


def _run_experts(node: Node, out: Blocks, given: Given, call: Callable[..., Any]) -> Any:
    first, second, rows, result = experts.parse(node.args[3])
    name = result[out.dim]
    parted = {name: (f"{name}block", name)}
    second, result = (tuple(part for one in term for part in parted.get(one, (one,))) for term in (second, result))
    tensors = (given[source] for source in node.args[:3])
    return call(*tensors, experts.write(first, second, rows, result), *node.args[4:])


def _order(node: Node) -> list[int]:
    """Of an operator that moves dims, the input's dim in the place of each of the result's."""
    rank = node.meta["val"].dim()
    if node.target is aten.permute.default:
        return [dim % rank for dim in node.args[1]]
    a, b = (0, -1) if node.target in (aten.t.default, aten.numpy_T.default) else (-1, -2) if len(node.args) == 1 else node.args[1:]
    order = list(range(rank))
    if rank > 1:
        order[a], order[b] = order[b], order[a]
    return order


def _reads_moved(node: Node, out: Blocks) -> Wanted:
    if node.target is aten.numpy_T.default and node.meta["val"].dim() > 2:
        return {}
    return {node.args[0]: Blocks(_order(node)[out.dim], out.count)}


def _run_moved(node: Node, out: Blocks, given: Given, call: Callable[..., Any]) -> Any:
    order = _order(node)
    at = order[out.dim]
    places = [place for dim in order for place in ((at, at + 1) if dim == at else (dim + (dim > at),))]
    return given[node.args[0]].permute(places)


def _reads_viewed(node: Node, out: Blocks) -> Wanted:
    """The dim that begins where the result's does, and has as many blocks."""
    source: Any = node.args[0]
    before, shape = math.prod(node.meta["val"].shape[: out.dim]), source.meta["val"].shape
    for dim, extent in enumerate(shape):
        if extent > 1 and math.prod(shape[:dim]) == before and extent % out.count == 0:
            return {source: Blocks(dim, out.count)}
    return {}


def _run_viewed(node: Node, out: Blocks, given: Given, call: Callable[..., Any]) -> Any:
    return given[node.args[0]].reshape(out.shape(node.meta["val"].shape))


_ELEMENTWISE = Carrier(_reads_elementwise, _run_elementwise)
_CARRIERS: Mapping[Any, Carrier] = {
    aten.linear.default: Carrier(_reads_linear, _run_linear, 1),
    **dict.fromkeys((aten.matmul.default, aten.mm.default, aten.bmm.default), Carrier(_reads_product, _run_product, 1)),
    **dict.fromkeys((aten.addmm.default, aten.baddbmm.default), Carrier(_reads_product, _run_product, 2)),
    torch.ops.autopar.expert_contract.default: Carrier(_reads_experts, _run_experts, 1),
    **dict.fromkeys(
        (aten.t.default, aten.transpose.int, aten.permute.default, aten.numpy_T.default, aten.mT.default),
        Carrier(_reads_moved, _run_moved, 0),
    ),
    **dict.fromkeys(
        (
            aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.flatten.using_ints, aten.unflatten.int,
            aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims,
        ),
        Carrier(_reads_viewed, _run_viewed, 0),
    ),
}  # fmt: skip
