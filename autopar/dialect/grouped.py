"""``autopar.grouped_mm``: rows that are sorted by expert, each multiplied with its expert's matrix, and the gradient of the matrices.

``ends [all experts]`` says where each expert's rows end. The operands hold rows ``first_row ...`` of all rows and experts
``first_expert ...`` of all experts; rows of other experts contribute zero, so that split experts give a partial sum. Both are 0 in
captured graphs.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from autopar.dialect.library import define


def _bounds(ends: Tensor, rows: int, experts: int, first_row: int, first_expert: int) -> Tensor:
    """``[experts + 1]``: where the rows of the experts at hand begin and end among the rows at hand."""
    before = ends.new_zeros(1) if first_expert == 0 else ends[first_expert - 1 : first_expert]
    return (torch.cat([before, ends[first_expert : first_expert + experts]]) - first_row).clamp(0, rows)


def _grouped_mm(x: Tensor, w: Tensor, ends: Tensor, first_row: int, first_expert: int) -> Tensor:
    bounds = _bounds(ends, x.shape[0], w.shape[0], first_row, first_expert)
    if x.device.type != "cpu" and x.dtype == torch.bfloat16:
        return grouped_without_waiting(x, w, bounds)
    out = x.new_zeros(x.shape[0], w.shape[2])
    places = bounds.tolist()
    for expert, (begin, end) in enumerate(itertools.pairwise(places)):
        if end > begin:
            out[begin:end] = x[begin:end] @ w[expert]
    return out


def grouped_without_waiting(x: Tensor, w: Tensor, bounds: Tensor) -> Tensor:
    """The same by torch's kernel, whose groups start at row 0: the rows are turned until they do. No size depends on a value, so that
    a GPU runs on while Python goes ahead."""
    rows = torch.arange(x.shape[0], device=x.device)
    begin, count = bounds[0], bounds[-1] - bounds[0]
    turned = torch.nn.functional.grouped_mm(x[(rows + begin) % x.shape[0]], w, offs=(bounds[1:] - begin).to(torch.int32))
    return turned.masked_fill((rows >= count).unsqueeze(-1), 0)[(rows - begin) % x.shape[0]]


def _grouped_mm_shapes(x: Tensor, w: Tensor, ends: Tensor, first_row: int, first_expert: int) -> Tensor:
    if x.dim() != 2 or w.dim() != 3 or x.shape[1] != w.shape[1]:
        raise ValueError(f"grouped_mm of {tuple(x.shape)} rows by experts {tuple(w.shape)}")
    return x.new_empty(x.shape[0], w.shape[2])


def _grouped_outer(x: Tensor, grad: Tensor, ends: Tensor, experts: int, first_row: int, first_expert: int) -> Tensor:
    """``out[e] = sum of x[s]^T grad[s]`` over the rows of expert ``e``."""
    places = _bounds(ends, x.shape[0], experts, first_row, first_expert).tolist()
    out = x.new_zeros(experts, x.shape[1], grad.shape[1])
    for expert, (begin, end) in enumerate(itertools.pairwise(places)):
        if end > begin:
            out[expert] = x[begin:end].t() @ grad[begin:end]
    return out


def _grouped_outer_shapes(x: Tensor, grad: Tensor, ends: Tensor, experts: int, first_row: int, first_expert: int) -> Tensor:
    return x.new_empty(experts, x.shape[1], grad.shape[1])


def _save(context: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, w, ends, _, _ = inputs
    context.save_for_backward(x, w, ends)


def _gradient(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    x, w, ends = context.saved_tensors
    ours = torch.ops.autopar
    dx = ours.grouped_mm.default(gradient, w.transpose(1, 2), ends, 0, 0) if context.needs_input_grad[0] else None
    dw = ours.grouped_outer.default(x, gradient, ends, w.shape[0], 0, 0) if context.needs_input_grad[1] else None
    return dx, dw, None, None, None


define(
    "grouped_mm(Tensor x, Tensor w, Tensor ends, int first_row, int first_expert) -> Tensor",
    _grouped_mm, _grouped_mm_shapes, _gradient, _save, looks=True,
)  # fmt: skip
define(
    "grouped_outer(Tensor x, Tensor grad, Tensor ends, int experts, int first_row, int first_expert) -> Tensor",
    _grouped_outer, _grouped_outer_shapes, looks=True,
)  # fmt: skip
