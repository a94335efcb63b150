"""Inverses, Cholesky factors and solutions of linear systems, without the check that stops the program.

torch looks at the values after such an operator and raises where a matrix was singular or not definite. A plan's program looks at no
values: the result of such a matrix is NaN there, in place of what the factorisation happened to leave.
"""

from __future__ import annotations

import torch
from torch import Tensor

aten = torch.ops.aten


def inverse(a: Tensor) -> Tensor:
    """``aten.linalg_inv``."""
    return _known(*aten.linalg_inv_ex.default(a))


def cholesky(a: Tensor, *, upper: bool = False) -> Tensor:
    """``aten.linalg_cholesky``."""
    return _known(*aten.linalg_cholesky_ex.default(a, upper=upper))


def solve(a: Tensor, b: Tensor, *, left: bool = True) -> Tensor:
    """``aten.linalg_solve``: ``b`` is a vector, or vectors where its shape is that of ``a`` less a dim; else matrices. Other dims
    broadcast."""
    result, _, _, info = aten._linalg_solve_ex.default(a, b, left=left)
    return _known(result, info, 1 if b.dim() == 1 or b.shape == a.shape[:-1] else 2)


def _known(result: Tensor, info: Tensor, own: int = 2) -> Tensor:
    """``result`` of matrices for which ``info`` is 0, NaN of others. ``own``: its last dims, which ``info`` has not."""
    return result.masked_fill((info != 0).reshape(*info.shape, *[1] * own), torch.nan)
