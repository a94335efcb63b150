"""What the families share: the row, the sizes, inputs of real values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

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


def trained_by(
    loss: Callable[..., Tensor],
    name: str,
    model: Callable[[], nn.Module],
    inputs: Callable[[], tuple[Tensor, ...]],
    labels: Callable[[], Any] | None,
) -> Family:
    """A family of plain torch, trained by a loss of its outputs and, where it has them, ``labels``."""

    def build(mode: Mode) -> Target:
        given = () if labels is None else (labels(),)
        return Target(model(), inputs(), {}, *((loss, given) if mode == "train" else (None, ())))

    return Family(name, "torch", build)


def classified(name: str, model: Callable[[], nn.Module], inputs: Callable[[], tuple[Tensor, ...]], labels: Callable[[], Tensor]) -> Family:
    """A family of plain torch, trained by the cross-entropy of its scores."""
    return trained_by(F.cross_entropy, name, model, inputs, labels)
