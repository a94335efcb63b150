"""Batch norm and RMS norm."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from autopar.dialect.library import wide_dtype


def batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Tensor:
    if training or running_mean is None or running_var is None:
        operator = torch.ops.autopar.batch_norm.default
        out, _, _, new_mean, new_var = operator(x, weight, bias, running_mean, running_var, momentum, eps)
        if training and running_mean is not None and running_var is not None:
            running_mean.copy_(new_mean)
            running_var.copy_(new_var)
        return out
    wide = wide_dtype(x.dtype)  # as torch's kernels, which round once
    scale = torch.rsqrt(running_var.to(wide) + eps)
    if weight is not None:
        scale = scale * weight
    shift = -running_mean.to(wide) * scale
    if bias is not None:
        shift = shift + bias
    shape = [1, -1, *[1] * (x.dim() - 2)]
    return (x * scale.reshape(shape) + shift.reshape(shape)).to(x.dtype)


def rms_norm(x: Tensor, normalized_shape: list[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    eps = torch.finfo(wide_dtype(x.dtype)).eps if eps is None else eps  # torch computes half precision in float32
    if x.is_complex():  # squares, not of the absolute values, as torch has it; the operator's gradient is of real numbers
        out = x * torch.rsqrt(x.square().mean(list(range(-len(normalized_shape), 0)), True) + eps)
        return out if weight is None else out * weight
    return torch.ops.autopar.rms_norm.default(x, normalized_shape, weight, eps)[0]


@contextmanager
def cumulative_averages() -> Iterator[None]:
    """Within it, batch norms with ``momentum=None`` weigh their running statistics by a count that stays a tensor: torch makes a number of
    it, which no graph holds."""
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    own = [vars(kind).get("forward") for kind in kinds]  # they inherit it

    def counted(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(self: nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d, x: Tensor) -> Tensor:
            statistics = [self.running_mean, self.running_var]
            count = self.num_batches_tracked
            if self.momentum is not None or not self.training or count is None or any(value is None for value in statistics):
                return forward(self, x)
            before = [value.clone() for value in statistics if value is not None]
            self.momentum = 1.0
            try:
                out = forward(self, x)  # counts; the running statistics are this batch's then
            finally:
                self.momentum = None
            share = count.to(torch.float64).reciprocal()
            for value, old in zip(statistics, before, strict=True):
                if value is not None:
                    value.copy_((1 - share) * old + share * value)
            return out

        return call

    for kind in kinds:
        kind.forward = counted(kind.forward)
    try:
        yield
    finally:
        for kind, forward in zip(kinds, own, strict=True):
            if forward is None:
                del kind.forward
            else:
                kind.forward = forward
