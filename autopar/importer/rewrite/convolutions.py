"""Convolutions of any number of spatial dims, with their bias as an addition."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.importer.rewrite.contractions import autocast


def convolve(dims: int) -> Callable[..., Any]:
    def replacement(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: int | Sequence[int] = 1,
        padding: int | str | Sequence[int] = 0,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
    ) -> Tensor:
        if x.dim() == dims + 1:
            return replacement(x.unsqueeze(0), weight, bias, stride, padding, dilation, groups).squeeze(0)
        if x.is_complex():  # three of real numbers, as torch has it
            parts = [torch.view_as_real(tensor).unbind(-1) for tensor in (x, weight)]
            real, imaginary, both = (
                replacement(a, b, None, stride, padding, dilation, groups)
                for a, b in (*zip(*parts, strict=True), (sum(parts[0]), sum(parts[1])))
            )
            out = torch.complex(real - imaginary, both - real - imaginary)
            return out if bias is None else out + bias.reshape(-1, *[1] * dims)
        x, weight, bias = autocast(x, weight, bias)
        steps, spread = _each(stride, dims), _each(dilation, dims)
        if isinstance(padding, str):
            totals = [d * (k - 1) if padding == "same" else 0 for d, k in zip(spread, weight.shape[2:], strict=True)]
            if any(total % 2 for total in totals):
                x = torch.nn.functional.pad(x, [side for total in reversed(totals) for side in (0, total % 2)])
            padding = [total // 2 for total in totals]
        out = torch.ops.autopar.convolution.default(x, weight, steps, _each(padding, dims), spread, groups)
        return out if bias is None else out + bias.reshape(-1, *[1] * dims)

    return replacement


def _each(value: int | Sequence[int], dims: int) -> list[int]:
    values = [value] if isinstance(value, int) else list(value)
    return values * dims if len(values) == 1 else values


def convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Tensor:
    if transposed:
        return torch.ops.aten.convolution.default(x, weight, bias, stride, padding, dilation, transposed, output_padding, groups)
    return convolve(weight.dim() - 2)(x, weight, bias, stride, padding, dilation, groups)


def convolve_steps(x: Tensor, weight: Tensor, bias: Tensor, padding: int = 0) -> Tensor:
    """``aten.conv_tbc``: ``x [steps, n, i]``, ``weight [width, i, o]``."""
    return convolve(1)(x.permute(1, 2, 0), weight.permute(2, 1, 0), bias, 1, padding).permute(2, 0, 1)
