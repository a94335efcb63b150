"""Lookups and losses: embedding, cross entropy and the elementwise losses, reduced by plain sums."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from autopar.dialect.lookup import PaddedEmbedding
from autopar.errors import CaptureError


def embedding(weight: Tensor, indices: Tensor, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False) -> Tensor:
    if scale_grad_by_freq:
        return torch.ops.aten.embedding.default(weight, indices, padding_idx, scale_grad_by_freq, False)
    if padding_idx >= 0 and weight.requires_grad:
        return PaddedEmbedding.apply(weight, indices, padding_idx)
    return torch.ops.autopar.embedding.default(weight, indices, 0)


def precise(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A loss, or another function, in float32 under ``torch.autocast``, as torch computes it there."""

    def replacement(*args: Any, **kwargs: Any) -> Tensor:
        return function(*map(_wide, args), **{name: _wide(item) for name, item in kwargs.items()})

    return replacement


def _wide(item: Any) -> Any:
    half = isinstance(item, Tensor) and item.dtype in (torch.float16, torch.bfloat16)
    return item.float() if half and torch.is_autocast_enabled("cpu") else item


class Flattened:
    """Remembers which tensors are others with their leading dims merged, for as long as one walk over the graph.

    Models flatten ``[b, s, c]`` logits to ``[b * s, c]`` for the loss only. A merged dim can be split along ``b`` but not along ``s``,
    so the loss is taken of the original instead, where both can be.
    """

    def __init__(self) -> None:
        self._originals: dict[int, tuple[Tensor, Tensor]] = {}

    def noting(self, operator: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """The operator, with its result remembered where it merges leading dims."""

        def replacement(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            out = operator(x, *args, **kwargs)
            logits = out.dim() == 2 and x.dim() > 2 and out.shape[-1] == x.shape[-1]
            targets = out.dim() == 1 and x.dim() > 1 and not x.is_floating_point()
            if logits or targets:
                self._originals[id(out)] = out, self.original(x)
            return out

        return replacement

    def original(self, tensor: Tensor) -> Tensor:
        """What a tensor was before its leading dims were merged; itself when they were not."""
        _, original = self._originals.get(id(tensor), (tensor, tensor))
        return original

    def cross_entropy(
        self,
        x: Tensor,
        target: Tensor,
        weight: Tensor | None = None,
        reduction: int = 1,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
    ) -> Tensor:
        """Cross entropy of logits ``[c]``, ``[n, c]`` or ``[n, c, ...]``; targets are class indices or probabilities."""
        dim = 0 if x.dim() == 1 else 1
        logits = x.movedim(dim, -1)
        if target.is_floating_point():
            logp = torch.log_softmax(_wide(logits), -1)
            return _soft_cross_entropy(logp, _wide(target).movedim(dim, -1), _wide(weight), reduction, label_smoothing)
        if x.dim() == 2 and reduction != 0 and self.original(x) is not x:
            logits = self.original(x)
            before = self.original(target)
            target = before if before.shape == logits.shape[:-1] else target.view(logits.shape[:-1])
        return _cross_entropy(torch.log_softmax(_wide(logits), -1), target, _wide(weight), reduction, ignore_index, label_smoothing)


def _cross_entropy(
    logp: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int, label_smoothing: float
) -> Tensor:  # fmt: skip
    plain = _reduced_nll(logp, target, weight, reduction, ignore_index)
    if label_smoothing == 0:
        return plain
    weighted = logp if weight is None else logp * weight
    spread = (-weighted.sum(-1)).masked_fill(target == ignore_index, 0)
    if reduction == 1:
        spread = spread.sum() / _weight_total(target, weight, ignore_index, logp.dtype)
    elif reduction == 2:
        spread = spread.sum()
    return (1 - label_smoothing) * plain + (label_smoothing / logp.shape[-1]) * spread


def _soft_cross_entropy(logp: Tensor, target: Tensor, weight: Tensor | None, reduction: int, label_smoothing: float) -> Tensor:
    if label_smoothing:
        target = target * (1 - label_smoothing) + label_smoothing / logp.shape[-1]
    weighted = logp if weight is None else logp * weight
    rows = -(weighted * target).sum(-1)
    if reduction == 0:
        return rows
    return rows.sum() / max(rows.numel(), 1) if reduction == 1 else rows.sum()


def nll_loss(x: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = 1, ignore_index: int = -100) -> Tensor:
    logp = x if x.dim() == 1 else x.movedim(1, -1)
    return _reduced_nll(logp, target, weight, reduction, ignore_index)


def _reduced_nll(logp: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int) -> Tensor:
    """``logp [..., c]``, ``target [...]``. The mean is over the (weights of the) targets that are not ignored."""
    rows = torch.ops.autopar.nll_loss.default(logp, target, ignore_index, 0)
    if weight is not None:
        rows = rows * _target_weights(target, weight, ignore_index)
    if reduction == 0:
        return rows
    total = rows.sum(dtype=_accumulation(logp.dtype))
    if reduction == 1:
        total = total / _weight_total(target, weight, ignore_index, total.dtype)
    return total.to(logp.dtype)


def _accumulation(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _target_weights(target: Tensor, weight: Tensor, ignore_index: int) -> Tensor:
    """The class weight of each target, 0 for ignored ones: the lookup of a one-column table."""
    rows = torch.ops.autopar.embedding.default(weight.unsqueeze(-1), target, 0).squeeze(-1)
    return rows.masked_fill(target == ignore_index, 0)


def _weight_total(target: Tensor, weight: Tensor | None, ignore_index: int, dtype: torch.dtype) -> Tensor:
    if weight is None:
        return (target != ignore_index).sum().to(dtype)
    return _target_weights(target, weight, ignore_index).sum().to(dtype)


def _reduce(rows: Tensor, reduction: int) -> Tensor:
    """An elementwise loss reduced: 0 not at all, 1 to the mean, 2 to the sum."""
    return rows if reduction == 0 else rows.mean() if reduction == 1 else rows.sum()


def elementwise(operator: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A loss whose operator computes that of each element, when asked not to reduce them: ``mse_loss``, ``smooth_l1_loss``, ``huber_loss``.

    The mean or sum of those is an operator of its own, which can be split.
    """

    def replacement(x: Tensor, target: Tensor, reduction: int = 1, *more: float, **named: float) -> Tensor:
        return _reduce(operator(x, target, 0, *more, **named), reduction)

    return replacement


def soft_margin_loss(x: Tensor, target: Tensor, reduction: int = 1) -> Tensor:
    """``log(1 + exp(-target * x))``."""
    return _reduce(torch.nn.functional.softplus(-target * x), reduction)


def multilabel_margin_loss(x: Tensor, target: Tensor, reduction: int = 1) -> Tensor:
    """How far the entries that are no target come up to those that are, the targets of a row ending before its first -1. What torch takes
    it apart into counts the places after that as target 0."""
    counted = (target < 0).cumsum(-1) == 0
    wanted = target.masked_fill(~counted, 0)
    chosen = ((wanted.unsqueeze(-1) == torch.arange(x.shape[-1], device=x.device)) & counted.unsqueeze(-1)).any(-2, keepdim=True)
    margins = torch.relu(1 - x.gather(-1, wanted).unsqueeze(-1) + x.unsqueeze(-2))
    return _reduce(margins.masked_fill(~counted.unsqueeze(-1) | chosen, 0).sum((-2, -1)) / x.shape[-1], reduction)


_REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}


def ctc_loss(
    logp: Tensor, targets: Tensor, input_lengths: Any, target_lengths: Any, blank: int = 0, reduction: int | str = "mean",
    zero_infinity: bool = False,
) -> Tensor:  # fmt: skip
    """``torch.nn.functional.ctc_loss``: ``logp [t, n, c]``, ``targets [n, s]``, lengths ``[n]``; or one sequence, without ``n``."""
    batched = logp.dim() == 3
    if targets.dim() != logp.dim() - 1:
        raise CaptureError("ctc_loss with the targets of all sequences in one row", "pad them to a matrix, a row for each sequence")
    if not batched:
        logp, targets = logp.unsqueeze(1), targets.unsqueeze(0)
    inputs, lengths = (torch.as_tensor(item, device=targets.device).reshape(-1) for item in (input_lengths, target_lengths))
    rows = torch.ops.autopar.ctc_loss.default(_wide(logp), targets, inputs, lengths, blank, zero_infinity)
    if zero_infinity:
        rows = rows.masked_fill(rows == float("inf"), 0.0)
    how = _REDUCTIONS[reduction] if isinstance(reduction, str) else reduction
    if how == 0:
        return rows if batched else rows.squeeze(0)
    return _reduce(rows / lengths.clamp(min=1).to(rows.dtype) if how == 1 else rows, how)


def gaussian_nll_loss(
    x: Tensor, target: Tensor, var: Tensor | float, full: bool = False, eps: float = 1e-6, reduction: str = "mean"
) -> Tensor:
    """``torch.nn.functional.gaussian_nll_loss`` without its look at values; variances below ``eps`` count as that, not their gradient."""
    if not isinstance(var, Tensor):
        var = torch.full_like(x, var)
    elif var.shape != x.shape and var.shape == x.shape[:-1]:
        var = var.unsqueeze(-1)
    var = var + (var.clamp(min=eps) - var).detach()
    rows = 0.5 * (var.log() + (x - target) ** 2 / var) + (0.5 * math.log(2 * math.pi) if full else 0.0)
    return _reduce(rows, _REDUCTIONS[reduction])


_LEAST = 9.999999960041972e-13
"""1e-12 as torch's kernel has it, a number of single precision."""


class _BinaryCrossEntropy(torch.autograd.Function):
    """As torch does, logarithms are kept above -100 and what the gradient divides by above 1e-12: a probability may be 0 or 1."""

    @staticmethod
    def forward(context: Any, x: Tensor, target: Tensor) -> Tensor:
        context.save_for_backward(x, target)
        return -(target * x.log().clamp(min=-100) + (1 - target) * (1 - x).log().clamp(min=-100))

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None]:
        x, target = context.saved_tensors
        of_target = gradient * ((1 - x).log() - x.log()) if context.needs_input_grad[1] else None
        return gradient * (x - target) / ((1 - x) * x).clamp(min=_LEAST), of_target


def binary_cross_entropy(x: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = 1) -> Tensor:
    rows = _BinaryCrossEntropy.apply(x, target)
    return _reduce(rows if weight is None else rows * weight, reduction)


def binary_cross_entropy_with_logits(
    x: Tensor, target: Tensor, weight: Tensor | None = None, pos_weight: Tensor | None = None, reduction: int = 1
) -> Tensor:  # fmt: skip
    scale = 1 if pos_weight is None else 1 + (pos_weight - 1) * target
    rows = (1 - target) * x + scale * torch.nn.functional.softplus(-x)
    return _reduce(rows if weight is None else rows * weight, reduction)
