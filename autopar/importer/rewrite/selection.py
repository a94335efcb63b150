"""Values placed by a mask, as a lookup of which value each place takes."""

from __future__ import annotations

import torch
from torch import Tensor


def masked_scatter(x: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    """``aten.masked_scatter``: the places where ``mask`` is true take the values of ``source`` in order. Of an empty one none may."""
    x, mask = torch.broadcast_tensors(x, mask)
    if not source.numel():
        return x.clone()
    numbers = (mask.reshape(-1).to(torch.int64).cumsum(0) - 1).clamp(0, source.numel() - 1)
    return torch.where(mask, source.reshape(-1)[numbers].reshape(x.shape), x)
