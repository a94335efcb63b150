"""Mixtures of experts: a sort by expert becomes a dispatch of rows to their experts, and the rows put back a combine.

A mixture of experts sorts the choices of all tokens by expert, runs grouped products on the sorted rows, and puts them back. Sorting needs
all choices on one rank; by hand each rank sorts its own or sends them to who has their experts, since no row depends on its place. So the
exported graph is followed from the sort (``sorted_rows``). Rows taken become ``autopar.dispatch``, ``[experts, columns, ...]``, products
``autopar.expert_contract``, and rows put back ``autopar.combine``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import GraphModule, Node

from autopar import torch_compat
from autopar.importer.experts.sorted_rows import CHECK, CUT_AT, PLACE_OF_DIM, SORTS, VIEWS, Change, Region, UnknownStepError, follow_rows

aten = torch.ops.aten


def dispatch_rows(module: GraphModule) -> None:
    """Changes the exported graph, and those of its regions, where rows are sorted for grouped products."""
    for node in list(module.graph.nodes):
        if node.op == "call_function" and torch_compat.runs_a_graph(node.target):
            for item in node.args:
                if isinstance(item, Node) and item.op == "get_attr" and isinstance(getattr(module, str(item.target), None), GraphModule):
                    dispatch_rows(getattr(module, str(item.target)))
        elif node.target in SORTS and node.args[0].meta["val"].dim() == 1:
            region = Region(node)
            try:
                follow_rows(region)
            except UnknownStepError:
                continue
            if region.experts:
                _put_in(region)


def _put_in(region: Region) -> None:
    """The nodes that stand for others, in order, so that each reads what stands for what it read; what only the order was for goes."""
    for node in [node for node in region.graph.nodes if node in region.instead]:
        node.replace_all_uses_with(_make(region, node, region.instead[node]))
    spare = {region.sort, *region.states, *region.instead, *region.spare}
    for node in reversed(list(region.graph.nodes)):
        if not node.users and (node in spare or (node.target is CHECK and node.args[0] in spare)):
            region.graph.erase_node(node)
    region.graph.lint()


def _make(region: Region, at: Node, change: Change) -> Node:
    """The replacement of a node, inserted before it."""
    match change.kind:
        case "dispatch":
            return _dispatch(region, at, at.args[0])
        case "numbers":
            return _dispatch_ids(region, at)
        case "rows":
            return _over_rows(region, at)
        case "histogram":
            return _of_ids(region, at)
        case "product":
            return _by_expert(region, at)
        case "combine":
            return _combine(region, at, (change.source or at).args[change.place], change.choices)


def _made(region: Region, at: Node, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> Node:
    """A new node before ``at``, with its place in the user's code."""
    with region.graph.inserting_before(at):
        made = region.graph.call_function(target, args, dict(kwargs or {}))
    made.meta = dict(at.meta)
    values = torch.fx.node.map_arg((args, dict(kwargs or {})), lambda source: source.meta["val"])
    made.meta["val"] = target(*values[0], **values[1])
    return made


def _dispatch(region: Region, at: Node, x: Any) -> Node:
    """The rows of ``x``, each as often as its token has choices, among those of their experts."""
    experts, columns = region.leading
    return _made(region, at, torch.ops.autopar.dispatch.default, (x, region.ids, experts, 0, columns))


def _dispatch_ids(region: Region, at: Node) -> Node:
    """The expert of each row, made once, where it is read first."""
    if region.numbers is None:
        experts, columns = region.leading
        region.numbers = _made(region, at, torch.ops.autopar.dispatch_ids.default, (region.ids, experts, 0, columns))
    return region.numbers


def _of_ids(region: Region, at: Node) -> Node:
    """The same of each row's expert in the order of the tokens."""
    ids = _made(region, at, aten.to.dtype, (region.ids, at.args[0].meta["val"].dtype))
    return _made(region, at, at.target, (ids, *at.args[1:]), at.kwargs)


def _combine(region: Region, at: Node, x: Any, choices: int) -> Node:
    """The sum of each token's rows, in what it is converted to next; weights that rows are multiplied by are left to it."""
    dtype, (rows, weights) = x.meta["val"].dtype, _weighted(region, x)
    after = next(iter(at.users), at)
    if len(at.users) == 1 and after.target in (aten.to.dtype, aten._to_copy.default) and len(after.args) + len(after.kwargs) == 2:
        dtype = after.meta["val"].dtype
    return _made(region, at, torch.ops.autopar.combine.default, (rows, region.ids, weights, region.experts, 0, choices, dtype))


def _weighted(region: Region, x: Node) -> tuple[Node, Node | None]:
    """Rows, and the weights ``[s]`` by which they are multiplied, if that is all that they are read for."""
    if x.target is not aten.mul.Tensor or len(x.users) > 1:
        return x, None
    for rows, column in (x.args, x.args[::-1]):
        sent = column.args[0] if isinstance(column, Node) and column.target is aten.reshape.default else column
        if not isinstance(sent, Node) or sent.target is not torch.ops.autopar.dispatch.default or not isinstance(rows, Node):
            continue
        weights: Any = sent.args[0]
        lone = math.prod(column.meta["val"].shape) == math.prod(region.leading)
        if lone and weights.meta["val"].shape == (region.rows,) and rows.meta["val"].shape == x.meta["val"].shape:
            region.spare += [x, column, sent]
            return rows, weights
    return x, None


def _by_expert(region: Region, at: Node) -> Node:
    """The grouped product as one that is told each row's expert; matrices that were turned for it are read as they lie."""
    x, weights = at.args[:2]
    matrices = "e k n"
    if weights.target in (aten.transpose.int, aten.mT.default) and {dim % 3 for dim in (*weights.args[1:], -1, -2)} == {1, 2}:
        region.spare.append(weights)
        weights, matrices = weights.args[0], "e n k"
    equation = f"e j k, {matrices}, e j -> e j n"
    numbers = _dispatch_ids(region, at)
    return _made(region, at, torch.ops.autopar.expert_contract.default, (x, weights, numbers, equation, region.experts, 0))


def _over_rows(region: Region, at: Node) -> Node:
    """The same of dispatched rows, which have one dim more."""
    args, kwargs = list(at.args), dict(at.kwargs)
    if at.target in VIEWS:
        target = aten.expand.default if at.target is aten.expand.default else aten.reshape.default
        return _made(region, at, target, (args[0], [*region.leading, *at.meta["val"].shape[1:]]))
    if at.target in CUT_AT:
        place = PLACE_OF_DIM.get(at.target, 2)
        if len(args) > place:
            args[place] = _moved_on(args[place])
        else:
            kwargs["dim"] = _moved_on(kwargs["dim"])
    return _made(region, at, aten.matmul.default if at.target is aten.mm.default else at.target, tuple(args), kwargs)


def _moved_on(dims: Any) -> Any:
    """The same dims behind one more; those that count from the end stay."""
    if isinstance(dims, list | tuple):
        return [_moved_on(dim) for dim in dims]
    return dims if dims < 0 else dims + 1
