"""Weights are looked up anew where anything about them is not as the call before left it."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

import autopar
from autopar.errors import UsageError
from autopar.verify.launch import run_ranks

X = torch.arange(8.0).view(2, 4)


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))


def test_each_change_of_a_weight_is_seen_by_the_next_call() -> None:
    model = build()
    plan = autopar.plan(model, (X,), mesh={"dp": 1}, hardware="h100-sxm")

    def rank_main(rank: int) -> dict[str, Any]:
        module: Any = autopar.compile(copy.deepcopy(model), plan)
        step, weights, seen = module.step, module._weights, {}

        def enter() -> Any:
            return weights.enter(step, differentiates=True)

        first = enter()
        key = next(item.tensor for item, _ in step.weights if item.name == "0.weight")
        first.locals.clear()
        first.trained.clear()
        again = enter()
        seen["a call has its own"] = len(again.locals) == len(step.weights) and len(again.trained) == 6
        module.get_submodule("0").weight.requires_grad_(False)
        seen["frozen"] = [name for name, _ in enter().trained].count(key) == 0 and len(enter().trained) == 5
        module.get_submodule("0").weight.requires_grad_(True)
        module.get_submodule("0").weight = nn.Parameter(module.get_submodule("0").weight.detach() * 2)
        seen["another parameter"] = torch.equal(enter().locals[key], 2 * again.locals[key])
        module.load_state_dict({name: tensor.detach() * 3 for name, tensor in module.state_dict().items()}, assign=True)
        seen["assigned"] = torch.equal(enter().locals[key], 6 * again.locals[key])
        part = module.get_submodule("0")
        kept = part.weight
        del part._parameters["weight"]
        part.__dict__["weight"] = kept.detach() * 0
        seen["a plain attribute"] = not enter().locals[key].any()
        part.__dict__["weight"] = torch.zeros(4, 4)
        try:
            enter()
        except UsageError as error:
            seen["a plain tensor"] = "0.weight is now a plain tensor" in str(error)
        return seen

    (seen,) = run_ranks(rank_main, 1)
    assert len(seen) == 6 and all(seen.values()), seen


def test_what_is_computed_in_a_weights_place_is_computed_once_a_call() -> None:
    """Spectral norm goes on with its power method at each look."""
    model, looks = build(), list[int]()
    plan = autopar.plan(model, (X,), mesh={"dp": 1}, hardware="h100-sxm")

    class Twice(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            looks.append(1)
            return 2 * weight

    def rank_main(rank: int) -> list[int]:
        module: Any = autopar.compile(copy.deepcopy(model), plan)
        parametrize.register_parametrization(module.get_submodule("0"), "weight", Twice())
        counts = []
        for _ in range(3):
            looks.clear()
            module(X)
            counts.append(len(looks))
        return counts

    assert run_ranks(rank_main, 1) == [[1, 1, 1]]
