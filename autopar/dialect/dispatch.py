"""Rows that go to their experts, and back: ``autopar.dispatch``, ``autopar.dispatch_ids`` and ``autopar.combine``.

Each token chooses some experts, ``ids [tokens x choices]``, one token after the other. ``dispatch`` copies a token's row for each choice:
``[experts, columns, ...]``. In memory the rows are sorted by expert, and within one expert by token. An expert has as many rows as chose
it. So the two dims give the number of rows alone, not the place of one. Rows beyond the last are zeros, of the last expert.
``dispatch_ids`` gives each row's expert. ``combine`` adds up each token's rows, weighted.

``first_expert`` and ``experts`` are the first expert on a rank, and their number there. A rank with some of the experts has their rows
alone, and ``combine`` adds those. ``WHOLE`` as ``first_expert`` means all experts. Each operator is the other's gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopar.dialect.experts import NOT_KEPT, Places
from autopar.dialect.library import define, wide_dtype

FIRST_EXPERT = {"autopar.dispatch.default": 3, "autopar.dispatch_ids.default": 2, "autopar.combine.default": 4}
"""Position of the first expert among the arguments, behind the number of experts."""


def _dispatch(
    x: Tensor, ids: Tensor, experts: int, first_expert: int, columns: int, places: Places = NOT_KEPT
) -> Tensor:  # fmt: skip
    order = places.find_order(ids, first_expert, experts)
    choices = ids.shape[0] // max(x.shape[0], 1)
    return fill_up(x.index_select(0, order if choices == 1 else order // choices), experts, columns, 0)


def fill_up(rows: Tensor, experts: int, columns: int, value: int) -> Tensor:
    """``[rows, ...] -> [experts, at least columns, ...]``, filled up with a value."""
    count, *rest = rows.shape
    columns = max(columns, -(-count // experts))
    lacking = experts * columns - count
    if lacking:
        rows = torch.cat([rows, rows.new_full((lacking, *rest), value)])
    return rows.view(experts, columns, *rest)


def _dispatch_ids(ids: Tensor, experts: int, first_expert: int, columns: int, places: Places = NOT_KEPT) -> Tensor:
    order = places.find_order(ids, first_expert, experts)
    return fill_up(ids.index_select(0, order), experts, columns, max(first_expert, 0) + experts - 1)


def _combine(
    rows: Tensor, ids: Tensor, weights: Tensor | None, experts: int, first_expert: int, choices: int, dtype: torch.dtype,
    places: Places = NOT_KEPT,
) -> Tensor:  # fmt: skip
    order = places.find_order(ids, first_expert, experts)
    return add_up(rows.flatten(0, 1), order, ids.shape[0], weights, choices, dtype)


def put_back(rows: Tensor, order: Tensor, count: int) -> Tensor:
    """Rows at the places of their choices, ``[count, ...]``, zeros for choices without one.

    Args:
        rows: ``[at least len(order), ...]``.
    """
    (filled, *rest), there = rows.shape, order.shape[0]
    make = rows.new_empty if there == count else rows.new_zeros
    return make(count, *rest).index_copy_(0, order, rows if filled == there else rows[:there])


def add_up(rows: Tensor, order: Tensor, count: int, weights: Tensor | None, choices: int, dtype: torch.dtype) -> Tensor:
    """The sum over each token's choices, weighted, in float32 at least: ``[count / choices, ...]``.

    Where some choices have no row, those there are are added where they belong; on a GPU in any order, unless
    ``torch.use_deterministic_algorithms`` asks for one.

    Args:
        rows: of the choices in ``order``, ``[at least len(order), ...]``.
        weights: ``[count]``.
    """
    rest, there = rows.shape[1:], order.shape[0]
    whole = there == count
    rows = put_back(rows, order, count) if whole else rows[:there]
    if weights is not None:
        rows = rows * (weights if whole else weights[order]).reshape(-1, *[1] * len(rest))
    if choices == 1:
        sums = rows if whole else put_back(rows, order, count)
        return sums if sums.dtype == dtype else sums.to(dtype)
    wide = wide_dtype(rows.dtype)
    if whole:
        sums = rows.view(count // choices, choices, *rest).sum(1, dtype=wide)
        return sums if wide == dtype else sums.to(dtype)
    return rows.new_zeros(count // choices, *rest, dtype=wide).index_add_(0, order // choices, rows.to(wide)).to(dtype)


def _dispatch_shapes(x: Tensor, ids: Tensor, experts: int, first_expert: int, columns: int) -> Tensor:
    return x.new_empty(experts, columns, *x.shape[1:])


def _dispatch_ids_shapes(ids: Tensor, experts: int, first_expert: int, columns: int) -> Tensor:
    return ids.new_empty(experts, columns)


def _combine_shapes(
    rows: Tensor, ids: Tensor, weights: Tensor | None, experts: int, first_expert: int, choices: int, dtype: torch.dtype
) -> Tensor:  # fmt: skip
    return rows.new_empty(ids.shape[0] // choices, *rows.shape[2:], dtype=dtype)


def _save(context: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, ids, context.experts, *_ = inputs
    context.tokens, context.dtype = x.shape[0], x.dtype
    context.save_for_backward(ids)


def _dispatch_gradient(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    (ids,) = context.saved_tensors
    choices = ids.shape[0] // context.tokens
    made = torch.ops.autopar.combine.default(gradient, ids, None, context.experts, 0, choices, context.dtype)
    return made, None, None, None, None


def _save_combined(context: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, ids, weights, context.experts, *_ = inputs
    context.columns, context.dtype = rows.shape[1], rows.dtype
    context.save_for_backward(ids, *(() if weights is None else (rows, weights)))


def _combine_gradient(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    ids, *weighted = context.saved_tensors
    send = torch.ops.autopar.dispatch.default
    sent = send(gradient, ids, context.experts, 0, context.columns)
    if not weighted:
        return sent.to(context.dtype), *[None] * 6
    rows, weights = weighted
    trailing = [1] * (rows.dim() - 2)
    factor = send(weights, ids, context.experts, 0, context.columns)
    to_rows = (sent * factor.reshape(*factor.shape, *trailing)).to(context.dtype)
    to_weights = (sent.to(wide_dtype(weights.dtype)) * rows).flatten(2).sum(2) if trailing else sent * rows
    to_weights = torch.ops.autopar.combine.default(to_weights, ids, None, context.experts, 0, 1, weights.dtype)
    return to_rows, None, to_weights, *[None] * 4


define(
    "dispatch(Tensor x, Tensor ids, int experts, int first_expert, int columns) -> Tensor",
    _dispatch, _dispatch_shapes, _dispatch_gradient, _save,
)  # fmt: skip
define("dispatch_ids(Tensor ids, int experts, int first_expert, int columns) -> Tensor", _dispatch_ids, _dispatch_ids_shapes)
define(
    "combine(Tensor rows, Tensor ids, Tensor? weights, int experts, int first_expert, int choices, ScalarType dtype) -> Tensor",
    _combine, _combine_shapes, _combine_gradient, _save_combined,
)  # fmt: skip
