"""Attention over a split sequence, in which ranks exchange parts of it: bodies for ``inner``.

Of n ranks, rank i has block i of the sequence. Under a causal mask the later blocks have more keys to see. So ranks trade half of their
rows with the one as far from the other end: rank i then has the half blocks ``2i`` and ``2n - 1 - 2i``, which together see as many keys on
each rank. In a ring keys and values are traded so too. Of another rank's pair, the queries either all see the earlier half alone, or the
later of them see both halves: as much work at every turn on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.dialect.library import wide_dtype

Exchanges = Generator[tuple[Tensor, str], Any, Any]
"""Yields a tensor and ``mirror`` or ``next``; is sent the other rank's, or, beside work, a function that waits for it."""
Rows = Callable[[Tensor], Tensor]


def _all(tensor: Tensor) -> Tensor:
    return tensor


def _first(tensor: Tensor) -> Tensor:
    """The first half of the rows of ``[b, h, s, d]`` or ``[b, h, s]``."""
    return tensor.narrow(2, 0, tensor.shape[2] // 2)


def _second(tensor: Tensor) -> Tensor:
    return tensor.narrow(2, tensor.shape[2] // 2, tensor.shape[2] // 2)


def _heads_last(tensor: Tensor) -> Tensor:
    """In memory of its own as ``[b, s, h, d]``, where ``autopar.attention`` leaves its results."""
    return tensor.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2)


def _rejoined(first: Tensor, second: Tensor) -> Tensor:
    """The halves one after the other, in memory as ``[b, s, h, d]``."""
    return torch.cat([first.transpose(1, 2), second.transpose(1, 2)], 1).transpose(1, 2)


# --- halves of the queries are traded ---------------------------------------------------------------------------------


def _starts(parts: int, q: Tensor, offset: int) -> tuple[int, int]:
    """Among the keys: where the half begins that stays, and the half that comes from the mirrored rank."""
    rows = q.shape[2]
    return offset, (parts - 1) * rows - offset + rows // 2


def mirrored_attention(
    parts: int, q: Tensor, k: Tensor, v: Tensor, mask: None, causal: bool, scale: float, dropout: float, offset: int
) -> Exchanges:  # fmt: skip
    """Rank i attends for the first half of its own queries and for the second half of those of rank n - 1 - i."""
    attend, settings = torch.ops.autopar.attention.default, (mask, causal, scale, dropout)
    mine, theirs = _starts(parts, q, offset)
    traded = yield _second(q), "mirror"
    out, lse = attend(_first(q), k, v, *settings, mine)
    sent, sent_lse = attend(traded, k, v, *settings, theirs)
    out = _rejoined(out, (yield sent, "mirror"))
    return out, torch.cat([lse, (yield sent_lse, "mirror")], 2)


def mirrored_attention_backward(
    parts: int, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: None, causal: bool, scale: float,
    dropout: float, offset: int,
) -> Exchanges:  # fmt: skip
    """As ``mirrored_attention``; the gradients of keys and values are those of both halves."""
    backward, settings = torch.ops.autopar.attention_backward.default, (mask, causal, scale, dropout)
    mine, theirs = _starts(parts, q, offset)
    widths = [grad.shape[3], q.shape[3], out.shape[3]]
    traded = yield torch.cat([_second(grad), _second(q), _second(out)], 3), "mirror"
    traded_lse = yield _second(lse), "mirror"
    dq, dk, dv = backward(_first(grad), _first(q), k, v, _first(out), _first(lse), *settings, mine)
    grad, q, out = traded.split(widths, 3)
    sent, other_dk, other_dv = backward(grad, q, k, v, out, traded_lse, *settings, theirs)
    dk.add_(other_dk), dv.add_(other_dv)
    del other_dk, other_dv
    return _rejoined(dq, (yield sent, "mirror")), dk, dv


# --- keys and values travel -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Place:
    """A rank's place in a ring. Under a causal mask its rows are the two half blocks that it has after the trade, the earlier first."""

    ranks: int
    index: int
    causal: bool

    def earlier(self, turn: int) -> int:
        """The number of the earlier half block of the keys that are here at this turn, those of the rank so many before."""
        owner = (self.index - turn) % self.ranks
        return min(2 * owner, 2 * self.ranks - 1 - 2 * owner)

    def seen(self, turn: int) -> tuple[Rows, Rows]:
        """Which queries see which of the keys that are here at this turn. At the first, all, as far as the causal mask goes."""
        if not self.causal or turn == 0:
            return _all, _all
        return (_all, _first) if self.earlier(turn) < self.earlier(0) else (_second, _all)

    def in_order(self, own: Tensor, came: Tensor) -> Tensor:
        """The half that stays and the half that came, the earlier first."""
        return torch.cat([own, came] if 2 * self.index < self.ranks else [came, own], 2)

    def halves(self, tensor: Tensor) -> tuple[Tensor, Tensor]:
        """The half that stays, and the half that goes back."""
        halves = _first(tensor), _second(tensor)
        return halves if 2 * self.index < self.ranks else (halves[1], halves[0])


def _merge(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
    """Puts results over further keys into those over some: each counts as much as it has of all the exponentials."""
    total = torch.logaddexp(lse, more_lse)
    out.mul_((lse - total).exp_().unsqueeze(-1)).addcmul_(more, more_lse.sub(total).exp_().unsqueeze(-1))
    lse.copy_(total)


def _add(into: Sequence[Tensor], more: Sequence[Tensor]) -> None:
    for total, addend in zip(into, more, strict=True):
        total.add_(addend)


def ring_attention(
    parts: int, q: Tensor, k: Tensor, v: Tensor, mask: None, causal: bool, scale: float, dropout: float, offset: int
) -> Exchanges:  # fmt: skip
    """Each rank's queries attend to the keys that are there, then to those of the rank before it, once around."""
    place, widths = _Place(parts, offset // q.shape[2], causal), [k.shape[3], v.shape[3]]
    kv, dtype, wide = torch.cat([k, v], 3), q.dtype, wide_dtype(q.dtype)
    if causal:
        q = place.in_order(_first(q), (yield _second(q), "mirror"))
        kv = place.in_order(_first(kv), (yield _second(kv), "mirror"))
    for turn in range(parts):
        coming = (yield kv, "next") if turn < parts - 1 else None
        rows, keys = place.seen(turn)
        settings = None, causal and turn == 0, scale, dropout, 0
        more, more_lse = torch.ops.autopar.attention.default(rows(q), *keys(kv).split(widths, 3), *settings)
        if turn == 0:
            out, lse = more.to(wide), more_lse
        else:
            _merge(rows(out), rows(lse), more, more_lse)
        del more, more_lse
        if coming is not None:
            kv, coming = coming(), None
    del q, kv
    out = out.to(dtype)
    if causal:
        own, sent = place.halves(out)
        out = _rejoined(own, (yield sent, "mirror"))
        own, sent = place.halves(lse)
        lse = torch.cat([own, (yield sent, "mirror")], 2)
    return out, lse


def ring_attention_backward(
    parts: int, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: None, causal: bool, scale: float,
    dropout: float, offset: int,
) -> Exchanges:  # fmt: skip
    """As ``ring_attention``; the gradients of keys and values follow them a turn later, each rank adds its own, and they end at home."""
    backward = torch.ops.autopar.attention_backward.default
    place, widths = _Place(parts, offset // q.shape[2], causal), [k.shape[3], v.shape[3]]
    kv, dtype, wide = torch.cat([k, v], 3), q.dtype, wide_dtype(q.dtype)
    if causal:
        traded = yield torch.cat([_second(grad), _second(q), _second(out)], 3), "mirror"
        came = traded.split([grad.shape[3], q.shape[3], out.shape[3]], 3)
        del traded
        grad, q, out = (place.in_order(_first(own), other) for own, other in zip((grad, q, out), came, strict=True))
        del came
        lse = place.in_order(_first(lse), (yield _second(lse), "mirror"))
        kv = place.in_order(_first(kv), (yield _second(kv), "mirror"))
    following: Any = None
    for turn in range(parts):
        coming = (yield kv, "next") if turn < parts - 1 else None
        rows, keys = place.seen(turn)
        settings = None, causal and turn == 0, scale, dropout, 0
        more, *of_keys = backward(rows(grad), rows(q), *keys(kv).split(widths, 3), rows(out), rows(lse), *settings)
        if following is None:
            dq, dkv = more.to(wide), torch.cat(of_keys, 3)
        else:
            rows(dq).add_(more)
            dkv, following = following(), None
            _add(keys(dkv).split(widths, 3), of_keys)
        del more, of_keys
        following = yield dkv, "next"
        if coming is not None:
            kv, coming = coming(), None
    dq, dkv = dq.to(dtype), following
    del grad, q, out, kv, following
    if causal:
        own, sent = place.halves(dq)
        dq = _rejoined(own, (yield sent, "mirror"))
        own, sent = place.halves(dkv)
        dkv = torch.cat([own, (yield sent, "mirror")], 2)
    dk, dv = map(_heads_last, dkv.split(widths, 3))
    return dq, dk, dv
