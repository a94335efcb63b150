"""Bodies of ``autopar.dispatch``, ``dispatch_ids`` and ``combine`` on ranks that send rows to the ranks of their experts (see ``inner``).

The ranks of a group hold equal parts of the experts, in order. Each tells the others its number of rows for each of their experts. Then it
sends the rows. Their numbers are those that tokens chose, whatever the plan priced.

Several operators of a segment send rows of the same choices: to experts, back, and the gradients of both. The first tells the numbers, and
the others know them (``KeptWays``).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from autopar.dialect.dispatch import add_up, fill_up, put_back
from autopar.dialect.experts import find_ends, list_experts, sort_choices
from autopar.runtime.ranks.backends import Unequal

COUNTS, ROWS = "counts", "rows"
Put = tuple[Tensor | Unequal | None, str]
"""What this rank puts in, ``COUNTS`` or ``ROWS``. None as counts: they are known, on all ranks of the group."""
Rows = Generator[Put, Tensor, Tensor]
"""Yields what this rank puts in; is sent what it gets, nothing where counts are known."""


@dataclass(frozen=True)
class Way:
    """Which rows go where.

    Args:
        order: this rank's choices of experts at hand, by expert. Their rows leave in this order.
        sent, received: rows to and from each member.
        first: the first expert of this rank.
        counts: received rows of each of its experts ``[experts]``; total: of all.
        sorts: the order that sorts received rows, which lie by sender and expert, by expert.
    """

    order: Tensor
    sent: list[int]
    received: list[int]
    first: int
    counts: Tensor
    sorts: Tensor

    @property
    def total(self) -> int:
        return self.sorts.shape[0]


Told = Generator[Put, Tensor, Way]


def find_way(axes: Sequence[int], parts: int, ids: Tensor, first_expert: int, experts: int) -> Told:
    """Tells the other ranks of the group the numbers of rows, and is told theirs. The host waits once.

    Args:
        axes: along which the group lies; parts: its ranks.
        ids: the expert of each choice of this rank ``[choices]``.
        first_expert, experts: of the group.
    """
    own, order = sort_choices(ids, first_expert, experts)
    numbers = list_experts(ids, first_expert, experts)
    ends = find_ends(own, numbers)
    counts = torch.diff(ends, prepend=ends.new_zeros(1)).to(ids.dtype)
    came = yield torch.stack([numbers, counts], 1), COUNTS
    came = came.view(parts, experts // parts, 2)
    here = came[:, :, 1]
    read = torch.cat([counts.view(parts, -1).sum(1), here.sum(1), came[0, 0, :1]]).tolist()
    sent, received, first = read[:parts], read[parts:-1], read[-1]
    owners = torch.arange(experts // parts, device=ids.device).repeat(parts)
    owners = owners.repeat_interleave(here.reshape(-1), output_size=sum(received))  # torch waits for the size where it is not told
    return Way(order[: sum(sent)], sent, received, first, here.sum(0), owners.argsort(stable=True))


FindWay = Callable[[int, Tensor, int, int], Told]
"""``find_way`` along given axes, or one that remembers."""


class KeptWays:
    """The ways of one rank, found once for all operators that read the same ids along the same axes, until ``let_go``.

    The same ids, experts and group give the same numbers. All ranks of a group run the same operators in the same order. So either all
    have found a way in this segment or none has, and none waits for counts that others do not send. Ids are known by identity and
    version, and are kept so that no others take their identity. So a step that broke off leaves nothing that a later one takes for its
    own. Inference tensors have no version: what they give is not kept.

    A choice and a received row take 8 bytes each, as in ``KeptPlaces``.
    """

    def __init__(self) -> None:
        self._found: dict[tuple[int, tuple[int, ...], int, int], tuple[Tensor, int, Way]] = {}

    def find(self, axes: Sequence[int], parts: int, ids: Tensor, first_expert: int, experts: int) -> Told:
        """As ``find_way``."""
        if ids.is_inference():
            return (yield from find_way(axes, parts, ids, first_expert, experts))
        key = id(ids), tuple(axes), first_expert, experts
        held = self._found.get(key)
        if held is not None and held[1] == ids._version:
            yield None, COUNTS
            return held[2]
        way = yield from find_way(axes, parts, ids, first_expert, experts)
        self._found[key] = ids, ids._version, way
        return way

    def let_go(self) -> None:
        """Forgets all ways."""
        self._found.clear()


def dispatch(parts: int, x: Tensor, ids: Tensor, experts: int, first_expert: int, columns: int, *, find: FindWay) -> Rows:
    """``[tokens, ...] -> [experts / parts, at least columns, ...]``."""
    way = yield from find(parts, ids, first_expert, experts)
    came = yield Unequal(x[way.order // (ids.shape[0] // x.shape[0])], way.sent, way.received), ROWS
    return fill_up(came[way.sorts], experts // parts, columns, 0)


def dispatch_ids(parts: int, ids: Tensor, experts: int, first_expert: int, columns: int, *, find: FindWay) -> Rows:
    """``[choices] -> [experts / parts, at least columns]``."""
    way = yield from find(parts, ids, first_expert, experts)
    own = experts // parts
    numbers = list_experts(ids, way.first, own).repeat_interleave(way.counts, output_size=way.total)
    return fill_up(numbers, own, columns, way.first + own - 1)


def combine(
    parts: int, rows: Tensor, ids: Tensor, weights: Tensor | None, experts: int, first_expert: int, choices: int, dtype: torch.dtype,
    *, find: FindWay,
) -> Rows:  # fmt: skip
    """``[experts / parts, at least columns, ...] -> [tokens, ...]``."""
    way = yield from find(parts, ids, first_expert, experts)
    leaving = put_back(rows.reshape(-1, *rows.shape[2:]), way.sorts, way.total)
    came = yield Unequal(leaving, way.received, way.sent), ROWS
    return add_up(came, way.order, ids.shape[0], weights, choices, dtype)
