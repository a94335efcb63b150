"""ShardingSpec: how one tensor lies on the mesh. Strategy: one legal way to run one operator.

A dim that the axes do not divide may be split in unequal parts (``span``), over several axes in the mesh's order: shapes, prices and
memory are then those of the largest part, which the first rank has.

Mesh axes are integers here (their position in the mesh); names belong to the mesh. Axes of size 1 never
appear in a spec: ``ShardingSpec.normalized`` drops them, so that they cannot change an answer.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

from autopar.errors import SpecError

REDUCTIONS = ("sum", "max", "min", "product")
"""How partial values become one, by DTensor's names."""

ALL_ORDERS = 2
"""Up to so many axes, the search splits a dim by several in any order, and contractions may take partial sums. On more axes the innermost
is major (``S210``: gathering the outer, data axes first leaves the inner split) and contractions take whole values: every choice
would be thousands for one operator, and a problem of hundreds of millions of entries. Its bound then is one on plans of that kind."""

Orders = Callable[[tuple[int, ...]], Iterable[tuple[int, ...]]]
"""The orders in which some axes may split a dim: ``itertools.permutations``, or ``innermost_first``."""

Run = tuple[int, int, int]
"""Elements one after another along a dim: the first one's place where parts are filled up to equal ones, its place in the dim itself, and
how many."""

_DIM = re.compile(r"^(R|S(\d+)(?:/(\d+))?)$")
_NAMED = re.compile(r"\(([^()]*)\)")
_PARTIAL = re.compile(rf"^P(\d)({'|'.join(REDUCTIONS)})?$")


@dataclass(frozen=True)
class ShardingSpec:
    """The layout of one tensor.

    Args:
        dims: for each tensor dim, the mesh axes that split it, major to minor; ``()`` is replicated.
        partial: ``(axis, reduction)`` pairs, sorted by axis: the value still to be reduced over that axis.
        blocks: ``(dim, count)`` pairs of split dims that are so many equal blocks one after another, of each of which every rank has
            its part (``S0/3``: queries, keys and values in one weight). Parameters alone lie so; in a graph such a dim is two, ``R S0``.
    """

    dims: tuple[tuple[int, ...], ...]
    partial: tuple[tuple[int, str], ...] = ()
    blocks: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        axes = self.split_axes + tuple(axis for axis, _ in self.partial)
        if len(set(axes)) != len(axes):
            raise SpecError(f"mesh axis used twice in the spec {self!s}", "each axis splits at most one dim, or is partial")
        object.__setattr__(self, "partial", tuple(sorted(self.partial)))
        if self.blocks:
            object.__setattr__(self, "blocks", tuple(sorted((dim, k) for dim, k in self.blocks if k > 1 and self.dims[dim])))

    @staticmethod
    def replicated(rank: int) -> ShardingSpec:
        """``R R ...`` for a tensor of ``rank`` dims."""
        return ShardingSpec(((),) * rank)

    @staticmethod
    def parse(text: str, axes: Sequence[str] = ()) -> ShardingSpec:
        """Reads ``S0 R``, ``S01 R +P2``, ``R +P1max``, ``S0/3 R``; the empty string is a replicated scalar.

        Args:
            axes: names of the mesh axes: ``S(tp) R`` and ``S(dp,tp) R +P(cp)`` are read as well.

        Raises:
            SpecError: naming the word that cannot be read, or the axis that is not there.

        >>> ShardingSpec.parse("S01 R +P2max")
        ShardingSpec(dims=((0, 1), ()), partial=((2, 'max'),), blocks=())
        """
        return _parse(_NAMED.sub(lambda match: _digits(match, text, axes), text) if "(" in text else text)

    def __str__(self) -> str:
        return self._text

    @cached_property
    def _text(self) -> str:
        words = ["S" + "".join(map(str, axes)) if axes else "R" for axes in self.dims]
        for dim, count in self.blocks:
            words[dim] += f"/{count}"
        words += [f"+P{axis}" + ("" if reduction == "sum" else reduction) for axis, reduction in self.partial]
        return " ".join(words)

    @cached_property
    def split_axes(self) -> tuple[int, ...]:
        """Every axis that splits a dim, in dim order."""
        return tuple(itertools.chain.from_iterable(self.dims))

    @cached_property
    def partial_axes(self) -> tuple[int, ...]:
        """Every axis over which the value is still to be reduced."""
        return tuple(axis for axis, _ in self.partial)

    @cached_property
    def _hash(self) -> int:
        return hash((self.dims, self.partial_axes))

    def __hash__(self) -> int:
        return self._hash  # specs are looked up by the million

    def renamed(self, names: Sequence[int]) -> ShardingSpec:
        """The same over other axes: ``names[axis]`` in the place of each."""
        return ShardingSpec(
            tuple([tuple([names[axis] for axis in axes]) for axes in self.dims]),
            tuple([(names[axis], reduction) for axis, reduction in self.partial]),
            self.blocks,
        )

    @property
    def is_replicated(self) -> bool:
        """True when every rank holds the whole value."""
        return not self.partial and not self.split_axes

    def parts(self, dim: int, sizes: Sequence[int]) -> int:
        """Into how many pieces ``dim`` is cut on a mesh of these axis sizes."""
        return math.prod([sizes[axis] for axis in self.dims[dim]])

    def local_shape(self, shape: Sequence[int], sizes: Sequence[int]) -> tuple[int, ...]:
        """The shape one rank holds of a tensor of global ``shape``; where parts are unequal, of the largest."""
        if not self.split_axes:
            return tuple(shape)
        parts = [math.prod([sizes[axis] for axis in axes]) for axes in self.dims]
        return tuple([-(-extent // count) for extent, count in zip(shape, parts, strict=True)])

    def own_shape(self, shape: Sequence[int], sizes: Sequence[int], coordinates: Sequence[int]) -> tuple[int, ...]:
        """The shape that the rank at ``coordinates`` holds of a tensor of global ``shape``."""
        if not self.split_axes:
            return tuple(shape)
        return tuple([self.span(dim, extent, sizes, coordinates)[1] for dim, extent in enumerate(shape)])

    def lengths(self, shape: Sequence[int], sizes: Sequence[int]) -> tuple[object, ...]:
        """For each dim what all ranks' lengths follow from; where two values' are equal, every rank holds equal shapes of both.

        >>> ShardingSpec.parse("S0 R").lengths((8, 1), (4,)), ShardingSpec.parse("R S0").lengths((2, 3), (4,))
        ((2, 1), (2, (3, (0,))))
        """
        if not self.split_axes:
            return tuple(shape)
        counts = [self.parts(dim, sizes) for dim in range(len(shape))]
        ends = zip(shape, counts, self.dims, strict=True)
        return tuple([(extent, axes) if extent % count else extent // count for extent, count, axes in ends])

    def span(self, dim: int, extent: int, sizes: Sequence[int], coordinates: Sequence[int]) -> tuple[int, int]:
        """The first global index along ``dim`` (of global ``extent``) that the rank at ``coordinates`` holds, and how many.

        >>> [ShardingSpec.parse("S0").span(0, 6, (4,), (rank,)) for rank in range(4)]
        [(0, 2), (2, 2), (4, 2), (6, 0)]
        """
        axes = self.dims[dim]
        return span(extent, [sizes[axis] for axis in axes], [coordinates[axis] for axis in axes])

    def is_even(self, shape: Sequence[int], sizes: Sequence[int]) -> bool:
        """Whether all ranks' parts of a tensor of ``shape`` are equally large."""
        ends = zip(shape, self.dims, strict=True)
        return not self.split_axes or not any(axes and extent % math.prod([sizes[axis] for axis in axes]) for extent, axes in ends)

    def normalized(self, sizes: Sequence[int]) -> ShardingSpec:
        """Without the axes of size 1."""
        dims = tuple(tuple(axis for axis in axes if sizes[axis] > 1) for axes in self.dims)
        return ShardingSpec(dims, tuple(item for item in self.partial if sizes[item[0]] > 1), self.blocks)

    def problem(self, shape: Sequence[int], sizes: Sequence[int]) -> str | None:
        """Why this spec is illegal for a tensor of ``shape`` on a mesh of ``sizes``; None when it is legal."""
        if len(self.dims) != len(shape):
            return f"the spec {self!s} has {len(self.dims)} dims, the tensor has {len(shape)} (shape {list(shape)})"
        for axis in self.split_axes + self.partial_axes:
            if axis >= len(sizes):
                return f"the spec {self!s} uses axis {axis}, the mesh has {len(sizes)} axes"
        for dim, count in self.blocks:
            if len(self.dims[dim]) > 1:
                return f"{self!s} splits blocks over {len(self.dims[dim])} axes; blocks are split over one"
            if shape[dim] % (count * self.parts(dim, sizes)):
                return f"dim {dim} of size {shape[dim]} is not {count} blocks of {self.parts(dim, sizes)} equal parts, as {self!s} has it"
        for dim, extent in enumerate(shape):
            parts, axes = self.parts(dim, sizes), [axis for axis in self.dims[dim] if sizes[axis] > 1]
            if extent % parts and axes != sorted(axes):
                ordered = "".join(map(str, sorted(axes)))
                return f"dim {dim} of size {extent} is cut in {parts} unequal parts by {self!s}; these are cut in mesh order, S{ordered}"
            if extent % parts and extent == 1:
                return f"dim {dim} of size {extent} cannot be split in {parts} parts by {self!s}"
        return None


def span(extent: int, sizes: Sequence[int], places: Sequence[int]) -> tuple[int, int]:
    """The first index, and how many, of one part of a dim that is cut by axes of these sizes, major to minor.

    Parts are those of ``torch.chunk`` and DTensor's ``Shard``, an axis at a time: each as large as the first, but for the last ones, which
    have what is left, perhaps nothing.

    Args:
        places: of the part, along each axis.

    >>> [span(7, (2, 2), (place // 2, place % 2)) for place in range(4)]
    [(0, 2), (2, 2), (4, 2), (6, 1)]
    >>> [span(6, (2, 2), (place // 2, place % 2)) for place in range(4)]
    [(0, 2), (2, 1), (3, 2), (5, 1)]
    """
    start, length = 0, extent
    for size, place in zip(sizes, places, strict=True):
        each = -(-length // size)
        begin = min(place * each, length)
        start, length = start + begin, min(each, length - begin)
    return start, length


def smallest(extent: int, sizes: Sequence[int]) -> int:
    """How many elements the smallest part of a dim has that is cut by axes of these sizes, major to minor; see ``span``.

    >>> smallest(7, (2, 2)), smallest(7, (2, 3))
    (1, 0)
    """
    if not sizes:
        return extent
    each = -(-extent // sizes[0])
    return min(smallest(length, sizes[1:]) for length in {each, max(extent - each * (sizes[0] - 1), 0)})


@lru_cache(maxsize=1024)
def runs(extent: int, sizes: tuple[int, ...]) -> tuple[Run, ...]:
    """Where the parts of a dim, cut by axes of these sizes, lie in a dim of as many parts that are all as large as the largest.

    >>> runs(7, (4,)), runs(6, (2, 2))
    (((0, 0, 7),), ((0, 0, 3), (4, 3, 3)))
    """
    each, found = -(-extent // math.prod(sizes)), list[Run]()
    for number, places in enumerate(itertools.product(*map(range, sizes))):
        here, length = span(extent, sizes, places)
        if found and sum(found[-1][::2]) == number * each:
            found[-1] = (*found[-1][:2], found[-1][2] + length)
        elif length:
            found.append((number * each, here, length))
    return tuple(found)


def _digits(match: re.Match[str], text: str, axes: Sequence[str]) -> str:
    """The digits of axes given by name."""
    words = [word.strip() for word in match[1].split(",")]
    for word in words:
        if word not in axes:
            hint = f"the axes are {', '.join(axes)}" if axes else "write axes as digits"
            raise SpecError(f"no mesh axis {word!r} in the spec {text!r}", hint)
    return "".join(str(axes.index(word)) for word in words)


@lru_cache(maxsize=65536)
def _parse(text: str) -> ShardingSpec:
    dims: list[tuple[int, ...]] = []
    partial: list[tuple[int, str]] = []
    blocks: list[tuple[int, int]] = []
    for word in text.replace("+", " +").split():
        if word.startswith("+"):
            match = _PARTIAL.match(word[1:])
            if not match:
                raise SpecError(f"cannot read {word!r} in the spec {text!r}", "a partial value is +P0, +P1max, +P1min or +P1product")
            partial.append((int(match[1]), match[2] or "sum"))
            continue
        match = _DIM.match(word)
        if not match or match[3] == "0":
            hint = "write R or S with axis digits for each dim, e.g. 'S0 R', 'S01 R +P2' or, of a dim of 3 equal blocks, 'S0/3 R'"
            raise SpecError(f"cannot read {word!r} in the spec {text!r}", hint)
        if partial:
            raise SpecError(f"{word!r} follows a partial suffix in the spec {text!r}", "write all dims first, then +P suffixes")
        if match[3]:
            blocks.append((len(dims), int(match[3])))
        dims.append(tuple(int(digit) for digit in match[2] or ""))
    return ShardingSpec(tuple(dims), tuple(partial), tuple(blocks))


@dataclass(frozen=True)
class AxisLayout:
    """How a tensor lies over some axes of a mesh, whatever it does over the others.

    Args:
        uses: for each axis, by name, the dim that it splits, into one entry a rank; None where it splits none. Of several axes of a dim
            the first is major.
    """

    uses: tuple[tuple[str, int | None], ...]

    @staticmethod
    @lru_cache(maxsize=4096)
    def parse(text: str) -> AxisLayout:
        """Reads what ``str`` writes.

        >>> AxisLayout.parse("dp=R tp=S0").uses
        (('dp', None), ('tp', 0))
        """
        words = [word.rpartition("=") for word in text.split()]
        return AxisLayout(tuple((axis, None if use == "R" else int(use[1:])) for axis, _, use in words))

    def __str__(self) -> str:
        return " ".join(f"{axis}={'R' if dim is None else f'S{dim}'}" for axis, dim in self.uses)

    def problem(self, shape: Sequence[int], mesh: Mapping[str, int]) -> str | None:
        """Why a tensor of ``shape`` cannot lie so on a mesh, given by sizes of axes; None when it can."""
        shown = ",".join(f"{name}={size}" for name, size in mesh.items())
        for axis, _ in self.uses:
            if axis not in mesh:
                return f"the mesh {shown} has no axis {axis!r}"
        for dim in dict.fromkeys(dim for _, dim in self.uses if dim is not None):
            axes = [axis for axis, other in self.uses if other == dim]
            if math.prod(mesh[axis] for axis in axes) != shape[dim]:
                return f"the model has {shape[dim]} ranks along {','.join(axes)}, the mesh is {shown}"
        return None

    def on(self, axes: Sequence[str], sizes: Sequence[int]) -> AxisDims:
        """Its axes of more than one rank by their number on a mesh, with their dims."""
        return tuple((axes.index(axis), dim) for axis, dim in self.uses if sizes[axes.index(axis)] > 1)


AxisDims = tuple[tuple[int, int | None], ...]
"""``AxisLayout`` on a mesh: the number of each axis, and the dim that it splits."""


def lies_so(spec: ShardingSpec, asked: AxisDims) -> bool:
    """Whether a spec lies over some axes as it is asked for."""
    free = {axis for axis, dim in asked if dim is None}
    if not free.isdisjoint(spec.split_axes) or not free.isdisjoint(spec.partial_axes):
        return False
    return all(spec.dims[dim] == tuple(axis for axis, other in asked if other == dim) for _, dim in asked if dim is not None)


@dataclass(frozen=True)
class Blocks:
    """A parameter's dim that is ``count`` equal blocks one after another: in a graph it is two dims, the block and the place in it."""

    dim: int
    count: int

    def shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """A parameter's shape as the graph has it.

        >>> Blocks(0, 3).shape((768, 256))
        (3, 256, 256)
        """
        return (*shape[: self.dim], self.count, shape[self.dim] // self.count, *shape[self.dim + 1 :])

    def own_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """A shape in a graph as the parameter has it."""
        return (*shape[: self.dim], shape[self.dim] * shape[self.dim + 1], *shape[self.dim + 2 :])

    def own_spec(self, spec: ShardingSpec, sizes: Sequence[int]) -> ShardingSpec | None:
        """A spec in a graph as the parameter's; None where some blocks are split among ranks and each block too, where ranks have unequal
        numbers of them, and where two axes split each block: DTensors gather two strided shards of one dim in the wrong order.

        >>> str(Blocks(0, 3).own_spec(ShardingSpec.parse("R S0 R"), (8,)))
        'S0/3 R'
        """
        whole, within = spec.dims[self.dim : self.dim + 2]
        if self.count % math.prod(sizes[axis] for axis in whole):
            return None
        if len(within) > 1 if not whole else within and math.prod(sizes[axis] for axis in whole) != self.count:
            return None
        dims = (*spec.dims[: self.dim], whole + within, *spec.dims[self.dim + 2 :])
        return ShardingSpec(dims, spec.partial, () if whole else ((self.dim, self.count),))

    def spec(self, own: ShardingSpec, sizes: Sequence[int]) -> ShardingSpec | None:
        """A parameter's spec as the graph has it; None where its parts are not parts of blocks.

        >>> str(Blocks(0, 3).spec(ShardingSpec.parse("S0/3 R"), (8,)))
        'R S0 R'
        """
        axes, counts = own.dims[self.dim], dict(own.blocks)
        parts = [math.prod(sizes[axis] for axis in axes[:number]) for number in range(len(axes) + 1)]
        if self.dim in counts:
            cut = 0 if counts.pop(self.dim) == self.count else None
        elif self.count in parts:
            cut = parts.index(self.count)
        else:
            cut = len(axes) if self.count % parts[-1] == 0 else None
        if cut is None or counts:
            return None
        return ShardingSpec((*own.dims[: self.dim], axes[:cut], axes[cut:], *own.dims[self.dim + 1 :]), own.partial)


def innermost_first(axes: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """The one order of axes with the innermost major: see ``ALL_ORDERS``."""
    yield tuple(sorted(axes, reverse=True))


def splits(
    shape: Sequence[int], sizes: Sequence[int], uneven: Set[int] = frozenset(), orders: Orders = itertools.permutations
) -> Iterator[ShardingSpec]:
    """Every legal spec without partial sums of a tensor of ``shape``, replicated first.

    An axis splits at most one dim; a dim is split only by axes whose product divides it, or, if it is among ``uneven``, by others in the
    mesh's order; of several axes on one dim all ``orders`` are given where their product divides it. Axes of size 1 are left out.
    """
    axes = [axis for axis, size in enumerate(sizes) if size > 1]
    for dims in itertools.product(range(-1, len(shape)), repeat=len(axes)):
        chosen = [tuple(axis for axis, d in zip(axes, dims, strict=True) if d == dim) for dim in range(len(shape))]
        equal = [extent % math.prod(sizes[a] for a in some) == 0 for extent, some in zip(shape, chosen, strict=True)]
        if all(even or (dim in uneven and shape[dim] > 1) for dim, even in enumerate(equal)):
            for order in itertools.product(*(orders(some) if even else (some,) for some, even in zip(chosen, equal, strict=True))):
                yield ShardingSpec(tuple(order))


@dataclass(frozen=True)
class InnerCollective:
    """A collective that runs inside an operator under a strategy (vocabulary-split softmax, split batch norm, ring attention).

    Args:
        kind: ``all_reduce`` or ``permute``; of a collective that the model calls itself any.
        axes: the mesh axes of the group; of a permute, whose ranks have places, major to minor.
        bytes: on its group, of the reduced tensor or of the ranks' tensors together.
        reduction: one of ``REDUCTIONS``; of a permute ``mirror``, to the rank as far from the other end of the group, or ``next``, to
            the one behind, and from the last to the first; empty where nothing is reduced.
        beside: the turn of the operator's work beside which it travels; None where the operator waits for it at once.
    """

    kind: str
    axes: tuple[int, ...]
    bytes: int
    reduction: str = "sum"
    beside: int | None = None


@dataclass(frozen=True)
class Strategy:
    """One legal way to run one operator.

    Args:
        inputs: the spec each input must have.
        outputs: the spec each output comes out with.
        parts: into how many parts the iteration space is cut (work of the busiest rank = whole / parts; a fraction where parts differ).
        inner: the collectives it needs inside.
        factors: the axes given to each factor of the rule, for what runs on a rank to be derived.
        workspace: bytes that it holds on a rank beside its results, while it runs.
        turns: into how many equal parts a rank's work falls, each a kernel of its own on what has come by then.
        merged: bytes that a rank reads and writes to merge what the turns make.
    """

    inputs: tuple[ShardingSpec, ...]
    outputs: tuple[ShardingSpec, ...]
    parts: float = 1
    inner: tuple[InnerCollective, ...] = ()
    factors: tuple[tuple[str, tuple[int, ...]], ...] = field(default=(), compare=False)
    workspace: int = 0
    turns: int = 1
    merged: int = 0

    def __str__(self) -> str:
        return f"{', '.join(map(str, self.inputs))} -> {', '.join(map(str, self.outputs))}"
