"""What the families share: the row, the sizes, inputs of real values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from autopar.target import Target

Mode = Literal["train", "inference"]
BATCH, SEQ, VOCAB, CLASSES = 4, 16, 128, 8


@dataclass(frozen=True)
class Family:
    """One row: ``build(mode)`` gives the model with example inputs of real values."""

    name: str
    library: str
    build: Callable[[Mode], Target]


def token_ids(*shape: int) -> Tensor:
    """Token ids, none of them special."""
    return torch.randint(3, VOCAB, shape or (BATCH, SEQ))


def pictures(size: int = 32) -> Tensor:
    """A batch of pictures."""
    return torch.randn(BATCH, 3, size, size)
