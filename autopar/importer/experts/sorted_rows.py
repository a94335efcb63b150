"""Rows that a graph sorts by expert, followed from the sort: what is in its order, and what each node becomes once rows are dispatched.

Followed are rows taken by the sort, operators that keep rows apart, and grouped products whose groups end at the experts' counts, up to
the rows put back. Where any step is not known to keep rows apart, the region is unknown, and the sort stays. ``moe_dispatch`` makes the
changes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.fx import Node

from autopar import torch_compat
from autopar.importer.experts.finite_operators import has_margin, stays_finite
from autopar.importer.rewrite.experts import registered

aten = torch.ops.aten
Kind = Literal["rows", "order", "inverse"]
_CONVERSIONS = (aten.to.dtype, aten.to.dtype_layout, aten._to_copy.default, aten.clone.default, aten.contiguous.default)
SORTS = (aten.sort.default, aten.sort.stable, aten.argsort.default, aten.argsort.stable)
_ZEROS = (aten.zeros_like.default, aten.new_zeros.default, aten.zeros.default)
_BLANKS = (*_ZEROS, aten.empty_like.default, aten.new_empty.default)
CHECK = aten._assert_tensor_metadata.default
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


@dataclass(frozen=True)
class Change:
    """The replacement of a node once rows are dispatched.

    Args:
        kind: ``dispatch``: rows that are taken; ``numbers``: each row's expert. ``rows``: the same of dispatched rows. ``histogram``: the
            same of experts in the order of the tokens. ``product``: a grouped product. ``combine``: rows that are put back.
        source, place: of a combine, the node that reads the rows, and as which argument; choices: rows that are added for each token.
    """

    kind: Literal["dispatch", "numbers", "rows", "histogram", "product", "combine"]
    source: Node | None = None
    place: int = 0
    choices: int = 1


@dataclass
class Region:
    """The nodes that one sort changes.

    Args:
        sort: the node.
        states: of the nodes in its order.
        instead: the replacement of a node; a node without one stays.
        spare: other nodes that are needed for these alone, if nobody else reads them.
        experts: how many there are by the grouped products that were met; 0 before the first.
        numbers: the node of each dispatched row's expert, once it is made.
    """

    sort: Node
    states: dict[Node, _State] = field(default_factory=dict)
    instead: dict[Node, Change] = field(default_factory=dict)
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


class UnknownStepError(Exception):
    """A step that is not known to keep rows apart."""


def follow_rows(region: Region) -> None:
    """Raises UnknownStepError: somebody reads what is in the sort's order otherwise than row by row."""
    sort, kwargs = region.sort, dict(region.sort.kwargs)
    if region.rows < 2 or len(sort.args) > 2 or kwargs.keys() - {"stable", "dim"} or _written(region.ids):
        raise UnknownStepError
    if sort.target in (aten.argsort.default, aten.argsort.stable):
        region.states[sort] = _State("order")
    after = False
    for node in region.graph.nodes:
        after = after or node is region.sort
        if not after or node is region.sort or not any(source in region.states or source is region.sort for source in node.all_input_nodes):
            continue
        if node.op != "call_function":
            raise UnknownStepError
        if node.target is not CHECK:
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
    return known or node.target in VIEWS or node.target in _CONVERSIONS


def _step(region: Region, node: Node) -> None:
    """What a node is that reads something in the sort's order."""
    if node.target is operator.getitem and node.args[0] is region.sort:
        region.states[node] = _State("order") if node.args[1] else _State("rows")
        if not node.args[1]:
            region.instead[node] = Change("numbers")
        return
    step = _product if node.target in _products() else _STEPS.get(node.target)
    if step is not None and step(region, node):
        return
    kinds = {region.states[source].kind for source in node.all_input_nodes if source in region.states}
    if node.target in _CONVERSIONS and len(node.all_input_nodes) == 1:
        region.states[node] = region.states[node.all_input_nodes[0]]
        if kinds == {"rows"}:
            region.instead[node] = Change("rows")
    elif kinds == {"rows"} and _keeps_rows(region, node):
        region.states[node] = _State("rows")
        region.instead[node] = Change("rows")
    else:
        raise UnknownStepError


def _state(region: Region, item: Any, kind: Kind) -> _State | None:
    found = region.states.get(item) if isinstance(item, Node) else None
    return found if found is not None and found.kind == kind else None


def _divided(region: Region, node: Node) -> bool:
    """``order // each``: which token a row is of."""
    order, each = node.args[:2]
    state = _state(region, order, "order")
    floors = node.target is aten.floor_divide.default or node.kwargs.get("rounding_mode") == "floor"
    if state is None or state.each != 1 or not floors or not isinstance(each, int) or each < 1 or region.rows % each:
        return False
    region.states[node] = _State("order", each)
    return True


def _taken(region: Region, node: Node) -> bool:
    """``x[order]``: rows come into the order; ``x[inverse]``: they go back; ``table[rows]``: each row looks something up."""
    x: Any = node.args[0]
    found = node.args[1] if node.target is aten.index.Tensor else [node.args[2]] if node.args[1] == 0 else []
    index = found[0] if isinstance(found, list | tuple) and len(found) == 1 else None
    order, inverse = _state(region, index, "order"), _state(region, index, "inverse")
    if order is not None and x not in region.states and x.meta["val"].shape[0] * order.each == region.rows:
        region.states[node] = _State("rows")
        region.instead[node] = Change("dispatch")
    elif inverse is not None and _state(region, x, "rows"):
        _put_back(region, node)
    elif node.target is aten.index.Tensor and _state(region, index, "rows") and x not in region.states:
        region.states[node] = _State("rows")
        region.instead[node] = Change("rows")
    else:
        return False
    return True


def _blank(region: Region, node: Node) -> bool:
    """A tensor made like another, to be filled: it holds nothing of it."""
    region.spare.append(node)
    return True


def _filled(region: Region, node: Node) -> bool:
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
    region.instead[node] = Change("combine", node, node.args.index(values), state.each)
    return True


def _put_back(region: Region, node: Node) -> None:
    """Rows in the order of their tokens; where those of a token are added up next, their sum."""
    shape, viewed = list(node.meta["val"].shape), next(iter(node.users), node)
    parted = list(viewed.meta["val"].shape) if viewed.target in (aten.view.default, aten.reshape.default) else []
    added = next(iter(viewed.users)) if len(node.users) == len(viewed.users) == 1 else None
    token = len(parted) == len(shape) + 1 and parted[0] * parted[1] == region.rows and parted[2:] == shape[1:]
    if token and added is not None and added.target is aten.sum.dim_IntList and added.args[1:] == ([1],) and not added.kwargs:
        region.spare += [node, viewed]
        region.instead[added] = Change("combine", node, 0, parted[1])
    else:
        region.instead[node] = Change("combine", node)


def _counts_up(node: Node, size: int) -> bool:
    node = _unconverted(node)
    return node.target is aten.arange.default and node.args == (size,)


def _counted(region: Region, node: Node) -> bool:
    """A histogram does not ask in which order things come."""
    if _state(region, node.args[0], "rows") is None:
        return False
    region.instead[node] = Change("histogram")
    return True


def _product(region: Region, node: Node) -> bool:
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
    region.instead[node] = Change("product")
    return True


def _products() -> set[Any]:
    """Grouped products: ours, torch's, and those of libraries that are loaded."""
    return {torch.ops.autopar.grouped_mm.default, *registered()}


_STEPS: Mapping[Any, Callable[[Region, Node], bool]] = {
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


def _ends_of(region: Region, node: Any, experts: int) -> bool:
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


def _chosen(region: Region, node: Node, experts: int) -> bool:
    """Whether ``[s, experts]`` says which expert each row has: ``ids[:, None] == arange(experts)``, or one-hot."""
    if node.target is aten.one_hot.default:
        return node.args[1:] == (experts,) and _is_ids(region, node.args[0])
    if node.target is not aten.eq.Tensor:
        return False
    column, numbers = node.args
    spread = isinstance(column, Node) and column.target is aten.unsqueeze.default and column.args[1] in (1, -1)
    return spread and _counts_up(numbers, experts) and _is_ids(region, column.args[0])


def _is_ids(region: Region, node: Any) -> bool:
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

CUT_AT = frozenset({
    aten.chunk.default, aten.split.Tensor, aten.split_with_sizes.default, aten.slice.Tensor, aten.select.int, aten.narrow.default,
    aten.unbind.int, aten.cat.default, aten.softmax.int, aten._softmax.default, aten.sum.dim_IntList, aten.mean.dim, aten.glu.default,
})  # fmt: skip
"""Operators along one dim, or some."""
PLACE_OF_DIM = {aten.slice.Tensor: 1, aten.select.int: 1, aten.narrow.default: 1, aten.unbind.int: 1, aten.softmax.int: 1,
                 aten._softmax.default: 1, aten.sum.dim_IntList: 1, aten.mean.dim: 1, aten.cat.default: 1, aten.glu.default: 1}  # fmt: skip
VIEWS = frozenset({
    aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.flatten.using_ints, aten.unflatten.int, aten.squeeze.dim,
    aten.squeeze.default, aten.unsqueeze.default, aten.expand.default,
})  # fmt: skip
_LIKE_POINTWISE = frozenset({*_CONVERSIONS, aten.masked_fill.Scalar, aten.masked_fill_.Scalar, aten.detach.default, aten.alias.default})


def _keeps_rows(region: Region, node: Node) -> bool:
    """Whether each row of the result is made of the same rows of what is in the sort's order, and of nothing else's rows; and a row of
    zeros, with which dispatched rows are filled up, spoils no gradient."""
    if node.target is operator.getitem:
        return node.args[0].target in CUT_AT
    rows = [source for source in node.all_input_nodes if source in region.states]
    rest = [source for source in node.all_input_nodes if source not in region.states]
    results = list(torch_compat.leaves_of(node.meta["val"]))
    if not all(isinstance(value, Tensor) and value.dim() and value.shape[0] == region.rows for value in results):
        return False
    if any(source.meta["val"].shape[:1] != (region.rows,) for source in rows if isinstance(source.meta["val"], Tensor)):
        return False
    if node.target in CUT_AT:
        return not rest and 0 not in _dims(node, rows[0].meta["val"].dim())
    if node.target in VIEWS:
        return True  # in order of memory, equal leading dims hold equal rows
    if node.target in (aten.linear.default, aten.matmul.default, aten.mm.default):
        return node.args[0] in rows and len(rows) == 1
    if node.target is aten.layer_norm.default or node.target is aten.rms_norm.default:
        return has_margin(node) and node.args[0] in rows and len(rows) == 1 and len(node.args[1]) < rows[0].meta["val"].dim()
    tags = getattr(node.target, "tags", ())
    if node.target not in _LIKE_POINTWISE and (torch.Tag.pointwise not in tags or torch.Tag.nondeterministic_seeded in tags):
        return False
    if not stays_finite(node):
        return False
    rank = results[0].dim()
    apart = all(source.meta["val"].dim() < rank or source.meta["val"].shape[0] == 1 for source in rest)
    return apart and all(source.meta["val"].dim() == rank for source in rows) and (node.args[0] in rows or not _writes(node))


def _writes(node: Node) -> bool:
    return bool(torch_compat.schema_of(node.target).is_mutable)


def _dims(node: Node, rank: int) -> set[int]:
    """The dims along which an operator works; 0 where it does not say."""
    place = PLACE_OF_DIM.get(node.target, 2)
    given: Any = node.args[place] if len(node.args) > place else node.kwargs.get("dim", 0)
    return {dim % rank for dim in (given if isinstance(given, list | tuple) else [given])} if given not in ([], None) else {0}
