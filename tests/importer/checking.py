"""Functions with checks, in a module whose ``assert`` statements pytest does not rewrite."""

from __future__ import annotations

import torch


def checked(y):
    assert not y.isnan().any() and (y < 1e9).all(), "too large"
    if (y > 1e30).any() or not (y > -1e30).all():
        raise ValueError
    torch._check_tensor_all(y < 3)
    return y.sin()


def wrong(y):
    assert torch.arange(3).sum() == 4, "three is not four"
    return y
