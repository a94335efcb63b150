"""The gradient of the loss that a backward begins with."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor

from autopar.graph import Graph
from autopar.scopes import Scope

LOSS_GRADIENT: ContextVar[Tensor | None] = ContextVar("autopar_loss_gradient", default=None)


@dataclass
class LossScale:
    """What the loss of a module was scaled by last.

    Backward of several microbatches runs within forward, before the next scale is known, and begins with this. Where it turns out to be
    another, all of the step runs again: a gradient that vanished in float16 cannot be scaled afterwards.
    """

    value: float = 1.0


def is_narrow(graph: Graph) -> bool:
    """Whether gradients may vanish unless backward begins with the scale of the loss."""
    return any(tensor.dtype == "float16" for tensor in graph.tensors.values())


def loss_gradient(gradient: Tensor | None) -> Scope:
    """Within it, the backward begins with this gradient of the loss instead of one: scaled losses keep half-precision gradients from
    vanishing."""
    return Scope(LOSS_GRADIENT, gradient)


def given_loss_gradient() -> Tensor:
    """The one that the backward begins with, one number on the CPU."""
    given = LOSS_GRADIENT.get()
    return torch.ones((), dtype=torch.float64) if given is None else given.detach().to("cpu", torch.float64)


def begin_gradient(dtype: torch.dtype, device: torch.device, make: Callable[[], Tensor]) -> Tensor:
    """The gradient of the loss: the one that was given, in memory that is the caller's where it lies as asked; else one, as ``make`` makes
    it."""
    given = LOSS_GRADIENT.get()
    return make() if given is None else given.to(device, dtype)
