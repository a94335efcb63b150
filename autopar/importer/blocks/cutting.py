"""Nodes of an exported graph that cut a dim into pieces, and what the pieces are where the dim is held in blocks."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from autopar.sharding import Blocks

aten = torch.ops.aten
_CUTTERS = frozenset({
    aten.split.Tensor, aten.split.sizes, aten.split_with_sizes.default, aten.chunk.default, aten.unsafe_chunk.default,
    aten.unsafe_split.Tensor, aten.tensor_split.sections, aten.unbind.int,
})  # fmt: skip
_ONE_AT = frozenset({aten.unbind.int, aten.select.int})
"""Operators whose result lacks the dim."""
_PIECES = frozenset({aten.slice.Tensor, aten.narrow.default, aten.select.int})


def is_cutter(node: Node) -> bool:
    return node.target in _CUTTERS


def is_piece(node: Node) -> bool:
    if node.target is operator.getitem:
        return isinstance(node.args[0], Node) and is_cutter(node.args[0])
    return node.target in _PIECES and not node.kwargs and not is_whole(node)


def source_of(piece: Node) -> Node:
    """What a piece is cut out of, or a cutter cuts."""
    cutter: Any = piece.args[0] if piece.target is operator.getitem else piece
    found: Node = before(cutter.args[0])
    return found


def place_of(piece: Node) -> tuple[int, int, int]:
    """The dim, and the first and last index (not included) of a piece."""
    shape = source_of(piece).meta["val"].shape
    if piece.target is operator.getitem:
        cutter, index = piece.args
        given = cutter.args[-1] if len(cutter.args) > (1 if cutter.target in _ONE_AT else 2) else cutter.kwargs.get("dim", 0)
        dim = given % len(shape)
        if cutter.target in _ONE_AT:
            return dim, index, index + 1
        sizes = [part.shape[dim] for part in cutter.meta["val"]]
        start = sum(sizes[:index])
        return dim, start, start + sizes[index]
    dim, *rest = (piece.args[1:] or (0,))
    dim %= len(shape)
    if piece.target is aten.select.int:
        start = rest[0] % shape[dim]
        return dim, start, start + 1
    if piece.target is aten.narrow.default:
        start = rest[0] % shape[dim]
        return dim, start, start + rest[1]
    first, last, step = slice(*(*rest, None, None)[: max(len(rest), 2)]).indices(shape[dim])
    return (dim, first, max(first, last)) if step == 1 else (dim, 0, 1)


def within(piece: Node, blocks: Blocks) -> Blocks | None:
    """The blocks in a piece; None where it is one."""
    dim, start, end = place_of(piece)
    size = source_of(piece).meta["val"].shape[dim] // blocks.count
    return Blocks(dim, (end - start) // size) if end - start > size else None


def cut(node: Node, value: Tensor, blocks: Blocks) -> Any:
    """What a cutter gives, or a piece."""
    size, drops = source_of(node).meta["val"].shape[blocks.dim] // blocks.count, node.target in _ONE_AT
    if not is_cutter(node):
        _, start, end = place_of(node)
        if end - start > size:
            return value.narrow(blocks.dim, start // size, (end - start) // size)
        block = value.select(blocks.dim, start // size)
        return block.squeeze(blocks.dim) if drops else block
    if drops or all(part.shape[blocks.dim] == size for part in node.meta["val"]):
        return tuple(block.squeeze(blocks.dim) if drops else block for block in value.unbind(blocks.dim))
    parts = value.split([part.shape[blocks.dim] // size for part in node.meta["val"]], blocks.dim)
    return tuple(part.squeeze(blocks.dim) if part.shape[blocks.dim] == 1 else part for part in parts)


def is_whole(node: Node) -> bool:
    """Whether a node is a slice of all that there is (``x[:, ...]`` takes one for each dim)."""
    return node.target is aten.slice.Tensor and node.meta["val"].shape == node.args[0].meta["val"].shape and len(node.args) < 5


def before(node: Any) -> Any:
    """The node through slices of all there is."""
    while is_whole(node):
        node = node.args[0]
    return node
