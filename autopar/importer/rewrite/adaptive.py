"""``nn.AdaptiveLogSoftmaxWithLoss`` without asking which rows each cluster has: every cluster looks at all rows, and those of others are
left out of what it gives."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from autopar import torch_compat


@contextmanager
def every_row() -> Iterator[None]:
    """Within it, adaptive softmaxes are computed so."""
    kind = nn.AdaptiveLogSoftmaxWithLoss
    plain = kind.forward

    def forward(self: nn.AdaptiveLogSoftmaxWithLoss, x: Tensor, target: Tensor) -> Any:
        if (x.dim(), target.dim()) not in ((2, 1), (1, 0)) or x.shape[:-1] != target.shape:
            return plain(self, x, target)  # which refuses them
        output = _likelihoods(self, x.reshape(-1, x.shape[-1]), target.reshape(-1)).reshape(target.shape)
        return torch_compat.adaptive_result(output, -output.mean())

    kind.forward = forward
    try:
        yield
    finally:
        kind.forward = plain


def _likelihoods(module: nn.AdaptiveLogSoftmaxWithLoss, x: Tensor, target: Tensor) -> Tensor:
    place, found = target, x.new_zeros(len(target))
    for number, (first, end) in enumerate(pairwise(module.cutoffs)):
        inside = (target >= first) & (target < end)
        place = torch.where(inside, module.shortlist_size + number, place)
        logits = module.tail[number](x).log_softmax(1)
        picked = logits.gather(1, (target - first).clamp(0, end - first - 1).unsqueeze(1)).squeeze(1)
        found = found + torch.where(inside, picked, 0.0)
    return found + module.head(x).log_softmax(1).gather(1, place.unsqueeze(1)).squeeze(1)
