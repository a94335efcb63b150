"""Bodies of ``autopar.dispatch``, ``dispatch_ids`` and ``combine`` on ranks that send rows to the ranks of their experts (see ``inner``).

The ranks of a group hold equal parts of the experts, in order. Each tells the others its number of rows for each of their experts. Then it
sends the rows. Their numbers are those that tokens chose, whatever the plan priced.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import torch
from torch import Tensor

from autopar.dialect.dispatch import add_up, fill_up, put_back
from autopar.dialect.experts import find_ends, list_experts, sort_choices
from autopar.runtime.backends import Unequal

COUNTS, ROWS = "counts", "rows"
Rows = Generator[tuple[Tensor | Unequal, str], Tensor, Tensor]
"""Yields what this rank puts in, ``COUNTS`` or ``ROWS``; is sent what it gets."""


@dataclass(frozen=True)
class _Way:
    """Which rows go where.

    Args:
        order: this rank's choices of experts at hand, by expert. Their rows leave in this order.
        sent, received: rows to and from each member.
        first: the first expert of this rank.
        counts: received rows of each of its experts ``[experts]``.
        sorts: the order that sorts received rows, which lie by sender and expert, by expert.
    """

    order: Tensor
    sent: list[int]
    received: list[int]
    first: int
    counts: Tensor
    sorts: Tensor


def _find_way(parts: int, ids: Tensor, first_expert: int, experts: int) -> Generator[tuple[Tensor | Unequal, str], Tensor, _Way]:
    own, order = sort_choices(ids, first_expert, experts)
    numbers = list_experts(ids, first_expert, experts)
    ends = find_ends(own, numbers)
    counts = torch.diff(ends, prepend=ends.new_zeros(1)).to(ids.dtype)
    came = yield torch.stack([numbers, counts], 1), COUNTS
    came = came.view(parts, experts // parts, 2)
    here = came[:, :, 1]
    sent, received, first = counts.view(parts, -1).sum(1).tolist(), here.sum(1).tolist(), int(came[0, 0, 0])
    owners = torch.arange(experts // parts, device=ids.device).repeat(parts).repeat_interleave(here.reshape(-1))
    return _Way(order[: sum(sent)], sent, received, first, here.sum(0), owners.argsort(stable=True))


def dispatch(parts: int, x: Tensor, ids: Tensor, experts: int, first_expert: int, columns: int) -> Rows:
    """``[tokens, ...] -> [experts / parts, at least columns, ...]``."""
    way = yield from _find_way(parts, ids, first_expert, experts)
    came = yield Unequal(x[way.order // (ids.shape[0] // x.shape[0])], way.sent, way.received), ROWS
    return fill_up(came[way.sorts], experts // parts, columns, 0)


def dispatch_ids(parts: int, ids: Tensor, experts: int, first_expert: int, columns: int) -> Rows:
    """``[choices] -> [experts / parts, at least columns]``."""
    way = yield from _find_way(parts, ids, first_expert, experts)
    own = experts // parts
    numbers = torch.arange(way.first, way.first + own, device=ids.device, dtype=ids.dtype).repeat_interleave(way.counts)
    return fill_up(numbers, own, columns, way.first + own - 1)


def combine(
    parts: int, rows: Tensor, ids: Tensor, weights: Tensor | None, experts: int, first_expert: int, choices: int, dtype: torch.dtype
) -> Rows:  # fmt: skip
    """``[experts / parts, at least columns, ...] -> [tokens, ...]``."""
    way = yield from _find_way(parts, ids, first_expert, experts)
    leaving = put_back(rows.reshape(-1, *rows.shape[2:]), way.sorts, len(way.sorts))
    came = yield Unequal(leaving, way.received, way.sent), ROWS
    return add_up(came, way.order, ids.shape[0], weights, choices, dtype)
