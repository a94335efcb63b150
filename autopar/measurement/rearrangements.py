"""A model of the operators that the built-in models have little of: batch norm, sorts, and copies that change the layout.

What they reach of the memory's bandwidth is far from what pointwise operators reach. Each needs several sizes for figures of its own.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from autopar.target import Target

NAME = "rearrangements"
"""What ``samples`` calls the model by, beside those of the zoo."""


class Rearrangements(nn.Module):
    """Normalises images, and puts images, heads and rows into other orders."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, images: Tensor, heads: Tensor) -> Tensor:
        """``images`` [batch, channels, height, width], ``heads`` [batch, seq, heads, dim]; a scalar, so that all has a gradient."""
        normal = self.norm(images)
        last = normal.movedim(1, -1).contiguous()  # channels last, as some kernels of convolutions want them
        apart = heads.transpose(1, 2).contiguous()  # the sequence of each head on its own, as attention wants it
        turned = heads.flatten(1).t().contiguous()
        ordered = heads.flatten().sort().values  # one long row
        experts = heads.flatten(0, 2).argsort(dim=-1, stable=True).float()  # many short rows
        parts = (last, apart, turned, ordered, experts)
        return torch.stack([part.square().sum() for part in parts]).sum()


def build(batch: int, channels: int, image: int, seq: int, heads: int) -> Target:
    """The model with inputs of 64 numbers a head, without values."""
    with torch.device("meta"):
        model = Rearrangements(channels)
        return Target(model, (torch.empty(batch, channels, image, image), torch.empty(batch, seq, heads, 64, requires_grad=True)))
