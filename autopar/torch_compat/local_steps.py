"""Optimizers step what a rank holds of DTensors: those that go element by element, and Muon, which makes matrices orthogonal."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
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


Orthogonal = Callable[[Sequence[torch.Tensor], Sequence[Any], Callable[[torch.Tensor], torch.Tensor]], Sequence[torch.Tensor]]
"""From a rank's parts of matrices, DTensors that lie as these do, and what makes a whole matrix orthogonal, to its parts of the results."""


@cache
def step_whole_matrices(orthogonal: Orthogonal) -> None:
    """Has Muon make whole matrices orthogonal where parameters are DTensors (``torch.optim._muon.muon``); the rest is element by element.

    The values are those of one device: DTensor's dispatcher would sum products of parts over ranks in bfloat16, two times three a turn.
    What Dynamo traces is left to it. A momentum in bfloat16 without Nesterov's term stays as it is; torch divides it by its norm.
    """
    muon: Any = importlib.import_module("torch.optim._muon")
    usual = muon.muon

    @functools.wraps(usual)
    def stepped(params: list[Any], grads: list[Any], momenta: list[Any], **options: Any) -> None:
        kind = dtensor_class()
        places = [place for place, item in enumerate(params) if isinstance(item, kind) and not any(p.is_partial() for p in item.placements)]
        if torch.compiler.is_compiling() or options.get("foreach") or not places:
            return usual(params, grads, momenta, **options)
        others = [place for place in range(len(params)) if place not in set(places)]
        usual(*([item[place] for place in others] for item in (params, grads, momenta)), **options)
        share, turn = 1 - options["momentum"], (options["ns_coefficients"], options["ns_steps"], options["eps"])

        def direction(place: int) -> torch.Tensor:
            alike = _lie_alike([[params[place]], [grads[place]], [momenta[place]]])
            grad, mean = (tensor._local_tensor if alike else tensor for tensor in (grads[place], momenta[place]))
            mean.lerp_(grad, share)
            found = grad.lerp(mean, options["momentum"]) if options["nesterov"] else mean
            found = found.to(torch.bfloat16, copy=found is mean)
            return found if alike else found.redistribute(placements=params[place].placements)._local_tensor

        def make(whole: torch.Tensor) -> torch.Tensor:
            return muon._zeropower_via_newtonschulz(whole, *turn)

        found = orthogonal(list(map(direction, places)), [params[place] for place in places], make)
        rate = float(options["lr"])
        for place, part in zip(places, found, strict=True):
            local = params[place]._local_tensor
            local.mul_(1 - rate * options["weight_decay"])
            local.add_(part, alpha=-muon._adjust_lr(rate, options["adjust_lr_fn"], params[place].shape))
        torch.autograd.graph.increment_version([params[place] for place in places])
        return None

    muon.muon = stepped


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
