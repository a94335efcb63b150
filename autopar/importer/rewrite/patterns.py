"""Written-out forms of dialect operators, recognised in the exported graph.

Models write RMS norm by hand, repeat key heads by copying them, and merge rows for a linear layer. The written-out parts stay in the
graph only where something else reads them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from autopar import torch_compat
from autopar.importer.rewrite.bags import embedding_bag, equal_bags
from autopar.importer.rewrite.contractions import linear_over

aten = torch.ops.aten
Stays = Callable[[Node, Node], bool]
"""Of a node's value, and another node: whether the value is still what it was there."""
_CONVERSIONS = (aten.to.dtype, aten._to_copy.default, aten.to.dtype_layout)
_RESHAPES = (aten.reshape.default, aten.view.default, aten.flatten.using_ints)
_COPIES = (aten.clone.default, aten.contiguous.default)
_MOVES = (aten.permute.default, aten.transpose.int, aten.movedim.intlist, aten.movedim.int)


def recognised(node: Node, stays: Stays = lambda value, since: True) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The call that a node stands for: operator, arguments, keyword arguments; its own where no form is recognised, or where the form
    would read something that was written in place meanwhile."""
    found = None
    if node.target is aten.mul.Tensor:
        found = _rms_norm(node)
    elif node.target is aten.scaled_dot_product_attention.default:
        found = _shared_heads(node)
    elif node.target in _RESHAPES:
        found = _merged_rows(node)
    elif node.target in (aten.embedding_bag.default, aten.embedding_bag.padding_idx):
        offsets = node.args[2]
        found = embedding_bag, node.args, {**node.kwargs, "size": equal_bags(node) if stays(offsets, offsets) else None}
    if found is not None and _stay(node, found[1:], stays):
        return found
    return node.target, node.args, dict(node.kwargs)


def _stay(node: Node, given: Any, stays: Stays) -> bool:
    """Whether the parts of a form are what their operators made, and what they read is the same at the form's end.

    Args:
        node: the end.
        given: to the call for the form: what the parts begin with.
    """
    given = {item for item in torch_compat.leaves_of(given) if isinstance(item, Node)}
    pending, parts, first = [item for item in node.all_input_nodes if item not in given], set[Node](), dict[Node, Node]()
    while pending:
        part = pending.pop()
        if part not in parts:
            parts.add(part)
            pending += [item for item in part.all_input_nodes if item not in given]
            first.update((item, min(part, first.get(item, part))) for item in part.all_input_nodes if item in given)
    return all(stays(part, part) for part in parts) and all(stays(item, reader) for item, reader in first.items())


def _call(node: Any, *targets: Any) -> bool:
    return isinstance(node, Node) and node.op == "call_function" and node.target in targets


def _unconverted(node: Any) -> Any:
    """The value before conversions between floating dtypes."""
    while _call(node, *_CONVERSIONS) and node.args[0].meta["val"].is_floating_point():
        node = node.args[0]
    return node


def _rms_norm(node: Node) -> tuple[Any, tuple[Any, ...], dict[str, Any]] | None:
    """``weight * (x * rsqrt(mean(x ** 2, -1, keepdim=True) + eps))``, in either order, with conversions between."""
    for weight, normal in (node.args[:2], node.args[1::-1]):
        normal = _unconverted(normal)
        if not _call(normal, aten.mul.Tensor) or not isinstance(weight, Node):
            continue
        for x, scale in (normal.args[:2], normal.args[1::-1]):
            found = _mean_square(scale)
            if found is None or _unconverted(x) is not found[0]:
                continue
            source, eps = found
            size = source.meta["val"].shape[-1]
            value = node.meta["val"]
            if weight.meta["val"].shape == (size,) and value.shape == source.meta["val"].shape and value.dtype == source.meta["val"].dtype:
                return aten.rms_norm.default, (source, [size], weight, eps), {}
    return None


def _mean_square(node: Any) -> tuple[Node, float] | None:
    """``x`` and ``eps`` of ``rsqrt(mean(x ** 2, -1, keepdim=True) + eps)``."""
    if not _call(node, aten.rsqrt.default):
        return None
    total = node.args[0]
    if not _call(total, aten.add.Tensor) or len(total.args) != 2 or total.kwargs:
        return None
    mean, eps = total.args if isinstance(total.args[1], float) else total.args[::-1]
    if not isinstance(eps, float) or not _call(mean, aten.mean.dim) or len(mean.args) < 3 or mean.kwargs:
        return None
    square, dims, keep = mean.args[:3]
    if not keep or len(dims) != 1 or dims[0] % square.meta["val"].dim() != square.meta["val"].dim() - 1:
        return None
    if _call(square, aten.pow.Tensor_Scalar) and square.args[1] == 2:
        return _unconverted(square.args[0]), eps
    if _call(square, aten.mul.Tensor) and square.args[0] is square.args[1]:
        return _unconverted(square.args[0]), eps
    return (_unconverted(square.args[0]), eps) if _call(square, aten.square.default) else None


def _shared_heads(node: Node) -> tuple[Any, tuple[Any, ...], dict[str, Any]] | None:
    """Attention whose key and value heads were repeated for it: the same with the heads shared."""
    q, k, v, *rest = node.args
    before_k, before_v = _unrepeated(k), _unrepeated(v)
    if before_k is None or before_v is None or before_k.meta["val"].shape[1] != before_v.meta["val"].shape[1]:
        return None
    return node.target, (q, before_k, before_v, *rest), {**node.kwargs, "enable_gqa": True}


def _unrepeated(node: Any) -> Node | None:
    """``x [b, g, t, d]`` of a tensor in which each of its heads stands several times in a row."""
    if _call(node, aten.repeat_interleave.self_int) and node.args[0].meta["val"].dim() == 4 and tuple(node.args[2:]) == (1,):
        return node.args[0]
    if not _call(node, *_RESHAPES) or not _call(node.args[0], aten.expand.default):
        return None
    added = node.args[0].args[0]
    if not _call(added, aten.unsqueeze.default) or added.args[1] != 2:
        return None
    x, shape = added.args[0], tuple(node.meta["val"].shape)
    b, g, *last = x.meta["val"].shape
    expanded = tuple(node.args[0].meta["val"].shape)
    return x if len(last) == 2 and expanded == (b, g, shape[1] // g, *last) and shape == (b, shape[1], *last) else None


def _merged_rows(node: Node) -> tuple[Any, tuple[Any, ...], dict[str, Any]] | None:
    """A linear layer over rows ``[t b, k]`` that are ``[t, b]`` before and behind it, of a tensor whose dims were moved, as in torch's
    ``multi_head_attention_forward``: the same over the rows as they are. Merged, no dim but the first of them could be split."""
    layer = node.args[0]
    if not _call(layer, aten.linear.default) or not _call(layer.args[0], *_RESHAPES):
        return None
    x, shape = layer.args[0].args[0], tuple(node.meta["val"].shape)
    while _call(x, *_COPIES):
        x = x.args[0]
    rows, out = layer.args[0].meta["val"], layer.meta["val"]
    if not _call(x, *_MOVES) or rows.dim() != 2 or len(shape) < 3 or shape[-1] != out.shape[-1]:
        return None
    return linear_over, (layer.args[0].args[0], shape[:-1], *layer.args[1:]), {}
