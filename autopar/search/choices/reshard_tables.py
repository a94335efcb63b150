"""Prices of reshards between all pairs of specs at once.

Pairs are coded as integers. Interchangeable axes are renamed to one order, which leaves fewer distinct pairs. Each distinct source is asked
once for all its targets. The copies around collectives are counted for all pairs together. Prices equal those of ``find_reshard``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial

import numpy as np

from autopar.cost_models import Machine
from autopar.graph import DTYPE_BYTES, Tensor
from autopar.reshard import Asked, Calls, find_ways
from autopar.reshard.planning import alike, is_fine
from autopar.rules import DENSE, Repeated
from autopar.sharding import REDUCTIONS, ShardingSpec

LARGE_BYTES = 2.0**60
"""Bytes beside which a launch takes no time."""
UNUSED = -1
"""Code of an axis that a spec does not use. ``UNUSED - 1 - r`` is the code of an axis over which a value is partial by reduction ``r``."""
SUM = UNUSED - 1 - REDUCTIONS.index("sum")

KEPT_MACHINES, KEPT_PAIRS = 4, 1 << 16
"""Machines whose prices are kept for later searches, and the most pairs of each at which they are: a pair takes some 250 bytes."""

Codes = np.ndarray
"""Code of each axis in each spec (or pair): dim times the number of axes plus the position there, or as ``UNUSED`` says."""


@dataclass
class _Known:
    """Prices of one shape and dtype. ``prices`` has shape [rows, 3 + links]; ``row`` maps the code of a pair to its row."""

    prices: np.ndarray
    row: dict[bytes, int] = field(default_factory=dict)


class ReshardPricing:
    """Prices of reshards on one machine.

    Args:
        links: the links whose loads are priced.
    """

    def __init__(self, machine: Machine, links: tuple[str, ...]) -> None:
        self.machine, self.links = machine, links
        self.sizes = np.array(machine.mesh.sizes)
        self.axes, self.fine = len(self.sizes), is_fine(machine)
        self.groups = () if self.fine else alike(machine)
        self.columns = 3 + len(links)
        self._known: dict[object, _Known] = {}
        """By shape, dtype and repeated dims."""
        self._copies: dict[tuple[int, str], tuple[float, float]] = {}

    def tables(
        self, tensor: Tensor, sources: Sequence[ShardingSpec], targets: Sequence[ShardingSpec], repeated: Repeated = DENSE
    ) -> np.ndarray:  # fmt: skip
        """Prices of each reshard; shape [sources, targets, 3 + links].

        Args:
            repeated: of the sources; a call that begins with one which repeats copies it.

        The columns are seconds with copies, infinite where impossible; seconds for which each link is held, without latencies; copies with
        launches; and copies without.
        """
        one, other = np.broadcast_arrays(axis_codes(sources, self.axes)[:, None], axis_codes(targets, self.axes)[None])
        other = np.where((other == SUM) & (one >= UNUSED), UNUSED, other)  # a whole value becomes a partial sum for nothing
        pairs = self._renamed(one, other, len(tensor.shape)).reshape(-1, 2 * self.axes)
        first, inverse = _distinct(pairs)
        known = self._known.setdefault((tensor.shape, tensor.dtype, tuple(repeated.items())), _Known(np.zeros((0, self.columns))))
        codes = [code.tobytes() for code in pairs[first]]
        fresh = [place for place, code in enumerate(codes) if code not in known.row]
        if fresh:
            made = self._padded_prices(tensor, pairs[first[fresh]], repeated)
            known.row.update((codes[place], len(known.prices) + number) for number, place in enumerate(fresh))
            known.prices = np.concatenate([known.prices, made])
        rows = np.array([known.row[code] for code in codes], dtype=np.int64)
        found: np.ndarray = known.prices[rows[inverse]].reshape(len(sources), len(targets), -1)
        return found

    @property
    def pairs(self) -> int:
        """Number of pairs whose prices are known."""
        return sum(len(known.row) for known in self._known.values())

    def _renamed(self, one: Codes, other: Codes, rank: int) -> Codes:
        """Pairs with interchangeable axes renamed in the order of their use; shape [sources, targets, 2, axes]."""
        found = np.stack([one, other], axis=2)
        if not self.groups:
            return found
        numbers, span = np.arange(self.axes), max(rank, 1) * self.axes
        used = np.where(other >= 0, 2 * span + other, np.where(other == UNUSED, 4 * span, 3 * span) + numbers)
        used = np.where(one >= 0, one, np.where(one == UNUSED, used, span + numbers))
        for group in self.groups:
            order = np.argsort(used[:, :, list(group)], axis=2, kind="stable")[:, :, None]
            found[:, :, :, list(group)] = np.take_along_axis(found[:, :, :, list(group)], order, axis=3)
        return found

    def _padded_prices(self, tensor: Tensor, pairs: Codes, repeated: Repeated) -> np.ndarray:
        """The price row of each pair. Pairs that pad the tensor to the same shape are priced together.

        A dim that both specs split but pad differently is priced as gathered. The slice that follows costs nothing.
        """
        shape = np.array(tensor.shape, dtype=np.int64)
        if not (shape % self.sizes.prod()).any():
            return self._prices(tensor, pairs, shape > shape, repeated)
        splits = [np.where(codes >= 0, codes // self.axes, -1) for codes in (pairs[:, : self.axes], pairs[:, self.axes :])]
        counts = [np.stack([np.where(dims == dim, self.sizes, 1).prod(axis=1) for dim in range(len(shape))], axis=1) for dims in splits]
        if not any((shape % cut).any() for cut in counts):
            return self._prices(tensor, pairs, shape > shape, repeated)
        one, other = (np.where(cut > 1, -(-shape // cut) * cut, 0) for cut in counts)
        cuts = [np.stack([self._size_codes(dims == dim) for dim in range(len(shape))], axis=1) for dims in splits]
        unlike = (one != other) | ((cuts[0] != cuts[1]) & (one != shape))
        apart = np.pad((one > 0) & (other > 0) & unlike, [(0, 0), (0, 1)])  # one more dim, for axes that split none
        whole = np.take_along_axis(apart, splits[1], axis=1)
        pairs = np.concatenate([pairs[:, : self.axes], np.where(whole, UNUSED, pairs[:, self.axes :])], axis=1)
        filled = np.where(one > 0, one, np.where(other > 0, other, shape))
        found = np.zeros((len(pairs), self.columns))
        for length in np.unique(filled, axis=0):
            some = np.flatnonzero((filled == length).all(axis=1))
            found[some] = self._prices(replace(tensor, shape=tuple(length.tolist())), pairs[some], length > shape, repeated)
        return found

    def _size_codes(self, axes: np.ndarray) -> np.ndarray:
        """A number for the sizes of some axes in mesh order; shape [pairs] from [pairs, axes]."""
        found = np.zeros(len(axes), dtype=np.int64)
        for size, among in zip(self.sizes.tolist(), axes.T, strict=True):
            found = np.where(among & (size > 1), found * (self.sizes.max() + 1) + size, found)
        return found

    def _prices(self, tensor: Tensor, pairs: Codes, longer: np.ndarray, repeated: Repeated) -> np.ndarray:
        """The price row of each pair.

        Args:
            longer: whether each dim is padded; shape [dims].
        """
        shape, rank, size = np.array(tensor.shape, dtype=np.int64), len(tensor.shape), DTYPE_BYTES[tensor.dtype]
        one, other = pairs[:, : self.axes], pairs[:, self.axes :]
        whole = np.where(other < UNUSED, 1, self.sizes).prod(axis=1)  # an axis that stays partial cuts nothing
        dims = [split_codes(one, self.axes, rank), split_codes(other, self.axes, rank), np.gcd(shape[None], whole[:, None])]
        order = np.lexsort(dims[::-1], axis=1)
        sources, which = _distinct(np.concatenate([one, np.minimum(other, UNUSED)], axis=1))
        rows = np.split(np.argsort(which, kind="stable"), np.cumsum(np.bincount(which))[:-1])
        asked = []
        for source, some in zip(sources.tolist(), rows, strict=True):
            codes = other[some]
            split = codes >= 0
            where = np.where(split, codes // self.axes, -1), np.where(split, codes % self.axes, 0)
            asked.append(Asked(some, self._spec(one, rank, source), partial(self._spec, codes, rank), *where, order[some]))
        ways = find_ways(tensor.shape, size, asked, self.machine, self.fine, self.links)
        filled = (ways.moved & longer).any(axis=1)
        copies = self._copy_seconds(tensor, ways.calls, filled, self._repeating(shape, one, repeated))
        return np.concatenate([ways.seconds[:, None] + copies[:, :1], ways.loads, copies], axis=1)

    def _spec(self, codes: Codes, rank: int, row: int) -> ShardingSpec:
        """The spec that row ``row`` of ``codes`` stands for, of a tensor with ``rank`` dims."""
        places = {int(place): axis for axis, place in enumerate(codes[row]) if place >= 0}
        dims = tuple(
            tuple(places[place] for place in range(dim * self.axes, (dim + 1) * self.axes) if place in places) for dim in range(rank)
        )
        pending = tuple((axis, REDUCTIONS[UNUSED - 1 - place]) for axis, place in enumerate(codes[row].tolist()) if place < UNUSED)
        return ShardingSpec(dims, pending)

    def _repeating(self, shape: np.ndarray, sources: Codes, repeated: Repeated) -> np.ndarray:
        """Into how many parts each source that repeats is cut along each dim, 0 of others; shape [pairs, dims]."""
        if not repeated:
            return np.zeros((len(sources), len(shape)), dtype=np.int64)
        dims = np.where(sources >= 0, sources // self.axes, -1)
        counts = np.stack([np.where(dims == dim, self.sizes, 1).prod(axis=1) for dim in range(len(shape))], axis=1)
        held = shape // counts
        stored = np.stack([repeated.get(dim, held[:, dim]) * np.ones(len(held), dtype=np.int64) for dim in range(len(shape))], axis=1)
        return np.where((held.prod(axis=1) > stored.prod(axis=1))[:, None], counts, 0)

    def _copy_seconds(self, tensor: Tensor, calls: Calls, filled: np.ndarray, repeating: np.ndarray) -> np.ndarray:
        """Seconds of the copies of each pair's calls, with launches and without; shape [pairs, 2]. See ``reshard.steps.copied_alone``.

        Args:
            filled: the pairs whose collectives pad, and so copy both what is sent and what is received; shape [pairs].
            repeating: see ``_repeating``; the call that begins from such a source copies what it sends.
        """
        found, extents = np.zeros((len(filled), 2)), np.array(tensor.shape, dtype=np.int64)
        copied, fills = np.zeros(len(calls.way), dtype=np.int64), filled[calls.way]
        first = np.all(calls.before == repeating[calls.way], axis=1) & np.any(repeating > 0, axis=1)[calls.way]
        for counts, dim, packed in ((calls.before, calls.cut, fills | first), (calls.after, calls.joined, fills)):
            held = extents // counts
            lead = np.where(np.arange(len(extents)) < dim[:, None], held, 1).prod(axis=1)
            copied += np.where(packed | ((dim >= 0) & (lead > 1)), held.prod(axis=1), 0)
        distinct, back = np.unique(copied * DTYPE_BYTES[tensor.dtype], return_inverse=True)
        seconds = np.array([self._copy(elements, tensor.dtype) for elements in distinct.tolist()]).reshape(-1, 2)
        np.add.at(found, calls.way, seconds[back])
        return found

    def _copy(self, copied: int, dtype: str) -> tuple[float, float]:
        """Seconds of copying ``copied`` bytes, with the launch and without."""
        key = copied, dtype
        if key not in self._copies:
            self._copies[key] = (
                self.machine.copy_seconds(copied, dtype),
                copied * self.machine.copy_seconds(LARGE_BYTES, dtype) / LARGE_BYTES,
            )
        return self._copies[key]


def known_pricing(machine: Machine, links: tuple[str, ...]) -> ReshardPricing:
    """The prices on a machine, with those that earlier searches of this process asked for, whatever their graphs were."""
    found = _pricing(machine, links)
    if found.pairs > KEPT_PAIRS:
        _pricing.cache_clear()
        found = _pricing(machine, links)
    return found


@lru_cache(maxsize=KEPT_MACHINES)
def _pricing(machine: Machine, links: tuple[str, ...]) -> ReshardPricing:
    return ReshardPricing(machine, links)


def axis_codes(specs: Sequence[ShardingSpec], axes: int) -> Codes:
    """The code of each axis in each spec; shape [specs, axes]."""
    return np.array([_axis_codes(spec, axes) for spec in specs], dtype=np.int64).reshape(len(specs), axes)


@lru_cache(maxsize=1 << 16)
def _axis_codes(spec: ShardingSpec, axes: int) -> tuple[int, ...]:
    found = [UNUSED] * axes
    for dim, word in enumerate(spec.dims):
        for position, axis in enumerate(word):
            found[axis] = dim * axes + position
    for axis, reduction in spec.partial:
        found[axis] = UNUSED - 1 - REDUCTIONS.index(reduction)
    return tuple(found)


def split_codes(codes: Codes, axes: int, rank: int) -> np.ndarray:
    """For each spec and dim, a number for the axes that split it; shape [specs, dims]. Numbers compare as tuples of axes do."""
    found = np.zeros((len(codes), rank), dtype=np.int64)
    split = codes >= 0
    dim, position = np.where(split, codes // axes, -1), codes % axes
    weights = (np.arange(axes) + 1) * (axes + 1) ** (axes - 1 - position)
    for number in range(rank):
        found[:, number] = np.where(dim == number, weights, 0).sum(axis=1)
    return found


def _distinct(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The first index of each distinct row, and for each row the number of its distinct row."""
    numbers, span = np.zeros(len(rows), dtype=np.int64), 1
    for column in rows.T:
        low = int(column.min())
        width = int(column.max()) - low + 1
        if span * width >= 2**62:
            distinct, numbers = np.unique(numbers, return_inverse=True)
            span = len(distinct)
        numbers, span = numbers * width + (column - low), span * width
    _, first, inverse = np.unique(numbers, return_index=True, return_inverse=True)
    return first, inverse
