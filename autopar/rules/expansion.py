"""Strategies: every way to give the mesh's axes to an operator's factors.

Each axis is given to one factor, or carries a partial value through the operator, or is left out (replicated). A factor with
several axes has one strategy for each order of them (``S01`` and ``S10``). In a dim of several factors, a factor may be split only
when those before it are split down to one element: then the ranks' parts are again contiguous blocks of the dim.
A factor along which ranks may exchange parts inside of the operator has each split in several ways: as it is, ``s mirrored``, ``s ring``
(see ``inner_exchange``).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from functools import lru_cache

from autopar.cost_models.collectives import KINDS
from autopar.graph import DTYPE_BYTES, Tensor
from autopar.rules.inner_exchange import WAYS, Held, Inside
from autopar.rules.rule import Dims, Exchange, ShardingRule
from autopar.sharding import InnerCollective, Orders, ShardingSpec, Strategy

MUST_SPLIT = frozenset({"contraction", "convolution", "attention"})
"""Families of operators that must be split under the communication model."""

Axes = tuple[int, ...]
COUNT_BYTES = 16
"""Bytes that tell the rank of an expert how many rows come for it: its number and theirs, in int64."""


def strategies(
    rule: ShardingRule, tensors: Sequence[Tensor], sizes: Sequence[int], *,
    must_split: bool = False, uneven: Set[str] | None = None, orders: Orders = itertools.permutations, partial_inputs: bool = True,
) -> tuple[Strategy, ...]:  # fmt: skip
    """Every legal way to run an operator on a mesh, without doubles, in an order that depends on nothing else.

    Args:
        rule: the operator's rule.
        tensors: the operator's inputs and outputs (their dtypes size the inner collectives).
        sizes: the mesh's axis sizes; axes of size 1 are left out.
        must_split: contractions, convolutions and attention keep only the strategies that give a largest set of axes to factors
            and have no partial inputs.
        uneven: the factors that may be split in unequal parts, as far as the rule allows it; all when not given.
        orders: in which orders several axes may split a dim, or be given to a factor.
        partial_inputs: also those with inputs that are still to be reduced.
    """
    itemsizes = tuple(DTYPE_BYTES[tensor.dtype] for tensor in tensors) if rule.inner or rule.mirror or rule.ring or rule.exchange else ()
    free = frozenset(rule.free if uneven is None else uneven)
    return _expand(rule, itemsizes, tuple(sizes), must_split, free, orders, partial_inputs)


def plain_factors(strategy: Strategy) -> dict[str, Axes]:
    """The axes given to each factor of the rule, in whatever way."""
    return {name.partition(" ")[0]: axes for name, axes in strategy.factors}


def way_of(strategy: Strategy) -> str:
    """Of ``inner_exchange.WAYS``: how a factor is split along which ranks exchange parts."""
    return next((name.partition(" ")[2] for name, _ in strategy.factors if " " in name), "")


@lru_cache(maxsize=65536)
def _expand(
    rule: ShardingRule, itemsizes: tuple[int, ...], sizes: tuple[int, ...], must_split: bool, uneven: frozenset[str], orders: Orders,
    partial_inputs: bool,
) -> tuple[Strategy, ...]:  # fmt: skip
    expansion = _Expansion(rule, itemsizes, sizes)
    found: dict[tuple[object, ...], Strategy] = {}
    several = dict.fromkeys(names for term in rule.inputs + rule.outputs for names in term if len(names) > 1)
    for factors, flows, way in _assignments(rule, sizes, uneven, range(len(rule.flows) if partial_inputs else 0)):
        equal = [rule.extent[name] % math.prod([sizes[axis] for axis in some]) == 0 for name, some in factors.items()]
        words = zip(factors.values(), equal, strict=True)
        for ordered in itertools.product(*[orders(some) if even else (some,) for some, even in words]):
            given = dict(zip(factors, ordered, strict=True))
            if several and not all(word in orders(word) for word in (_together(names, given) for names in several)):
                continue
            strategy = expansion.strategy(given, flows, way)
            key = *strategy.inputs, *strategy.outputs, way
            if partial_inputs or not any(spec.partial for spec in strategy.inputs):
                found.setdefault(key, strategy)
    result = tuple(found.values())
    return _splitting(result) if must_split and rule.family in MUST_SPLIT else result


def _assignments(
    rule: ShardingRule, sizes: tuple[int, ...], uneven: frozenset[str], offered: Iterable[int]
) -> Iterator[tuple[dict[str, Axes], dict[int, Axes], str]]:  # fmt: skip
    """Every assignment of axes: to factors, to the flows ``offered`` (by index), or to nothing; replicated first. With each, every way to
    split the factor along which ranks may exchange parts; nothing is exchanged beside unequal parts."""
    axes = [axis for axis, size in enumerate(sizes) if size > 1]
    dims = [names for term in rule.inputs + rule.outputs for names in term if len(names) > 1]
    shapes = [extent for term, shape in zip(rule.inputs + rule.outputs, rule.shapes[0] + rule.shapes[1], strict=True)
              for names, extent in zip(term, shape, strict=True) if len(names) > 1]  # fmt: skip
    composites = list(dict.fromkeys(zip(dims, shapes, strict=True)))
    options = [
        [None, *(name for name in rule.free if rule.splits(name, sizes[axis : axis + 1], uneven=name in uneven)), *offered]
        for axis in axes
    ]
    for choice in itertools.product(*options):
        factors: dict[str, Axes] = {}
        flows: dict[int, Axes] = {}
        for axis, chosen in zip(axes, choice, strict=True):
            if isinstance(chosen, str):
                factors[chosen] = (*factors.get(chosen, ()), axis)
            elif chosen is not None:
                flows[chosen] = (*flows.get(chosen, ()), axis)
        parts = {name: math.prod([sizes[axis] for axis in some]) for name, some in factors.items()}
        even = not any(rule.extent[name] % count for name, count in parts.items())
        legal = even or all(rule.splits(name, [sizes[axis] for axis in some], uneven=name in uneven) for name, some in factors.items())
        if legal and all(_fits(rule, names, extent, parts) for names, extent in composites):
            yield factors, flows, ""
            for way in _ways(rule, parts) if even else ():
                yield factors, flows, way


def _ways(rule: ShardingRule, parts: dict[str, int]) -> Iterator[str]:
    """The further ways to split what is split in so many parts."""
    mirror, ring = rule.mirror, rule.ring
    halves = mirror is None or rule.extent[mirror.factor] % (2 * parts.get(mirror.factor, 1)) == 0
    if mirror is not None and mirror.factor in parts and halves:
        yield "mirrored"
    if ring is not None and ring.factor in parts and halves and rule.extent[ring.along] % parts[ring.factor] == 0:
        yield "ring"


def _fits(rule: ShardingRule, names: tuple[str, ...], extent: int, parts: dict[str, int]) -> bool:
    """Whether each rank has a part of a dim of several factors."""
    if rule.loose.issuperset(names):
        return extent % math.prod([parts.get(name, 1) for name in names]) == 0
    return _contiguous(names, extent, rule.extent, parts)


def _contiguous(names: tuple[str, ...], extent: int, extents: dict[str, int], parts: dict[str, int]) -> bool:
    """Whether each rank's part of a dim of several factors is one block."""
    open_before = False
    for name in names:
        if name == "_":
            open_before = True
            continue
        if open_before and name in parts:
            return False
        open_before = open_before or parts.get(name, 1) != extents[name]
    return True


class _Expansion:
    """One rule on one mesh; keeps the spec of each tensor once for all strategies that split it alike."""

    def __init__(self, rule: ShardingRule, itemsizes: tuple[int, ...], sizes: tuple[int, ...]) -> None:
        self.rule, self.itemsizes, self.sizes = rule, itemsizes, sizes
        self.found: dict[tuple[object, ...], ShardingSpec] = {}
        partial = rule.input_partial + rule.output_partial
        self.terms = list(zip(rule.inputs + rule.outputs, partial, strict=True))
        self.names = [tuple(dict.fromkeys([*itertools.chain(*dims), *(name for name, _ in reduced)])) for dims, reduced in self.terms]
        self.cutting = {name for term in rule.outputs for names in term for name in names}
        self.cutting |= {name for partial in rule.output_partial for name, _ in partial}
        self.shares: dict[tuple[str, Axes, bool], float] = {}

    def strategy(self, factors: dict[str, Axes], flows: dict[int, Axes], way: str) -> Strategy:
        """The strategy of one assignment, the axes of each factor in order."""
        rule = self.rule
        flowing = [(axis, rule.flows[index]) for index, axes in flows.items() for axis in axes]
        first = len(rule.inputs)
        inputs = [
            self._spec(index, self._cutting(index, dims, factors, way), tuple([axis for axis, group in flowing if index in group]))
            for index, dims in enumerate(rule.inputs)
        ]
        through = tuple([axis for axis, _ in flowing])
        outputs = [
            self._spec(first + index, self._cutting(None, dims, factors, way), through) for index, dims in enumerate(rule.outputs)
        ]
        special = (rule.ring.factor if rule.ring else None) if way == "ring" else rule.mirror.factor if rule.mirror and way else None
        parts = math.prod([self._parts(name, axes, name == special) for name, axes in factors.items() if name in self.cutting])
        given = tuple([(f"{name} {way}" if name == special else name, factors[name]) for name in rule.free if name in factors])
        inside = WAYS[way](rule, self._held(factors[special], (*inputs, *outputs))) if special else Inside()
        if rule.exchange is not None and rule.exchange.factor in factors:
            inside = Inside(tuple(self._exchange(rule.exchange, factors, inputs[0], outputs[0])))
        return Strategy(
            tuple(inputs), tuple(outputs), parts, self._inner(factors) + inside.inner, given, inside.workspace, inside.turns, inside.merged
        )

    def _cutting(self, index: int | None, dims: Dims, factors: dict[str, Axes], way: str) -> dict[str, Axes]:
        """The factors' axes as they cut one tensor, an output without an index: what travels around a ring, and what is made of it, lies
        split along its own factor."""
        ring = self.rule.ring
        if way != "ring" or ring is None or not (index in ring.sent if index is not None else any(ring.along in names for names in dims)):
            return factors
        return {ring.along if name == ring.factor else name: axes for name, axes in factors.items()}

    def _held(self, axes: Axes, specs: Sequence[ShardingSpec]) -> Held:
        whole = self.rule.shapes[0] + self.rule.shapes[1]
        shapes = [spec.local_shape(shape, self.sizes) for spec, shape in zip(specs, whole, strict=True)]
        sizes = [math.prod(shape) * itemsize for shape, itemsize in zip(shapes, self.itemsizes, strict=True)]
        return Held(axes, math.prod(self.sizes[axis] for axis in axes), sizes, self.itemsizes)

    def _parts(self, name: str, axes: Axes, exchanged: bool) -> float:
        """How much less work the busiest rank has: the n parts of a factor, fewer where one part does more than its share.

        Row ``i`` of a triangle of ``s`` rows takes work ``i``: the last ``s/n`` rows take ``1 - ((n - 1) / n)^2 = (2n - 1) / n^2`` of it.
        """
        asked = name, axes, exchanged
        found = self.shares.get(asked)
        if found is None:
            count, extent = math.prod([self.sizes[axis] for axis in axes]), self.rule.extent[name]
            found = count * count / (2 * count - 1) if name in self.rule.triangles and not exchanged else count
            found = self.shares[asked] = extent / -(-extent // count) if extent % count else found
        return found

    def _inner(self, factors: dict[str, Axes]) -> tuple[InnerCollective, ...]:
        found = []
        for item in self.rule.inner:
            over = tuple(sorted(axis for name in item.over for axis in factors.get(name, ())))
            if over:
                counts = {name: math.prod(self.sizes[axis] for axis in factors.get(name, ())) for name in item.factors}
                elements = math.prod(-(-self.rule.extent[name] // count) for name, count in counts.items()) * item.elements
                found.append(InnerCollective("all_reduce", over, elements * max(4, self.itemsizes[0]), item.reduction))
        return tuple(found)

    def _exchange(
        self, exchange: Exchange, factors: Mapping[str, Axes], read: ShardingSpec, made: ShardingSpec
    ) -> Iterator[InnerCollective]:  # fmt: skip
        """The collective that the operator is, of a first input and a result that lie so. An all-to-all may repeat the one or add up for
        the other: the larger travels, as if experts had equal numbers of rows."""
        axes, kind, result = factors[exchange.factor], KINDS[exchange.kind], len(self.rule.inputs)
        ranks = math.prod(self.sizes[axis] for axis in axes)
        if exchange.experts:
            experts = self.rule.extent[exchange.experts] // math.prod(self.sizes[axis] for axis in factors.get(exchange.experts, ()))
            yield InnerCollective(exchange.kind, axes, ranks * COUNT_BYTES * experts, "counts")
        if exchange.reduction == "counts":
            return
        bytes_made = math.prod(made.local_shape(self.rule.shapes[1][0], self.sizes)) * self.itemsizes[result]
        if exchange.kind == "all_to_all":
            bytes_made = max(bytes_made, math.prod(read.local_shape(self.rule.shapes[0][0], self.sizes)) * self.itemsizes[0])
        full = bytes_made * (1 if kind.leaves_full else ranks)
        yield InnerCollective(exchange.kind, axes if kind.ordered else tuple(sorted(axes)), full, exchange.reduction)

    def _spec(self, index: int, factors: dict[str, Axes], through: Axes) -> ShardingSpec:
        """Of a tensor, numbered over inputs, then outputs, partial over axes ``through`` which it flows."""
        asked = (index, through, *[factors.get(name) for name in self.names[index]])
        found = self.found.get(asked)
        if found is None:
            dims, partial = self.terms[index]
            split = tuple([factors.get(names[0], ()) if len(names) == 1 else _together(names, factors) for names in dims])
            reduced = [(axis, reduction) for name, reduction in partial for axis in factors.get(name, ())]
            found = self.found[asked] = _one(split, tuple(sorted(reduced + [(axis, "sum") for axis in through])))
        return found


def _together(names: tuple[str, ...], factors: dict[str, Axes]) -> Axes:
    """The axes of all the factors of a dim."""
    return tuple([axis for name in names for axis in factors.get(name, ())])


@lru_cache(maxsize=1 << 16)
def _one(dims: tuple[Axes, ...], partial: tuple[tuple[int, str], ...]) -> ShardingSpec:
    """Rules share most of their specs."""
    return ShardingSpec(dims, partial)


def _splitting(found: tuple[Strategy, ...]) -> tuple[Strategy, ...]:
    """Those that give a largest set of axes to factors, without partial inputs."""
    used = {strategy: frozenset(axis for _, axes in strategy.factors for axis in axes) for strategy in found}
    whole = [strategy for strategy in found if not any(spec.partial for spec in strategy.inputs)]
    whole = [strategy for strategy in whole if not any(_flowing(strategy))]
    return tuple(strategy for strategy in whole if not any(used[strategy] < used[other] for other in whole))


def _flowing(strategy: Strategy) -> Iterator[int]:
    """Axes over which an output is partial though no factor has them."""
    given = {axis for _, axes in strategy.factors for axis in axes}
    return (axis for spec in strategy.outputs for axis in spec.partial_axes if axis not in given)
