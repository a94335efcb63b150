"""Means as sums over counts: a sum can be split along what it sums, a mean of parts is not a part of the mean.

They are taken apart below autograd, so that no mean is left whole, whichever operator or gradient it is inside of.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor


def mean(x: Tensor, dim: list[int] | int | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    """``sum / count`` with the whole count; half precision sums in float32, as ``aten.mean`` does."""
    dims = list(range(x.dim())) if dim is None or dim == [] else [dim] if isinstance(dim, int) else list(dim)
    result = dtype or x.dtype
    wide = torch.float32 if result in (torch.float16, torch.bfloat16) else result
    count = math.prod(x.shape[d] for d in dims)
    return (torch.ops.aten.sum.dim_IntList(x, dims, keepdim, dtype=wide) / count).to(result)


DECOMPOSITIONS: Mapping[Any, Callable[..., Tensor]] = {torch.ops.aten.mean.default: mean, torch.ops.aten.mean.dim: mean}
"""By operator, for ``torch_compat.trace_joint``."""
