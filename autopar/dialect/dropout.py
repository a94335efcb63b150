"""``autopar.dropout``: dropout whose mask is a function of a seed in the graph and of the step.

A seed in the graph, not the process's generator, is what lets replicas agree and shards differ: the rank's program
changes the seed where the tensor is split. ``random_step`` moves all seeds on, once a training step.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from autopar.dialect.library import define
from autopar.scopes import Scope

_STEP: ContextVar[int] = ContextVar("autopar_random_step", default=0)
MakeGenerator = Callable[[torch.device, int], torch.Generator]
"""From a device and a seed of the graph to the generator that a draw takes."""
_PREPARED: ContextVar[MakeGenerator | None] = ContextVar("autopar_prepared_draws", default=None)


def random_step(step: int) -> Scope:
    """Run dropout with the masks of this training step; all ranks must give the same number."""
    return Scope(_STEP, step)


def this_step() -> int:
    """The training step whose masks are drawn."""
    return _STEP.get()


def prepared_draws(make: MakeGenerator) -> Scope:
    """Within it each draw takes the generator that ``make`` gives, instead of a new one."""
    return Scope(_PREPARED, make)


def generator(device: torch.device, seed: int) -> torch.Generator:
    """The random numbers of a seed of the graph in this step."""
    make = _PREPARED.get()
    return reseed(torch.Generator(device), seed) if make is None else make(device, seed)


def reseed(made: torch.Generator, seed: int) -> torch.Generator:
    """The generator at the beginning of the random numbers of a seed of the graph in this step."""
    return made.manual_seed((seed * 1_000_003 + _STEP.get()) % 2**63)


def _dropout(x: Tensor, p: float, seed: int) -> tuple[Tensor, Tensor]:
    """``mask`` is true where kept, with probability ``1 - p``; ``out = x * mask / (1 - p)``."""
    mask = torch.rand(x.shape, device=x.device, generator=generator(x.device, seed)) >= p
    return x * mask * _scale(p), mask


def keep_all(x: Tensor, p: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Dropout with a mask that drops nothing: every element is kept, and scaled all the same."""
    return x * _scale(p), torch.ones_like(x, dtype=torch.bool)


def _scale(p: float) -> float:
    return 0.0 if p >= 1 else 1 / (1 - p)


def _dropout_shapes(x: Tensor, p: float, seed: int) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape, dtype=torch.bool)


def _save(context: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    context.set_materialize_grads(False)
    context.mark_non_differentiable(output[1])
    context.p = inputs[1]
    context.save_for_backward(output[1])


def _gradient(context: Any, gradient: Tensor | None, _: None) -> tuple[Tensor | None, None, None]:
    (mask,) = context.saved_tensors
    return None if gradient is None else gradient * mask * _scale(context.p), None, None


define("dropout(Tensor x, float p, int seed) -> (Tensor, Tensor)", _dropout, _dropout_shapes, _gradient, _save, still=keep_all)
