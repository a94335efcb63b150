"""Muon as plans price it: layers' matrices by Muon, the rest by AdamW."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import UsageError
from autopar.graph import Op, looked_up
from autopar.plan import Plan
from autopar.target import Target
from autopar.verify import verify
from autopar.verify.launch import run_ranks

SPLIT = {"a.weight": "S0/3 R", "b.weight": "S0 S1", "head.weight": "S01 R"}


class Net(nn.Module):
    """An embedding, a matrix of three blocks, two more, and biases."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.a, self.b, self.head = nn.Embedding(64, 32), nn.Linear(32, 96), nn.Linear(32, 32), nn.Linear(32, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.table(x)
        q, k, v = self.a(h).chunk(3, -1)
        return self.head(h + self.b(nn.functional.scaled_dot_product_attention(q, k, v)))


def loss(outputs: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs.flatten(0, 1), wanted.flatten())


def target(dtype: torch.dtype = torch.float32) -> Target:
    torch.manual_seed(0)
    x, wanted = torch.randint(64, (8, 16)), torch.randint(64, (8, 16))
    return Target(Net().to(dtype), (x,), {}, loss, (wanted,))


@lru_cache
def plan_of(optimizer: str = "muon", dtype: torch.dtype = torch.float32, **options: Any) -> Plan:
    made = target(dtype)
    return autopar.plan(
        made.model, made.args, loss=loss, loss_args=made.loss_args, mesh="dp=2,tp=2", hardware="cpu-cluster", optimizer=optimizer,
        constraints=SPLIT, **options,
    )  # fmt: skip


def test_what_is_looked_up_and_what_has_one_dim_is_stepped_by_adamw() -> None:
    graph = autopar.capture(target().model, target().args, loss=loss, loss_args=target().loss_args)
    assert dict(graph.matrices) == {"a.weight": (96, 32), "b.weight": (32, 32), "head.weight": (64, 32)}
    muon, adamw = (plan_of(name).predicted.memory.optimizer for name in ("muon", "adamw"))
    parted = (96 * 32 // 2 + 32 * 32 // 4 + 64 * 32 // 4) * 4
    assert adamw - muon == parted, "one value an element instead of two"


def test_a_table_is_looked_up_in_another_dtype_too() -> None:
    ops = [Op("wide", "aten._to_copy.default", ("w",), ("wide",)), Op("e", "aten.embedding.default", ("wide", "i"), ("e",))]
    ops.append(Op("m", "aten.mm.default", ("v", "e"), ("m",)))
    assert looked_up(ops) == {"w", "wide"}


@pytest.mark.parametrize("backend", ["gloo", "simulate"])
def test_a_plan_for_muon_trains_as_one_device(backend: Any) -> None:
    plan = plan_of()
    assert not autopar.check(plan)
    found = verify(plan, target(), backend=backend, steps=3)
    assert found.passed, found.problems


def test_microbatches_are_stepped_once() -> None:
    plan = plan_of(microbatches=2)
    assert not autopar.check(plan) and verify(plan, target(), backend="simulate", steps=3).passed


def test_check_finds_a_wrong_price_of_the_step() -> None:
    plan = plan_of()
    predicted = plan.predicted.model_copy(update={"optimizer_seconds": plan.predicted.optimizer_seconds * 1.01})
    places = [difference.where for difference in autopar.check(plan.model_copy(update={"predicted": predicted}))]
    assert "predicted.optimizer_seconds" in places


def test_users_own_loop_is_that_of_one_device() -> None:
    """In float64: two optimizers, as torch's documentation has them."""
    plan = plan_of(dtype=torch.float64)

    def train(module: Any, step: Any) -> list[torch.Tensor]:
        named = dict(module.named_parameters())
        matrices = [tensor for name, tensor in named.items() if tensor.ndim == 2 and name != "table.weight"]
        rest = [tensor for name, tensor in named.items() if tensor.ndim != 2 or name == "table.weight"]
        optimizers = torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=1e-3)
        for _ in range(4):
            step(module)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        return [tensor.detach() for tensor in module.parameters()]

    made = target(torch.float64)
    x, wanted = made.args[0], made.loss_args[0]
    single = train(made.model, lambda module: loss(module(x), wanted).backward())

    def rank_main(rank: int) -> float:
        module = autopar.compile(target(torch.float64).model, plan, loss=loss)
        ours = train(module, lambda module: module(x, wanted).backward())
        assert {str(placement) for tensor in ours for placement in tensor.placements} != {"R"}
        return max((one.full_tensor() - other).abs().max().item() for one, other in zip(ours, single, strict=True))

    assert max(run_ranks(rank_main, 4)) < 1e-9


def test_the_planner_splits_what_takes_long_to_make_orthogonal() -> None:
    """Ranks that hold whole matrices repeat the work; Muon's step is long enough for the planner to share it out."""
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(4)))
    given = {"mesh": "dp=4", "hardware": "cpu-cluster", "loss": nn.functional.mse_loss, "loss_args": (torch.zeros(8, 256),)}
    plans = [autopar.plan(model, (torch.zeros(8, 256),), optimizer=name, **given) for name in ("sgd-momentum", "muon")]
    whole = autopar.plan(model, (torch.zeros(8, 256),), optimizer="muon", constraints={"*.weight": "R R"}, **given)
    assert plans[1].predicted.step_seconds < 0.6 * whole.predicted.step_seconds
    assert all("S0" in row.spec for row in plans[1].parameters.values())


def test_shampoo_is_priced_by_what_it_keeps_or_refused() -> None:
    with pytest.raises(UsageError, match="unknown optimizer 'shampoo'") as refused:
        plan_of("shampoo")
    assert "NAME:BYTES,ACCESSES" in str(refused.value)
    assert plan_of("shampoo:16,9").predicted.memory.optimizer == 16 * plan_of("none").predicted.memory.parameters // 4


def test_without_time_of_operators_the_step_takes_none() -> None:
    plan = plan_of(cost_model="communication")
    assert plan.predicted.optimizer_seconds == 0.0 and not autopar.check(plan)
