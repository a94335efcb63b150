"""Bodies of the collectives that a model calls itself, on a rank's part (see ``inner``): dim 0 is the ranks whose values it has."""

from __future__ import annotations

from collections.abc import Generator

from torch import Tensor

Collective = Generator[tuple[Tensor, str], Tensor, Tensor]
"""Yields what this rank puts in and the reduction; is sent what it gets, flat where that is of another size."""


def _reduced(x: Tensor, reduction: str) -> Tensor:
    if x.shape[0] == 1:
        return x[0]
    return x.sum(0, dtype=x.dtype) if reduction == "sum" else x.amax(0) if reduction == "max" else x.amin(0)


def all_gather(parts: int, x: Tensor, over: str) -> Collective:
    """``[m, ...] -> [parts m, ...]``."""
    found = yield x, ""
    return found.view(parts * x.shape[0], *x.shape[1:])


def all_reduce(parts: int, x: Tensor, over: str, reduction: str) -> Collective:
    """``[m, ...] -> [...]``."""
    return (yield _reduced(x, reduction), reduction)


def reduce_scatter(parts: int, x: Tensor, over: str) -> Collective:
    """``[m, parts m, ...] -> [m, ...]``."""
    found = yield _reduced(x, "sum"), "sum"
    return found.view(x.shape[1] // parts, *x.shape[2:])


def all_to_all(parts: int, x: Tensor, over: str) -> Collective:
    """``[m, parts m, ...] -> [m, parts m, ...]``."""
    here = x.shape[0]
    found = yield x.transpose(0, 1).contiguous(), ""
    return found.view(parts, here, here, *x.shape[2:]).transpose(0, 1).reshape(x.shape)
