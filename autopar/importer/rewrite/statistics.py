"""Statistics that torch looks at values for, and choices of entries that it makes by a mask."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor


def cov(x: Tensor, *, correction: int = 1, fweights: Tensor | None = None, aweights: Tensor | None = None) -> Tensor:
    """``torch.cov``; what is divided by is asked for its sign there, for a warning."""
    rows = x if x.dim() > 1 else x.view(1, -1)
    given = [weights for weights in (fweights, aweights) if weights is not None]
    weights = given[0] * given[-1] if len(given) > 1 else given[0] if given else None
    if weights is None:
        total: Tensor | int = rows.shape[1]
        over: Tensor | int = max(rows.shape[1] - correction, 0)
    else:
        total = weights.sum()
        less = (weights * aweights).sum() / total if aweights is not None and correction else 1
        over = (total - correction * less).clamp(min=0)
    apart = rows - (rows if weights is None else rows * weights).sum(1, keepdim=True) / total
    product = apart @ (apart if weights is None else apart * weights).t().conj()
    return torch.true_divide(product, over).squeeze()


def corrcoef(x: Tensor) -> Tensor:
    """``torch.corrcoef``."""
    found = cov(x)
    if not found.dim():
        return found / found
    spread = found.diagonal().real.sqrt() if found.is_complex() else found.diagonal().sqrt()
    found = found / spread[:, None] / spread
    return torch.complex(found.real.clip(-1, 1), found.imag.clip(-1, 1)) if found.is_complex() else found.clip(-1, 1)


def combinations(x: Tensor, r: int = 2, with_replacement: bool = False) -> Tensor:
    """``torch.combinations``, whose number follows from the shape."""
    choose = itertools.combinations_with_replacement if with_replacement else itertools.combinations
    places = list(choose(range(x.shape[0]), r))
    return x[torch.tensor(places, dtype=torch.int64, device=x.device).view(len(places), r)] if r else x.new_empty(0)
