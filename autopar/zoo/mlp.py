"""A multilayer perceptron on feature vectors, trained on the mean squared error."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn


class MLP(nn.Module):
    """``layers`` hidden layers of size ``width`` with GELU; ``x [batch, inputs]`` to ``[batch, outputs]``."""

    def __init__(self, inputs: int, width: int, layers: int, outputs: int, dtype: torch.dtype) -> None:
        super().__init__()
        sizes = [inputs, *[width] * layers]
        self.layers = nn.ModuleList(nn.Linear(a, b, dtype=dtype) for a, b in pairwise(sizes))
        self.head = nn.Linear(width, outputs, dtype=dtype)

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = nn.functional.gelu(layer(x))
        x = self.head(x)
        return x if targets is None else nn.functional.mse_loss(x, targets)


def build(*, batch: int, inputs: int, width: int, layers: int, outputs: int, dtype: torch.dtype) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The model and its training inputs ``(x, targets)``; inference takes the first."""
    model = MLP(inputs, width, layers, outputs, dtype)
    return model, (torch.randn(batch, inputs, dtype=dtype), torch.randn(batch, outputs, dtype=dtype))
