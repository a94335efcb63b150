"""Nodes that only repeat a value: what moved between formats, or named a value twice."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor as TorchTensor
from torch.fx import Node

aten = torch.ops.aten


def same_value(node: Node) -> Node | None:
    """The argument that a node merely repeats, if that is all it does."""
    source = node.args[0] if node.args else None
    if not isinstance(source, Node) or not isinstance(source.meta.get("val"), TorchTensor):
        return None
    if node.target in _ALWAYS_SAME:
        return source
    if node.target is aten.copy.default:  # (destination, source): the source, converted
        other = node.args[1]
        return other if isinstance(other, Node) and _same_layout(node, other.meta["val"], node.meta["val"]) else None
    test = _SOMETIMES_SAME.get(node.target)
    return source if test is not None and test(node, source.meta["val"], node.meta["val"]) else None


def _same_layout(node: Node, before: TorchTensor, after: TorchTensor) -> bool:
    return before.shape == after.shape and before.dtype == after.dtype and before.stride() == after.stride()


def _same_shape(node: Node, before: TorchTensor, after: TorchTensor) -> bool:
    return before.shape == after.shape


def _same_order(node: Node, before: TorchTensor, after: TorchTensor) -> bool:
    dims: Any = node.args[1]
    return [dim % max(before.dim(), 1) for dim in dims] == list(range(before.dim()))


_ALWAYS_SAME = frozenset({
    aten.alias.default, aten.detach.default, aten.lift_fresh.default, aten.lift_fresh_copy.default, aten.positive.default,
})  # fmt: skip
_SOMETIMES_SAME: Mapping[Any, Callable[[Node, TorchTensor, TorchTensor], bool]] = {
    aten.clone.default: _same_layout,
    aten._to_copy.default: _same_layout,
    aten.view.default: _same_shape,
    aten._unsafe_view.default: _same_shape,
    aten.expand.default: _same_shape,
    aten.slice.Tensor: _same_shape,
    aten.permute.default: _same_order,
}
