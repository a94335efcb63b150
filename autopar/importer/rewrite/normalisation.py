"""Batch norm and RMS norm."""

from __future__ import annotations

import torch
from torch import Tensor


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
    scale = torch.rsqrt(running_var + eps)
    if weight is not None:
        scale = scale * weight
    shift = -running_mean * scale
    if bias is not None:
        shift = shift + bias
    shape = [1, -1, *[1] * (x.dim() - 2)]
    return (x * scale.reshape(shape) + shift.reshape(shape)).to(x.dtype)


def rms_norm(x: Tensor, normalized_shape: list[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    return torch.ops.autopar.rms_norm.default(x, normalized_shape, weight, eps)[0]
