"""A residual network: convolutions, batch norm and max pooling, basic or bottleneck blocks."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """Convolutions with batch norm around a shortcut; ``bottleneck`` is 1x1, 3x3, 1x1 with four times the channels, else 3x3, 3x3."""

    def __init__(self, before: int, width: int, stride: int, bottleneck: bool, dtype: torch.dtype) -> None:
        super().__init__()
        after = width * 4 if bottleneck else width
        steps = [(before, width, 1, 1), (width, width, 3, stride), (width, after, 1, 1)] if bottleneck else []
        steps = steps or [(before, width, 3, stride), (width, width, 3, 1)]
        self.convs = nn.ModuleList(
            nn.Conv2d(a, b, kernel, step, kernel // 2, bias=False, dtype=dtype) for a, b, kernel, step in steps
        )  # fmt: skip
        self.norms = nn.ModuleList(nn.BatchNorm2d(b, dtype=dtype) for _, b, _, _ in steps)
        self.shortcut: nn.Module = nn.Identity()
        if before != after or stride != 1:
            conv = nn.Conv2d(before, after, 1, stride, bias=False, dtype=dtype)
            self.shortcut = nn.Sequential(conv, nn.BatchNorm2d(after, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        skip = self.shortcut(x)
        last = len(self.convs) - 1
        for index, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            x = norm(conv(x))
            x = x if index == last else nn.functional.relu(x)
        return nn.functional.relu(x + skip)


class ResNet(nn.Module):
    """``images [batch, 3, image, image]`` to logits ``[batch, classes]``, or to the mean cross entropy when ``targets`` are given."""

    def __init__(self, width: int, blocks: list[int], bottleneck: bool, classes: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 7, 2, 3, bias=False, dtype=dtype)
        self.norm = nn.BatchNorm2d(width, dtype=dtype)
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.layers = nn.ModuleList()
        channels = width
        for stage, count in enumerate(blocks):
            size = width * 2**stage
            for index in range(count):
                stride = 2 if stage > 0 and index == 0 else 1
                self.layers.append(Block(channels, size, stride, bottleneck, dtype))
                channels = size * 4 if bottleneck else size
        self.head = nn.Linear(channels, classes, dtype=dtype)

    def forward(self, images: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.pool(nn.functional.relu(self.norm(self.stem(images))))
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x.mean((2, 3)))
        return logits if targets is None else nn.functional.cross_entropy(logits, targets)


def build(
    *, batch: int, image: int, width: int, blocks: str, bottleneck: bool, classes: int, dtype: torch.dtype
) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The model and its training inputs ``(images, targets)``; ``blocks`` counts the blocks of each stage, ``3-4-6-3``."""
    counts = blocks.split("-")
    if not all(count.isdigit() and int(count) for count in counts):
        raise ValueError(f"blocks={blocks!r} is not a list of counts like 3-4-6-3")
    if image < 4 * 2 ** len(counts):
        raise ValueError(f"image={image} is too small for {len(counts)} stages, which halve it {len(counts) + 1} times")
    model = ResNet(width, [int(count) for count in counts], bottleneck, classes, dtype)
    return model, (torch.randn(batch, 3, image, image, dtype=dtype), torch.randint(classes, (batch,)))
