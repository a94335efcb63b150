"""Optimizers that go element by element step what a rank holds of DTensors."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from autopar.torch_compat.placements import dtensor_class, dtensor_like

ELEMENTWISE = ("adadelta", "adagrad", "adam", "adamax", "asgd", "nadam", "radam", "rmsprop", "rprop", "sgd")
"""Functions of ``torch.optim``, each in the module of its name, whose result for an element depends on that element alone."""


@cache
def step_local_parts() -> None:
    """Has torch's elementwise optimizers step local tensors where parameter, gradient and states lie alike (``torch.optim.adam.adam``).

    The values are those of DTensor's dispatcher, which takes five times as long: AdamW in its default form calls ten operators for each
    parameter. What does not lie alike, such as a gradient that is still a sum over ranks, is left to the dispatcher. So is a step that
    Dynamo traces or autograd goes through.
    """
    for name in ELEMENTWISE:
        module = importlib.import_module(f"torch.optim.{name}")
        setattr(module, name, _on_local_parts(getattr(module, name)))


def _on_local_parts(step: Callable[..., None]) -> Callable[..., None]:
    """``step`` on local tensors; each list that it takes has an entry for every parameter, or none."""

    @functools.wraps(step)
    def stepped(params: list[Any], grads: list[Any], *states: Any, **options: Any) -> None:
        lists = [params, grads, *(item for item in (*states, *options.values()) if isinstance(item, list) and item)]
        if torch.compiler.is_compiling() or options.get("differentiable") or not _lie_alike(lists):
            return step(params, grads, *states, **options)
        kind = dtensor_class()
        placed = [type(parameter) is kind for parameter in params]
        parts = {id(item): [tensor._local_tensor if type(tensor) is kind else tensor for tensor in item] for item in lists}
        before = {name: list(item) for name, item in parts.items()}

        def part(item: Any) -> Any:
            return parts.get(id(item), item)

        step(part(params), part(grads), *map(part, states), **{name: part(item) for name, item in options.items()})
        for item in lists:
            for index, (now, then) in enumerate(zip(part(item), before[id(item)], strict=True)):
                if now is not then:  # SGD makes its momentum in the first step
                    item[index] = dtensor_like(now, params[index]) if placed[index] else now
        torch.autograd.graph.increment_version([parameter for parameter, is_placed in zip(params, placed, strict=True) if is_placed])
        return None

    return stepped


def _lie_alike(lists: list[list[Any]]) -> bool:
    """Whether some parameter, first of the lists, is a DTensor, and gradient and states of each such one lie as it does."""
    kind, found = dtensor_class(), False
    for parameter, *others in zip(*lists, strict=True):
        if type(parameter) is not kind:
            if any(isinstance(tensor, kind) for tensor in (parameter, *others)):
                return False
            continue
        spec, found = parameter._spec, True
        if any(placement.is_partial() for placement in spec.placements):
            return False
        for tensor in others:
            if type(tensor) is kind:
                other = tensor._spec
                if other is not spec and (other.placements != spec.placements or other.mesh != spec.mesh):
                    return False
            elif isinstance(tensor, kind) or (tensor is not None and tensor.dim()):  # of one number: a count of steps
                return False
    return found
