"""The ways to split a factor along which ranks exchange parts inside of the operator: what travels, when, and what it takes.

- ``mirrored``: halves are traded before and after, so that each rank has as many light rows of a triangle as heavy ones.
- ``ring``: parts along another factor travel once around, each hop beside the turn of the work on the part before (Liu, Zaharia and Abbeel
  2023); what is made along that factor, gradients, follows its part a turn later, as wide as a reduction over the ranks would have it, and
  ends at its owner. Of a triangle's rows both factors' parts are first traded as in ``mirrored``: then every turn has as much to do on
  every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from autopar.rules.rule import Dims, ShardingRule
from autopar.sharding import InnerCollective

Axes = tuple[int, ...]
WIDE_BYTES = 4
"""Bytes of an element of a running sum: at least float32."""


class Inside(NamedTuple):
    """What a way adds to a strategy: see there."""

    inner: tuple[InnerCollective, ...] = ()
    workspace: int = 0
    turns: int = 1
    merged: int = 0


class Held(NamedTuple):
    """A rank's parts.

    Args:
        axes: which split the factor, major to minor.
        ranks: how many parts that makes.
        sizes: bytes of each tensor, numbered over inputs, then outputs.
        itemsizes: bytes of their elements.
    """

    axes: Axes
    ranks: int
    sizes: Sequence[int]
    itemsizes: Sequence[int]

    def wide(self, index: int) -> int:
        """Bytes of the tensor in the width of sums."""
        return self.sizes[index] // self.itemsizes[index] * max(WIDE_BYTES, self.itemsizes[index])

    def permute(self, sent: int, reduction: str, beside: int | None = None) -> InnerCollective:
        """A permute of which each rank sends so many bytes."""
        return InnerCollective("permute", self.axes, self.ranks * sent, reduction, beside)

    def halves(self, group: Sequence[int]) -> InnerCollective:
        """Half of each rank's part of these tensors goes to the mirrored rank."""
        return self.permute(sum(self.sizes[index] for index in group) // 2, "mirror")


def _plain(rule: ShardingRule, held: Held) -> Inside:
    return Inside()


def _mirrored(rule: ShardingRule, held: Held) -> Inside:
    """Beside the results: the halves that came in, with either what both halves make of all (which is added up), or of an output by rows
    its halves, one of them come back, beside the whole."""
    assert rule.mirror is not None
    first, sizes = len(rule.inputs), held.sizes
    by_rows = _along(rule.outputs, rule.mirror.factor, first)
    came = sum(sizes[index] for index in rule.mirror.sent[0]) // 2
    added = sum(sizes[index] for index in range(first, len(sizes)) if index not in by_rows)
    room = came + max(added, max((3 * sizes[index] // 2 for index in by_rows), default=0))
    return Inside(tuple(map(held.halves, rule.mirror.sent)), room)


def _ring(rule: ShardingRule, held: Held) -> Inside:
    """Beside the results: of what travels two blocks, the one that a rank works on and the one that comes; of a triangle, the rows as they
    are after the trade; the sums that stay, in their width; of those that travel the two that are under way, what a turn adds to them being
    as large as the results, or, where only half of the rows or of the block meet, less by half of one of these. At the first turn none is
    under way yet, and what it makes of the rows is their sum where that is as wide; at the last, of two ranks the other one, no block
    comes, and what was sent is given up when the gradients follow."""
    assert rule.ring is not None
    first, last = len(rule.inputs), held.ranks - 1
    block = sum(held.sizes[index] for index in rule.ring.sent)
    made = _along(rule.outputs, rule.ring.along, first)
    rows = _along(rule.outputs, rule.ring.factor, first)
    home = sum(held.sizes[index] for index in made)
    groups = rule.mirror.sent if rule.mirror is not None else ()
    before = [group for group in groups if max(group) < first]
    after = [group for group in groups if max(group) >= first]
    hops = []
    for turn in range(held.ranks):
        hops += [held.permute(block, "next", turn)] if turn < last else []
        hops += [held.permute(home, "next", turn + 1 if turn < last else None)] if made else []
    traded = sum(held.sizes[index] for group in before for index in group)
    halved = min(home, sum(held.sizes[index] for index in rows)) // 2 if groups else 0
    wider = sum(held.wide(index) for index in rows if held.wide(index) > held.sizes[index])
    later = (1 if made and held.ranks == 2 else 2) * block + sum(map(held.wide, rows)) + 2 * home - halved
    room = traded + max(2 * block + wider + home, later)
    inner = [*map(held.halves, before), *([held.halves(rule.ring.sent)] if groups else []), *hops]
    inner += [*map(held.halves, after), *([held.halves(made)] if groups and made else [])]
    passes = 1 if made else 2  # gradients are added; results are weighed by how much of the whole each turn has seen, the old and the new
    merged = sum(2 * passes * held.wide(index) + held.sizes[index] for index in rows)
    return Inside(tuple(inner), room, held.ranks, held.ranks * (merged + 3 * home))


def _along(terms: Sequence[Dims], factor: str, first: int) -> tuple[int, ...]:
    """The tensors that have the factor, numbered from ``first``."""
    return tuple(index for index, dims in enumerate(terms, first) if any(factor in names for names in dims))


WAYS: Mapping[str, Callable[[ShardingRule, Held], Inside]] = {"": _plain, "mirrored": _mirrored, "ring": _ring}
"""By the word that follows the factor's name in a strategy."""
