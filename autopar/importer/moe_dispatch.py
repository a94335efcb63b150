"""Mixtures of experts: a sort by expert becomes a dispatch of rows to their experts, and the rows put back a combine.

A mixture of experts sorts the choices of all tokens by expert, runs grouped products on the sorted rows, and puts them back. Sorting needs
all choices on one rank; by hand each rank sorts its own or sends them to who has their experts, since no row depends on its place. So the
exported graph is followed from the sort: rows taken by it, operators that keep rows apart, grouped products whose groups end at the
experts' counts, up to the rows put back. Then rows taken are ``autopar.dispatch``, ``[experts, columns, ...]``, products
``autopar.expert_contract``, and rows put back ``autopar.combine``. Where any step is not known to keep rows apart, the sort stays.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from autopar import torch_compat
from autopar.importer.rewrite.experts import registered

aten = torch.ops.aten
Kind = Literal["rows", "order", "inverse"]
_CONVERSIONS = (aten.to.dtype, aten.to.dtype_layout, aten._to_copy.default, aten.clone.default, aten.contiguous.default)
_SORTS = (aten.sort.default, aten.sort.stable, aten.argsort.default, aten.argsort.stable)
_ZEROS = (aten.zeros_like.default, aten.new_zeros.default, aten.zeros.default)
_BLANKS = (*_ZEROS, aten.empty_like.default, aten.new_empty.default)
_CHECK = aten._assert_tensor_metadata.default
FEW_COLUMNS = 8
"""Columns that may be added so that ranks may split them, and the share of all that may be: an eighth."""


@dataclass(frozen=True)
class _State:
    """What a node is in the order of a sort.

    Args:
        kind: ``rows``: its rows are in that order. ``order``: entry ``i`` is the row that stands there; ``inverse``: where row ``i`` is.
        each: of an order, the rows that come of one row of what it is taken from.
    """

    kind: Kind
    each: int = 1


@dataclass
class _Region:
    """What follows from one sort.

    Args:
        sort: the node.
        states: of the nodes in its order.
        instead: the replacement of a node once rows are dispatched; a node without one stays.
        spare: other nodes that are needed for these alone, if nobody else reads them.
        experts: how many there are by the grouped products that were met; 0 before the first.
        numbers: the node of each dispatched row's expert, once it is made.
    """

    sort: Node
    states: dict[Node, _State] = field(default_factory=dict)
    instead: dict[Node, Callable[[], Node]] = field(default_factory=dict)
    spare: list[Node] = field(default_factory=list)
    experts: int = 0
    numbers: Node | None = None

    @property
    def graph(self) -> torch.fx.Graph:
        return self.sort.graph

    @property
    def ids(self) -> Node:
        """``[s]``: each row's expert."""
        found: Any = self.sort.args[0]
        return found

    @property
    def rows(self) -> int:
        return int(self.ids.meta["val"].shape[0])

    @property
    def leading(self) -> tuple[int, int]:
        """The dims of dispatched rows: experts and columns, as few as hold all choices; where these do not fill them, so that what divides
        the choices divides the columns too, as far as that adds few."""
        columns, left = -(-self.rows // self.experts), self.rows % self.experts
        if not left:
            return self.experts, columns
        step = next(step for step in range(max(columns // FEW_COLUMNS, FEW_COLUMNS), 0, -1) if self.rows % step == 0)
        return self.experts, -(-columns // step) * step


class _Unknown(Exception):
    """A step that is not known to keep rows apart."""


def dispatch_rows(module: GraphModule) -> None:
    """Changes the exported graph, and those of its regions, where rows are sorted for grouped products."""
    for node in list(module.graph.nodes):
        if node.op == "call_function" and torch_compat.runs_a_graph(node.target):
            for item in node.args:
                if isinstance(item, Node) and item.op == "get_attr" and isinstance(getattr(module, str(item.target), None), GraphModule):
                    dispatch_rows(getattr(module, str(item.target)))
        elif node.target in _SORTS and node.args[0].meta["val"].dim() == 1:
            region = _Region(node)
            try:
                _follow(region)
            except _Unknown:
                continue
            if region.experts:
                _put_in(region)


# --- following --------------------------------------------------------------------------------------------------------


def _follow(region: _Region) -> None:
    """Raises _Unknown: somebody reads what is in the sort's order otherwise than row by row."""
    sort, kwargs = region.sort, dict(region.sort.kwargs)
    if region.rows < 2 or len(sort.args) > 2 or kwargs.keys() - {"stable", "dim"} or _written(region.ids):
        raise _Unknown
    if sort.target in (aten.argsort.default, aten.argsort.stable):
        region.states[sort] = _State("order")
    after = False
    for node in region.graph.nodes:
        after = after or node is region.sort
        if not after or node is region.sort or not any(source in region.states or source is region.sort for source in node.all_input_nodes):
            continue
        if node.op != "call_function":
            raise _Unknown
        if node.target is not _CHECK:
            _step(region, node)


def _written(node: Any) -> bool:
    """Whether somebody writes to a node, or to anything that shares its storage."""
    while _shares(node):
        node = node.args[0]
    pending = [node]
    while pending:
        for user in pending.pop().users:
            if torch_compat.is_operator(user.target) and torch_compat.schema_of(user.target).is_mutable:
                return True
            if _shares(user):
                pending.append(user)
    return False


def _shares(node: Node) -> bool:
    """Whether a node may be a view of its first argument."""
    if node.target is operator.getitem:
        return _shares(node.args[0])
    known = torch_compat.is_operator(node.target) and any(item.alias_info for item in torch_compat.schema_of(node.target).returns)
    return known or node.target in _VIEWS or node.target in _CONVERSIONS


def _step(region: _Region, node: Node) -> None:
    """What a node is that reads something in the sort's order."""
    if node.target is operator.getitem and node.args[0] is region.sort:
        region.states[node] = _State("order") if node.args[1] else _State("rows")
        if not node.args[1]:
            region.instead[node] = lambda: _dispatch_ids(region, node)
        return
    step = _product if node.target in _products() else _STEPS.get(node.target)
    if step is not None and step(region, node):
        return
    kinds = {region.states[source].kind for source in node.all_input_nodes if source in region.states}
    if node.target in _CONVERSIONS and len(node.all_input_nodes) == 1:
        region.states[node] = region.states[node.all_input_nodes[0]]
        if kinds == {"rows"}:
            region.instead[node] = lambda: _over_rows(region, node)
    elif kinds == {"rows"} and _keeps_rows(region, node):
        region.states[node] = _State("rows")
        region.instead[node] = lambda: _over_rows(region, node)
    else:
        raise _Unknown


def _state(region: _Region, item: Any, kind: Kind) -> _State | None:
    found = region.states.get(item) if isinstance(item, Node) else None
    return found if found is not None and found.kind == kind else None


def _divided(region: _Region, node: Node) -> bool:
    """``order // each``: which token a row is of."""
    order, each = node.args[:2]
    state = _state(region, order, "order")
    floors = node.target is aten.floor_divide.default or node.kwargs.get("rounding_mode") == "floor"
    if state is None or state.each != 1 or not floors or not isinstance(each, int) or each < 1 or region.rows % each:
        return False
    region.states[node] = _State("order", each)
    return True


def _taken(region: _Region, node: Node) -> bool:
    """``x[order]``: rows come into the order; ``x[inverse]``: they go back; ``table[rows]``: each row looks something up."""
    x: Any = node.args[0]
    found = node.args[1] if node.target is aten.index.Tensor else [node.args[2]] if node.args[1] == 0 else []
    index = found[0] if isinstance(found, list | tuple) and len(found) == 1 else None
    order, inverse = _state(region, index, "order"), _state(region, index, "inverse")
    if order is not None and x not in region.states and x.meta["val"].shape[0] * order.each == region.rows:
        region.states[node] = _State("rows")
        region.instead[node] = lambda: _dispatch(region, node, node.args[0])
    elif inverse is not None and _state(region, x, "rows"):
        _put_back(region, node)
    elif node.target is aten.index.Tensor and _state(region, index, "rows") and x not in region.states:
        region.states[node] = _State("rows")
        region.instead[node] = lambda: _over_rows(region, node)
    else:
        return False
    return True


def _blank(region: _Region, node: Node) -> bool:
    """A tensor made like another, to be filled: it holds nothing of it."""
    region.spare.append(node)
    return True


def _filled(region: _Region, node: Node) -> bool:
    """``blank[order] = arange``: the inverse; ``base[order] += rows``: the rows go back."""
    if node.target in (aten.index_put.default, aten.index_put_.default):
        base, indices, values = node.args[:3]
        index = indices[0] if len(indices) == 1 else None
        adds = bool((node.args[3:] or (node.kwargs.get("accumulate", False),))[0])
    else:
        base, dim, index, values = node.args[:4]
        adds = True
        if dim != 0 or node.kwargs.get("alpha", 1) != 1:
            return False
    state, size = _state(region, index, "order"), region.rows
    if state is None or not isinstance(base, Node) or base in region.states or not isinstance(values, Node):
        return False
    written = torch_compat.schema_of(node.target).is_mutable and len(base.users) > 1
    covered = base.target in _BLANKS and base.meta["val"].shape[0] * state.each == size
    if not adds and not written and state.each == 1 and covered and _counts_up(values, size):
        region.states[node] = _State("inverse")
        return True
    if _state(region, values, "rows") is None or not covered or written or (state.each > 1 and not adds):
        return False
    if values.meta["val"].shape[1:] != base.meta["val"].shape[1:] or (adds and base.target not in _ZEROS):
        return False
    each, place = state.each, node.args.index(values)
    region.instead[node] = lambda: _combine(region, node, node.args[place], each)
    return True


def _put_back(region: _Region, node: Node) -> None:
    """Rows in the order of their tokens; where those of a token are added up next, their sum."""
    shape, viewed = list(node.meta["val"].shape), next(iter(node.users), node)
    parted = list(viewed.meta["val"].shape) if viewed.target in (aten.view.default, aten.reshape.default) else []
    added = next(iter(viewed.users)) if len(node.users) == len(viewed.users) == 1 else None
    token = len(parted) == len(shape) + 1 and parted[0] * parted[1] == region.rows and parted[2:] == shape[1:]
    if token and added is not None and added.target is aten.sum.dim_IntList and added.args[1:] == ([1],) and not added.kwargs:
        region.spare += [node, viewed]
        region.instead[added] = lambda: _combine(region, added, node.args[0], parted[1])
    else:
        region.instead[node] = lambda: _combine(region, node, node.args[0], 1)


def _counts_up(node: Node, size: int) -> bool:
    node = _unconverted(node)
    return node.target is aten.arange.default and node.args == (size,)


def _counted(region: _Region, node: Node) -> bool:
    """A histogram does not ask in which order things come."""
    if _state(region, node.args[0], "rows") is None:
        return False
    region.instead[node] = lambda: _of_ids(region, node)
    return True


def _product(region: _Region, node: Node) -> bool:
    """A product whose groups are the experts' rows: it is told the experts."""
    x, weights, *rest = node.args
    ends: Any = rest[0] if rest else node.kwargs.get("offs")
    if _state(region, x, "rows") is None or weights in region.states or ends is None:
        return False
    extra = [item for item in rest[1:] if item not in (None, 0)] + [item for key, item in node.kwargs.items() if key != "offs" and item]
    if extra or weights.meta["val"].dim() != 3 or not _ends_of(region, ends, int(weights.meta["val"].shape[0])):
        return False
    experts = int(weights.meta["val"].shape[0])
    if region.experts not in (0, experts):
        return False
    region.states[node], region.experts = _State("rows"), experts
    region.instead[node] = lambda: _by_expert(region, node)
    return True


def _products() -> set[Any]:
    """Grouped products: ours, torch's, and those of libraries that are loaded."""
    return {torch.ops.autopar.grouped_mm.default, *registered()}


_STEPS: Mapping[Any, Callable[[_Region, Node], bool]] = {
    **dict.fromkeys((aten.floor_divide.default, aten.div.Tensor_mode, aten.floor_divide.Scalar, aten.div.Scalar_mode), _divided),
    **dict.fromkeys((aten.index.Tensor, aten.index_select.default), _taken),
    **dict.fromkeys((aten.empty_like.default, aten.zeros_like.default), _blank),
    **dict.fromkeys((aten.index_put.default, aten.index_put_.default, aten.index_add.default, aten.index_add_.default), _filled),
    aten.histc.default: _counted,
}


# --- where groups end -------------------------------------------------------------------------------------------------


def _unconverted(node: Any) -> Any:
    while isinstance(node, Node) and node.target in _CONVERSIONS:
        node = node.args[0]
    return node


def _ends_of(region: _Region, node: Any, experts: int) -> bool:
    """Whether a node is the running sum of how many rows each expert has."""
    total = _unconverted(node)
    if not isinstance(total, Node) or total.target is not aten.cumsum.default or total.args[1] not in (0, -1):
        return False
    counts = _unconverted(total.args[0])
    if counts.target is aten.histc.default:
        given = (*counts.args[1:], *counts.kwargs.values())
        return given == (experts, 0, experts - 1) and _is_ids(region, counts.args[0])
    if counts.target is aten.sum.dim_IntList and tuple(counts.args[1]) == (0,):
        return _chosen(region, _unconverted(counts.args[0]), experts)
    return False


def _chosen(region: _Region, node: Node, experts: int) -> bool:
    """Whether ``[s, experts]`` says which expert each row has: ``ids[:, None] == arange(experts)``, or one-hot."""
    if node.target is aten.one_hot.default:
        return node.args[1:] == (experts,) and _is_ids(region, node.args[0])
    if node.target is not aten.eq.Tensor:
        return False
    column, numbers = node.args
    spread = isinstance(column, Node) and column.target is aten.unsqueeze.default and column.args[1] in (1, -1)
    return spread and _counts_up(numbers, experts) and _is_ids(region, column.args[0])


def _is_ids(region: _Region, node: Any) -> bool:
    """Whether these are the experts of the rows, in whatever order."""
    node = _unconverted(node)
    if node.target is operator.getitem and node.args[0] is region.sort:
        return node.args[1] == 0
    return _same(node, _unconverted(region.ids))


def _same(one: Any, other: Any) -> bool:
    """Whether two nodes are the same by how they are made, of operators that write nowhere."""
    if one is other or not (isinstance(one, Node) and isinstance(other, Node)):
        return bool(one is other or (type(one) is type(other) and not isinstance(one, Node) and one == other))
    if one.op != "call_function" or one.target is not other.target or len(one.args) != len(other.args) or one.kwargs != other.kwargs:
        return False
    if not torch_compat.is_operator(one.target) or torch_compat.schema_of(one.target).is_mutable:
        return False
    tags = one.target.tags
    return torch.Tag.nondeterministic_seeded not in tags and all(map(_same, one.args, other.args))


# --- what keeps rows apart --------------------------------------------------------------------------------------------

_CUT_AT = frozenset({
    aten.chunk.default, aten.split.Tensor, aten.split_with_sizes.default, aten.slice.Tensor, aten.select.int, aten.narrow.default,
    aten.unbind.int, aten.cat.default, aten.softmax.int, aten._softmax.default, aten.sum.dim_IntList, aten.mean.dim, aten.glu.default,
})  # fmt: skip
"""Operators along one dim, or some."""
_PLACE_OF_DIM = {aten.slice.Tensor: 1, aten.select.int: 1, aten.narrow.default: 1, aten.unbind.int: 1, aten.softmax.int: 1,
                 aten._softmax.default: 1, aten.sum.dim_IntList: 1, aten.mean.dim: 1, aten.cat.default: 1, aten.glu.default: 1}  # fmt: skip
_VIEWS = frozenset({
    aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.flatten.using_ints, aten.unflatten.int, aten.squeeze.dim,
    aten.squeeze.default, aten.unsqueeze.default, aten.expand.default,
})  # fmt: skip
_LIKE_POINTWISE = frozenset({*_CONVERSIONS, aten.masked_fill.Scalar, aten.masked_fill_.Scalar, aten.detach.default, aten.alias.default})


def _keeps_rows(region: _Region, node: Node) -> bool:
    """Whether each row of the result is made of the same rows of what is in the sort's order, and of nothing else's rows."""
    if node.target is operator.getitem:
        return node.args[0].target in _CUT_AT
    rows = [source for source in node.all_input_nodes if source in region.states]
    rest = [source for source in node.all_input_nodes if source not in region.states]
    results = list(torch_compat.leaves_of(node.meta["val"]))
    if not all(isinstance(value, Tensor) and value.dim() and value.shape[0] == region.rows for value in results):
        return False
    if any(source.meta["val"].shape[:1] != (region.rows,) for source in rows if isinstance(source.meta["val"], Tensor)):
        return False
    if node.target in _CUT_AT:
        return not rest and 0 not in _dims(node, rows[0].meta["val"].dim())
    if node.target in _VIEWS:
        return True  # in order of memory, equal leading dims hold equal rows
    if node.target in (aten.linear.default, aten.matmul.default, aten.mm.default):
        return node.args[0] in rows and len(rows) == 1
    if node.target is aten.layer_norm.default or node.target is aten.rms_norm.default:
        return node.args[0] in rows and len(rows) == 1 and len(node.args[1]) < rows[0].meta["val"].dim()
    tags = getattr(node.target, "tags", ())
    if node.target not in _LIKE_POINTWISE and (torch.Tag.pointwise not in tags or torch.Tag.nondeterministic_seeded in tags):
        return False
    rank = results[0].dim()
    apart = all(source.meta["val"].dim() < rank or source.meta["val"].shape[0] == 1 for source in rest)
    return apart and all(source.meta["val"].dim() == rank for source in rows) and (node.args[0] in rows or not _writes(node))


def _writes(node: Node) -> bool:
    return bool(torch_compat.schema_of(node.target).is_mutable)


def _dims(node: Node, rank: int) -> set[int]:
    """The dims along which an operator works; 0 where it does not say."""
    place = _PLACE_OF_DIM.get(node.target, 2)
    given: Any = node.args[place] if len(node.args) > place else node.kwargs.get("dim", 0)
    return {dim % rank for dim in (given if isinstance(given, list | tuple) else [given])} if given not in ([], None) else {0}


# --- dispatch and combine ---------------------------------------------------------------------------------------------


def _put_in(region: _Region) -> None:
    """The nodes that stand for others, in order, so that each reads what stands for what it read; what only the order was for goes."""
    for node in [node for node in region.graph.nodes if node in region.instead]:
        node.replace_all_uses_with(region.instead[node]())
    spare = {region.sort, *region.states, *region.instead, *region.spare}
    for node in reversed(list(region.graph.nodes)):
        if not node.users and (node in spare or (node.target is _CHECK and node.args[0] in spare)):
            region.graph.erase_node(node)
    region.graph.lint()


def _made(region: _Region, at: Node, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> Node:
    """A new node before ``at``, with its place in the user's code."""
    with region.graph.inserting_before(at):
        made = region.graph.call_function(target, args, dict(kwargs or {}))
    made.meta = dict(at.meta)
    values = torch.fx.node.map_arg((args, dict(kwargs or {})), lambda source: source.meta["val"])
    made.meta["val"] = target(*values[0], **values[1])
    return made


def _dispatch(region: _Region, at: Node, x: Any) -> Node:
    """The rows of ``x``, each as often as its token has choices, among those of their experts."""
    experts, columns = region.leading
    return _made(region, at, torch.ops.autopar.dispatch.default, (x, region.ids, experts, 0, columns))


def _dispatch_ids(region: _Region, at: Node) -> Node:
    """The expert of each row, made once, where it is read first."""
    if region.numbers is None:
        experts, columns = region.leading
        region.numbers = _made(region, at, torch.ops.autopar.dispatch_ids.default, (region.ids, experts, 0, columns))
    return region.numbers


def _of_ids(region: _Region, at: Node) -> Node:
    """The same of each row's expert in the order of the tokens."""
    ids = _made(region, at, aten.to.dtype, (region.ids, at.args[0].meta["val"].dtype))
    return _made(region, at, at.target, (ids, *at.args[1:]), at.kwargs)


def _combine(region: _Region, at: Node, x: Any, choices: int) -> Node:
    """The sum of each token's rows, in what it is converted to next; weights that rows are multiplied by are left to it."""
    dtype, (rows, weights) = x.meta["val"].dtype, _weighted(region, x)
    after = next(iter(at.users), at)
    if len(at.users) == 1 and after.target in (aten.to.dtype, aten._to_copy.default) and len(after.args) + len(after.kwargs) == 2:
        dtype = after.meta["val"].dtype
    return _made(region, at, torch.ops.autopar.combine.default, (rows, region.ids, weights, region.experts, 0, choices, dtype))


def _weighted(region: _Region, x: Node) -> tuple[Node, Node | None]:
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


def _by_expert(region: _Region, at: Node) -> Node:
    """The grouped product as one that is told each row's expert; matrices that were turned for it are read as they lie."""
    x, weights = at.args[:2]
    matrices = "e k n"
    if weights.target in (aten.transpose.int, aten.mT.default) and {dim % 3 for dim in (*weights.args[1:], -1, -2)} == {1, 2}:
        region.spare.append(weights)
        weights, matrices = weights.args[0], "e n k"
    equation = f"e j k, {matrices}, e j -> e j n"
    numbers = _dispatch_ids(region, at)
    return _made(region, at, torch.ops.autopar.expert_contract.default, (x, weights, numbers, equation, region.experts, 0))


def _over_rows(region: _Region, at: Node) -> Node:
    """The same of dispatched rows, which have one dim more."""
    args, kwargs = list(at.args), dict(at.kwargs)
    if at.target in _VIEWS:
        target = aten.expand.default if at.target is aten.expand.default else aten.reshape.default
        return _made(region, at, target, (args[0], [*region.leading, *at.meta["val"].shape[1:]]))
    if at.target in _CUT_AT:
        place = _PLACE_OF_DIM.get(at.target, 2)
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
