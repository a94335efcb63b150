"""Grouped matrix products, torch's and those that libraries register for themselves, as ``autopar.grouped_mm``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from autopar.errors import CaptureError


def grouped_mm(
    x: Tensor, w: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """``aten._grouped_mm``: rows by experts with ``offs``, or equal groups of three dims."""
    if offs is None:
        result = torch.matmul(x, w)
    elif x.dim() == 2 and w.dim() == 3:
        result = torch.ops.autopar.grouped_mm.default(x, w, offs, 0, 0)
    else:
        shapes = f"{tuple(x.shape)} by {tuple(w.shape)}"
        raise CaptureError(f"grouped_mm of {shapes} with offsets is not supported", "group the rows of a matrix, experts in three dims")
    result = result if bias is None else result + bias
    return result if out_dtype is None else result.to(out_dtype)


def registered() -> dict[Any, Callable[..., Any]]:
    """torch's grouped product, and that of transformers where it is loaded."""
    found: dict[Any, Callable[..., Any]] = {torch.ops.aten._grouped_mm.default: grouped_mm}
    fallback = getattr(torch.ops.transformers, "grouped_mm_fallback", None)
    return found if fallback is None else {**found, fallback.default: grouped_mm}
