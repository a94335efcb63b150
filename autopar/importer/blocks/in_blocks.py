"""Weights in blocks: one weight for queries, keys and values, or for gate and up.

Such a weight has a dim of equal blocks. Split evenly, a rank would hold a part of one block, and cutting the product into its blocks would
gather it. So the dim that the model cuts is followed back through contractions, elementwise operators and views to the parameters. All of
these are traced with two dims in its place: the block, and the place in the block. Ranks split the second like any other dim. A dim that
is also read whole, or that comes from no parameter, stays one dim.
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
from autopar.importer.blocks.cutting import before, cut, is_cutter, is_piece, is_whole, place_of, source_of, within
from autopar.importer.blocks.propagation import Wanted, carrier_of
from autopar.importer.export.exported import Exported, Value
from autopar.sharding import Blocks

aten = torch.ops.aten
_REGIONS = ("wrap_with_set_grad_enabled", "wrap_with_autocast")
"""Operators that run one graph once, on their last arguments."""
LEAST = 2
"""Elements of the dim in a block, at least: a block of one cannot be split."""

Plain = Mapping[str, frozenset[int]]
"""By parameter, the dims that are not cut into blocks, since a pin says how they are split."""


@dataclass(frozen=True)
class InBlocks:
    """What is held in blocks: nodes of the exported graph and of the regions in it, and parameters by name."""

    nodes: Mapping[Node, Blocks]
    parameters: Mapping[str, Blocks]

    def concerns(self, node: Node) -> bool:
        """Whether a node gives blocks, or is cut out of them."""
        if node.target is operator.getitem:
            return False
        return node in self.nodes or ((is_piece(node) or is_cutter(node) or is_whole(node)) and source_of(node) in self.nodes)

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
        if is_whole(node):
            return values[node.args[0]]
        if is_piece(node) or is_cutter(node):
            return cut(node, values[source_of(node)], self.nodes[source_of(node)])
        carrier = carrier_of(node)
        assert carrier is not None
        given = {source: values[source] for source in node.all_input_nodes}
        for source, blocks in carrier.reads(node, self.nodes[node]).items():
            if before(source) not in self.nodes:
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
        elif not is_piece(node) and carrier_of(node) is None:
            continue
        found[node] = blocks
    return found


def _asked(node: Node, wanted: Wanted) -> Blocks | None:
    if not isinstance(node.meta.get("val"), Tensor):
        return None
    pieces, asked = list[Node](), set[Blocks | None]()
    for user in _users(node):
        if is_piece(user):
            pieces.append(user)
        elif is_cutter(user):
            pieces += user.users
        else:
            asked.add(_reads(user, wanted[user]).get(node) if user in wanted else None)
    if pieces:
        asked.add(_of_pieces(node, pieces, wanted))
    return asked.pop() if len(asked) == 1 else None


def _of_pieces(node: Node, pieces: list[Node], wanted: Wanted) -> Blocks | None:
    """The blocks that a node is cut into: all of one size, or several together where they are read in blocks again."""
    if not all(map(is_piece, pieces)):
        return None
    places = [place_of(piece) for piece in pieces]
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
    if is_piece(node):
        source = source_of(node)
        return source in kept and kept[node] == within(node, kept[source])
    carrier, reads = carrier_of(node), _reads(node, kept[node])
    assert carrier is not None
    size, of = node.meta["val"].numel(), carrier.of
    made_of = [source for source in reads if (source.meta["val"].numel() == size if of is None else source is before(node.args[of]))]
    return bool(made_of) and all(kept.get(source) == reads[source] for source in made_of)


def _goes(node: Node, kept: Wanted) -> bool:
    for user in _users(node):
        pieces = [user] if is_piece(user) else list(user.users) if is_cutter(user) else []
        if any(kept.get(piece) != inner for piece in pieces if (inner := within(piece, kept[node])) is not None):
            return False
        if not pieces and (user not in kept or _reads(user, kept[user]).get(node) != kept[node]):
            return False
    return True


def _users(node: Node) -> Iterator[Node]:
    for user in node.users:
        if is_whole(user):
            yield from _users(user)
        elif user.target is not aten._assert_tensor_metadata.default:
            yield user


def _reads(node: Node, blocks: Blocks) -> Wanted:
    """What an operator reads in blocks where its result is to be in these."""
    carrier = carrier_of(node)
    return {before(source): found for source, found in carrier.reads(node, blocks).items()} if carrier is not None else {}


def _divided(value: Tensor, blocks: Blocks) -> Tensor:
    return value.unflatten(blocks.dim, (blocks.count, -1))
