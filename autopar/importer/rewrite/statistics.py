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


def quantile(
    input: Tensor, q: Tensor | float, dim: int | None = None, keepdim: bool = False, *,
    interpolation: str = "linear", out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """``torch.quantile``, which asks in C++ whether each level lies from 0 to 1, and cannot be traced before torch 2.13."""
    return _quantile(input, q, dim, keepdim, interpolation, out, skips_nan=False)


def nanquantile(
    input: Tensor, q: Tensor | float, dim: int | None = None, keepdim: bool = False, *,
    interpolation: str = "linear", out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """``torch.nanquantile``."""
    return _quantile(input, q, dim, keepdim, interpolation, out, skips_nan=True)


def _quantile(
    x: Tensor, q: Tensor | float, dim: int | None, keepdim: bool, interpolation: str, out: Tensor | None, *, skips_nan: bool
) -> Tensor:  # fmt: skip
    """The levels ``q`` of the entries along ``dim``; several levels lie along a first dim of the result."""
    levels = q if isinstance(q, Tensor) else x.new_full((), q)
    rows = x.reshape(-1) if dim is None else x.movedim(dim, -1)
    entries = rows.sort(-1).values  # what is no number comes last
    unknown, last = entries.isnan(), entries.shape[-1] - 1
    if skips_nan:
        places = (levels.reshape(-1) * (unknown.logical_not().sum(-1, keepdim=True) - 1)).clamp(min=0)
    else:
        places = (levels.reshape(-1) * last).expand(*entries.shape[:-1], levels.numel()).masked_fill(unknown.any(-1, keepdim=True), last)
    rounded = {"lower": torch.floor, "higher": torch.ceil, "nearest": torch.round}.get(interpolation)
    places = places if rounded is None else rounded(places)
    below = places.long()
    found = entries.gather(-1, below)
    if rounded is None:
        share = torch.full_like(places, 0.5) if interpolation == "midpoint" else places - below
        found = found.lerp(entries.gather(-1, places.ceil().long()), share)
    found = found.movedim(-1, 0)
    if keepdim:
        found = found.reshape(levels.numel(), *[1] * x.dim()) if dim is None else found.unsqueeze(dim if dim < 0 else dim + 1)
    found = found if levels.dim() else found.squeeze(0)
    return found if out is None else out.copy_(found)
