"""Weights that are several in one: held in blocks where the model cuts what is made of them.

One weight for queries, keys and values (or gate and up) is a dim of equal blocks. Split evenly, a rank's part is of one of them, and
cutting the product into its blocks gathers it. So from where a tensor is cut, the cut dim is followed back through contractions,
elementwise operators and views to parameters, and all on the way is traced with that dim as two: the block, and the place in it, which
ranks can split. To the search it is a dim like others. What somebody reads otherwise, or what comes from no parameter, stays one dim.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from autopar import torch_compat
from autopar.dialect import experts
from autopar.importer.exported import Exported, Value
from autopar.importer.rewrite.contractions import addmm, linear, matmul
from autopar.importer.rewrite.patterns import recognised
from autopar.sharding import Blocks

aten = torch.ops.aten
_REGIONS = ("wrap_with_set_grad_enabled", "wrap_with_autocast")
"""Operators that run one graph once, on their last arguments."""
LEAST = 2
"""A parameter's blocks hold so many elements of the dim at least: fewer cannot be split."""

Plain = Mapping[str, frozenset[int]]
"""By parameter, the dims that stay one: somebody has said how they are split as they are."""
Wanted = Mapping[Node, Blocks]


@dataclass(frozen=True)
class InBlocks:
    """What is held in blocks: nodes of the exported graph and of the regions in it, and parameters by name."""

    nodes: Mapping[Node, Blocks]
    parameters: Mapping[str, Blocks]

    def concerns(self, node: Node) -> bool:
        """Whether a node gives blocks, or is cut out of them."""
        if node.target is operator.getitem:
            return False
        return node in self.nodes or ((_is_piece(node) or _is_cutter(node) or _is_whole(node)) and _source(node) in self.nodes)

    def enter(self, node: Node, value: Any) -> Any:
        """What comes in, in blocks where it is held so."""
        blocks = self.nodes.get(node)
        return value if blocks is None else _divided(value, blocks)

    def run(self, node: Node, values: Mapping[Node, Any], table: Mapping[Any, Callable[..., Any]]) -> Any:
        """The value of a node that ``concerns`` blocks.

        Args:
            values: of the nodes before it, in blocks where they are held so.
            table: what runs in the place of operators.
        """
        if _is_whole(node):
            return values[node.args[0]]  # type: ignore[index]
        if _is_piece(node) or _is_cutter(node):
            return _cut(node, values[_source(node)], self.nodes[_source(node)])
        carrier = _carrier(node)
        assert carrier is not None
        given = {source: values[source] for source in node.all_input_nodes}
        for source, blocks in carrier.reads(node, self.nodes[node]).items():
            if _before(source) not in self.nodes:
                given[source] = _divided(given[source], blocks)
        return carrier.run(node, self.nodes[node], given, table.get(node.target, node.target))


def find_blocks(exported: Exported, plain: Plain) -> InBlocks:
    """What of an exported model is to be held in blocks."""
    placeholders = exported.graph_module.graph.find_nodes(op="placeholder")
    while True:
        weights: dict[Node, Value] = {}
        nodes = _found(exported.graph_module, dict(zip(placeholders, exported.values, strict=True)), weights, plain)
        of: dict[str, set[Blocks | None]] = {}
        for node, value in weights.items():
            if value.kind == "parameter":
                of.setdefault(value.name, set()).add(nodes.get(node))
        torn = {name: frozenset(b.dim for b in some if b is not None) for name, some in of.items() if len(some) > 1}
        if not torn:
            return InBlocks(nodes, {name: blocks for name, (blocks,) in of.items() if blocks is not None})
        plain = {**plain, **{name: dims | plain.get(name, frozenset()) for name, dims in torn.items()}}


def _found(module: torch.fx.GraphModule, given: Mapping[Node, Value], weights: dict[Node, Value], plain: Plain) -> dict[Node, Blocks]:
    """The nodes of a graph and of the regions in it; what is a weight is noted in ``weights``, in a region where that alone reads it."""
    found: dict[Node, Blocks] = {}
    passed: set[Node] = set()
    for node in module.graph.nodes:
        if node.op == "call_function" and torch_compat.runs_a_graph(node.target) and node.target.name() in _REGIONS:
            at = next(place for place, item in enumerate(node.args) if isinstance(item, Node) and item.op == "get_attr")
            body = getattr(module, node.args[at].target)
            inner = {}
            for place, item in zip(body.graph.find_nodes(op="placeholder"), node.args[at + 1 :], strict=True):
                if item in given and len(item.users) == 1:
                    inner[place] = given[item]
                    passed.add(item)
            found |= _found(body, inner, weights, plain)
    own = {node: value for node, value in given.items() if node not in passed}
    weights.update(own)
    return found | _agreed(_wanted(module.graph, own, plain))


def _wanted(graph: torch.fx.Graph, weights: Mapping[Node, Value], plain: Plain) -> dict[Node, Blocks]:
    """From the end of the graph to its beginning, how those who read a node would have it held, where they agree."""
    found: dict[Node, Blocks] = {}
    for node in reversed(graph.nodes):
        blocks = _asked(node, found)
        if blocks is None:
            continue
        if node.op == "placeholder":
            value = weights.get(node)
            extent = node.meta["val"].shape[blocks.dim]
            if value is None or value.kind != "parameter" or value.hooks or extent // blocks.count < LEAST:
                continue
            if any(blocks.dim in plain.get(name, ()) for name in (value.name, *value.aliases)):
                continue
        elif not _is_piece(node) and _carrier(node) is None:
            continue
        found[node] = blocks
    return found


def _asked(node: Node, wanted: Wanted) -> Blocks | None:
    if not isinstance(node.meta.get("val"), Tensor):
        return None
    pieces, asked = list[Node](), set[Blocks | None]()
    for user in _users(node):
        if _is_piece(user):
            pieces.append(user)
        elif _is_cutter(user):
            pieces += user.users
        else:
            asked.add(_reads(user, wanted[user]).get(node) if user in wanted else None)
    if pieces:
        asked.add(_of_pieces(node, pieces, wanted))
    return asked.pop() if len(asked) == 1 else None


def _of_pieces(node: Node, pieces: list[Node], wanted: Wanted) -> Blocks | None:
    """The blocks that a node is cut into: all of one size, or several together where they are read in blocks again."""
    if not all(map(_is_piece, pieces)):
        return None
    places = [_place(piece) for piece in pieces]
    dim = places[0][0]
    if len(set(places)) < 2 or any(other != dim for other, _, _ in places):
        return None
    extent = node.meta["val"].shape[dim]
    size = math.gcd(extent, *(number for _, start, end in places for number in (start, end)))
    for piece, (_, start, end) in zip(pieces, places, strict=True):
        if end - start != size and wanted.get(piece) != Blocks(dim, (end - start) // size):
            return None
    return Blocks(dim, extent // size) if extent > size else None


def _agreed(wanted: Wanted) -> dict[Node, Blocks]:
    """Those that come from parameters, and of which all who read them are themselves among those."""
    kept = dict(wanted)
    while True:
        lost = [node for node in kept if not (_comes(node, kept) and _goes(node, kept))]
        if not lost:
            return kept
        for node in lost:
            del kept[node]


def _comes(node: Node, kept: Wanted) -> bool:
    if node.op == "placeholder":
        return True
    if _is_piece(node):
        source = _source(node)
        return source in kept and kept[node] == _within(node, kept[source])
    carrier, reads = _carrier(node), _reads(node, kept[node])
    assert carrier is not None
    size, of = node.meta["val"].numel(), carrier.of
    made_of = [source for source in reads if (source.meta["val"].numel() == size if of is None else source is _before(node.args[of]))]
    return bool(made_of) and all(kept.get(source) == reads[source] for source in made_of)


def _goes(node: Node, kept: Wanted) -> bool:
    for user in _users(node):
        pieces = [user] if _is_piece(user) else list(user.users) if _is_cutter(user) else []
        if any(kept.get(piece) != within for piece in pieces if (within := _within(piece, kept[node])) is not None):
            return False
        if not pieces and (user not in kept or _reads(user, kept[user]).get(node) != kept[node]):
            return False
    return True


def _users(node: Node) -> Iterator[Node]:
    for user in node.users:
        if _is_whole(user):
            yield from _users(user)
        elif user.target is not aten._assert_tensor_metadata.default:
            yield user


def _is_whole(node: Node) -> bool:
    """Whether a node is a slice of all that there is (``x[:, ...]`` takes one for each dim)."""
    return node.target is aten.slice.Tensor and node.meta["val"].shape == node.args[0].meta["val"].shape and len(node.args) < 5  # type: ignore[union-attr]


def _before(node: Any) -> Any:
    """The node through slices of all there is."""
    while _is_whole(node):
        node = node.args[0]
    return node


def _reads(node: Node, blocks: Blocks) -> Wanted:
    """What an operator reads in blocks where its result is to be in these."""
    carrier = _carrier(node)
    return {_before(source): found for source, found in carrier.reads(node, blocks).items()} if carrier is not None else {}


def _divided(value: Tensor, blocks: Blocks) -> Tensor:
    return value.unflatten(blocks.dim, (blocks.count, -1))


# --- what cuts --------------------------------------------------------------------------------------------------------

_CUTTERS = frozenset({
    aten.split.Tensor, aten.split.sizes, aten.split_with_sizes.default, aten.chunk.default, aten.unsafe_chunk.default,
    aten.unsafe_split.Tensor, aten.tensor_split.sections, aten.unbind.int,
})  # fmt: skip
_ONE_AT = frozenset({aten.unbind.int, aten.select.int})
"""What they give has the dim no more."""
_PIECES = frozenset({aten.slice.Tensor, aten.narrow.default, aten.select.int})


def _is_cutter(node: Node) -> bool:
    return node.target in _CUTTERS


def _is_piece(node: Node) -> bool:
    if node.target is operator.getitem:
        return isinstance(node.args[0], Node) and _is_cutter(node.args[0])
    return node.target in _PIECES and not node.kwargs and not _is_whole(node)


def _source(piece: Node) -> Node:
    """What a piece is cut out of, or a cutter cuts."""
    cutter: Any = piece.args[0] if piece.target is operator.getitem else piece
    found: Node = _before(cutter.args[0])
    return found


def _place(piece: Node) -> tuple[int, int, int]:
    """The dim, and the first and last index (not included) of a piece."""
    shape = _source(piece).meta["val"].shape
    if piece.target is operator.getitem:
        cutter, index = piece.args
        given = cutter.args[-1] if len(cutter.args) > (1 if cutter.target in _ONE_AT else 2) else cutter.kwargs.get("dim", 0)  # type: ignore[union-attr]
        dim = given % len(shape)  # type: ignore[operator]
        if cutter.target in _ONE_AT:  # type: ignore[union-attr]
            return dim, index, index + 1  # type: ignore[return-value, operator]
        sizes = [part.shape[dim] for part in cutter.meta["val"]]  # type: ignore[union-attr]
        start = sum(sizes[:index])  # type: ignore[misc]
        return dim, start, start + sizes[index]  # type: ignore[index]
    dim, *rest = (piece.args[1:] or (0,))  # type: ignore[misc]
    dim %= len(shape)  # type: ignore[operator]
    if piece.target is aten.select.int:
        start = rest[0] % shape[dim]  # type: ignore[operator]
        return dim, start, start + 1
    if piece.target is aten.narrow.default:
        start = rest[0] % shape[dim]  # type: ignore[operator]
        return dim, start, start + rest[1]  # type: ignore[operator]
    first, last, step = slice(*(*rest, None, None)[: max(len(rest), 2)]).indices(shape[dim])  # type: ignore[misc]
    return (dim, first, max(first, last)) if step == 1 else (dim, 0, 1)


def _within(piece: Node, blocks: Blocks) -> Blocks | None:
    """The blocks in a piece; None where it is one."""
    dim, start, end = _place(piece)
    size = _source(piece).meta["val"].shape[dim] // blocks.count
    return Blocks(dim, (end - start) // size) if end - start > size else None


def _cut(node: Node, value: Tensor, blocks: Blocks) -> Any:
    """What a cutter gives, or a piece."""
    size, drops = _source(node).meta["val"].shape[blocks.dim] // blocks.count, node.target in _ONE_AT
    if not _is_cutter(node):
        _, start, end = _place(node)
        if end - start > size:
            return value.narrow(blocks.dim, start // size, (end - start) // size)
        block = value.select(blocks.dim, start // size)
        return block.squeeze(blocks.dim) if drops else block
    if drops or all(part.shape[blocks.dim] == size for part in node.meta["val"]):
        return tuple(block.squeeze(blocks.dim) if drops else block for block in value.unbind(blocks.dim))
    parts = value.split([part.shape[blocks.dim] // size for part in node.meta["val"]], blocks.dim)
    return tuple(part.squeeze(blocks.dim) if part.shape[blocks.dim] == 1 else part for part in parts)


# --- what carries blocks ----------------------------------------------------------------------------------------------

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


def _carrier(node: Node) -> Carrier | None:
    if node.op != "call_function" or recognised(node)[0] is not node.target or not isinstance(node.meta.get("val"), Tensor):
        return None
    found = _CARRIERS.get(node.target)
    if found is None and torch_compat.is_operator(node.target) and not torch_compat.schema_of(node.target).is_mutable:
        return _ELEMENTWISE if node.target in _LIKE_ELEMENTWISE or torch.Tag.pointwise in node.target.tags else None  # type: ignore[union-attr]
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
    if out.dim != node.meta["val"].dim() - 1 or weight.meta["val"].dim() != 2:  # type: ignore[union-attr]
        return {}
    return {source: Blocks(0, out.count) for source in (weight, *bias) if isinstance(source, Node)}


def _run_linear(node: Node, out: Blocks, given: Given, call: Callable[..., Any]) -> Any:
    return linear(*(given.get(source) for source in node.args))  # type: ignore[arg-type]


def _reads_product(node: Node, out: Blocks) -> Wanted:
    """Of ``matmul(a, b)`` and ``addmm(bias, a, b)``: the last dim of ``b``, and of the bias where it has it."""
    *bias, _, b = node.args
    rank = b.meta["val"].dim()  # type: ignore[union-attr]
    if out.dim != node.meta["val"].dim() - 1 or rank < 2:
        return {}
    extent = node.meta["val"].shape[-1]
    found = {b: Blocks(rank - 1, out.count)}
    for source in bias:
        shape = source.meta["val"].shape  # type: ignore[union-attr]
        if shape and shape[-1] != extent:
            return {}
        if shape:
            found[source] = Blocks(len(shape) - 1, out.count)  # type: ignore[index]
    return found  # type: ignore[return-value]


def _run_product(node: Node, out: Blocks, given: Given, call: Callable[..., Any]) -> Any:
    function = addmm if len(node.args) == 3 else matmul
    return function(*(given[source] for source in node.args), **node.kwargs, blocks=True)  # type: ignore[index, operator, arg-type]


def _reads_experts(node: Node, out: Blocks) -> Wanted:
    """Of a product of rows by their experts' matrices: the dim of the matrices that is the result's."""
    _, matrices, _, result = experts.parse(node.args[3])  # type: ignore[arg-type]
    name = result[out.dim]
    return {node.args[1]: Blocks(matrices.index(name), out.count)} if name in matrices else {}  # type: ignore[dict-item]


def _run_experts(node: Node, out: Blocks, given: Given, call: Callable[..., Any]) -> Any:
    first, second, rows, result = experts.parse(node.args[3])  # type: ignore[arg-type]
    name = result[out.dim]
    parted = {name: (f"{name}block", name)}
    second, result = (tuple(part for one in term for part in parted.get(one, (one,))) for term in (second, result))
    tensors = (given[source] for source in node.args[:3])  # type: ignore[index]
    return call(*tensors, experts.write(first, second, rows, result), *node.args[4:])


def _order(node: Node) -> list[int]:
    """Of an operator that moves dims, the input's dim in the place of each of the result's."""
    rank = node.meta["val"].dim()
    if node.target is aten.permute.default:
        return [dim % rank for dim in node.args[1]]  # type: ignore[union-attr]
    a, b = (0, -1) if node.target in (aten.t.default, aten.numpy_T.default) else (-1, -2) if len(node.args) == 1 else node.args[1:]
    order = list(range(rank))
    if rank > 1:
        order[a], order[b] = order[b], order[a]  # type: ignore[index]
    return order


def _reads_moved(node: Node, out: Blocks) -> Wanted:
    if node.target is aten.numpy_T.default and node.meta["val"].dim() > 2:
        return {}
    return {node.args[0]: Blocks(_order(node)[out.dim], out.count)}  # type: ignore[dict-item]


def _run_moved(node: Node, out: Blocks, given: Given, call: Callable[..., Any]) -> Any:
    order = _order(node)
    at = order[out.dim]
    places = [place for dim in order for place in ((at, at + 1) if dim == at else (dim + (dim > at),))]
    return given[node.args[0]].permute(places)  # type: ignore[index]


def _reads_viewed(node: Node, out: Blocks) -> Wanted:
    """The dim that begins where the result's does, and has as many blocks."""
    source: Any = node.args[0]
    before, shape = math.prod(node.meta["val"].shape[: out.dim]), source.meta["val"].shape
    for dim, extent in enumerate(shape):
        if extent > 1 and math.prod(shape[:dim]) == before and extent % out.count == 0:
            return {source: Blocks(dim, out.count)}
    return {}


def _run_viewed(node: Node, out: Blocks, given: Given, call: Callable[..., Any]) -> Any:
    return given[node.args[0]].reshape(out.shape(node.meta["val"].shape))  # type: ignore[index]


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
