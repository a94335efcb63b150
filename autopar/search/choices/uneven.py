"""Uneven sharding: which dims may be split in unequal parts, over one axis or several.

``UNEVEN_WASTE`` and ``UNEVEN_LARGEST`` bound the waste, and so the number of choices. A dim that the axes do not divide is offered only if
it is connected with a dim of a graph input: a weight's vocabulary or odd width, a batch. Operators that allow unequal parts connect dims.
Any other dim would be cut just before an operator and gathered just after it. Operators of equal shapes are offered the same, so that equal
layers stay equal.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autopar.cost_models import Machine
from autopar.graph import Graph, Op
from autopar.rules import ShardingRule, find_rule
from autopar.search.settings import UNEVEN_LARGEST, UNEVEN_WASTE
from autopar.sharding import ShardingSpec

Shape = tuple[int, ...]


def may_split_unevenly(extent: int, size: int) -> bool:
    """Whether axes of ``size`` ranks may split a dim that they do not divide. A dim with fewer elements than ranks is not offered.

    >>> [may_split_unevenly(extent, 4) for extent in (50257, 6, 5, 4, 3)]
    [True, True, False, False, False]
    """
    each = -(-extent // size)
    return extent % size != 0 and extent > size and each * size <= extent * UNEVEN_WASTE and each <= extent * UNEVEN_LARGEST


@dataclass(frozen=True)
class UnevenSplits:
    """Dims and factors that may be split in unequal parts.

    Args:
        dims: by shape of the tensor.
        factors: by signature of the operator.
    """

    dims: Mapping[Shape, frozenset[int]] = field(default_factory=dict)
    factors: Mapping[object, frozenset[str]] = field(default_factory=dict)

    def allows(self, spec: ShardingSpec, shape: Shape, sizes: Sequence[int]) -> bool:
        """Whether a spec splits every dim in equal parts, or in unequal ones that waste little."""
        counts = [spec.parts(dim, sizes) for dim in range(len(shape))]
        return all(extent % count == 0 or may_split_unevenly(extent, count) for extent, count in zip(shape, counts, strict=True))


def op_signature(op: Op, graph: Graph) -> object:
    """Everything that the strategies of an operator depend on; hashable."""
    shown = tuple((graph.tensors[name].shape, graph.tensors[name].dtype) for name in (*op.inputs, *op.outputs))
    return op.target, op.args, op.kwargs, shown


def find_uneven_splits(graph: Graph, machine: Machine) -> UnevenSplits:
    """The dims and factors that are offered. None where only collectives are priced, since waste would cost nothing there."""
    if not machine.times_operators:
        return UnevenSplits()
    sizes = [size for size in machine.mesh.sizes if size > 1]
    counts = {math.prod(some) for number in range(1, len(sizes) + 1) for some in itertools.combinations(sizes, number)}
    extents = {extent for item in graph.inputs for extent in graph.tensors[item.tensor].shape}
    odd = {extent for extent in extents if any(may_split_unevenly(extent, count) for count in counts)}
    if not odd:
        return UnevenSplits()
    from networkx.utils import UnionFind  # networkx takes 0.15 s to import: graphs without such dims go without

    together = UnionFind()
    """Of (tensor, dim): dims that must be split alike."""
    ruled = [(op, find_rule(op, graph.tensors)) for op in graph.ops]
    for op, rule in ruled:
        for name in _factors(rule, odd):
            together.union(*_places(op, rule, name))
    entering = {
        together[item.tensor, dim]
        for item in graph.inputs
        if item.blocks is None and item.kind != "tangent"
        for dim, extent in enumerate(graph.tensors[item.tensor].shape)
        if extent in odd
    }
    factors: dict[object, set[str]] = {}
    dims: dict[Shape, set[int]] = {}
    for op, rule in ruled:
        for name in _factors(rule, odd):
            places = _places(op, rule, name)
            if together[places[0]] in entering:
                factors.setdefault(op_signature(op, graph), set()).add(name)
                for tensor, dim in places:
                    dims.setdefault(graph.tensors[tensor].shape, set()).add(dim)
    return UnevenSplits({shape: frozenset(some) for shape, some in dims.items()}, {key: frozenset(some) for key, some in factors.items()})


def _factors(rule: ShardingRule, odd: set[int]) -> list[str]:
    """Factors of a rule whose extent is in ``odd`` and that may be split unevenly."""
    return [name for name in rule.free if rule.extent[name] in odd and name not in rule.equal]


def _places(op: Op, rule: ShardingRule, factor: str) -> list[tuple[str, int]]:
    """Every (tensor, dim) that is this factor alone."""
    terms = zip((*op.inputs, *op.outputs), rule.inputs + rule.outputs, strict=True)
    return [(tensor, dim) for tensor, term in terms for dim, names in enumerate(term) if names == (factor,)]
