"""Causal attention over a split sequence: ranks trade halves of their queries, so that none has more keys to see than another."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.plan import Plan
from autopar.target import Target
from autopar.verify import verify
from autopar.verify.launch import run_ranks
from cost_models import load_hardware

BATCH, LENGTH, WIDTH = 1, 32, 16


class OneHead(nn.Module):
    """A head alone of a sequence alone: nothing to split but the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unsqueeze(1) for part in self.qkv(x).split(WIDTH, -1))
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1)).square().mean()


@lru_cache
def target() -> Target:
    torch.manual_seed(0)
    return Target(OneHead(), (torch.randn(BATCH, LENGTH, WIDTH),), {})


def plan_on(ranks: int, slower: float = 1e-6) -> Plan:
    """On a machine of slow arithmetic and links that cost nothing, or on one of quick arithmetic."""
    real = load_hardware("h100-sxm")
    free = replace(real.node, latency_seconds=1e-12, bandwidth=1e15)
    flops = tuple((dtype, rate * slower) for dtype, rate in real.peak_flops)
    hardware = replace(real, node=free, network=free, efficiencies=(), kernel_launch_seconds=1e-12, peak_flops=flops)
    return autopar.plan(target().model, target().args, mesh=f"cp={ranks}", hardware=hardware if slower < 1 else real)


def factors(plan: Plan) -> set[str]:
    return {name for row in plan.ops if "attention" in row.op for name in row.factors or {}}


def test_halves_are_traded_where_attention_takes_long() -> None:
    plan = plan_on(4)
    assert factors(plan) == {"s mirrored"}
    inside = [row for row in plan.collectives if row.kind == "permute" and row.id is None]
    assert [row.phase for row in inside] == ["forward"] * 3 + ["backward"] * 3
    assert "s mirrored" not in factors(plan_on(4, slower=1)), "a few rows are not worth a call"


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_values_are_those_of_one_device(ranks: int) -> None:
    plan = plan_on(ranks)
    assert not autopar.check(Plan.from_json(plan.to_json(), "the plan"))
    result = verify(plan, target(), backend="simulate", steps=2)
    assert result.passed, result.problems


@pytest.mark.parametrize("execute", ["eager", "graph"])
def test_on_ranks_that_send(execute: str) -> None:
    plan, model = plan_on(2), target().model
    model.zero_grad()
    wanted = model(*target().args)
    wanted.backward()

    def rank_main(rank: int) -> float:
        module = autopar.compile(model, plan, execute=execute)  # type: ignore[arg-type]
        loss = module(*target().args)
        loss.backward()
        named = {name: item.grad for name, item in model.named_parameters()}
        found = {name: item.grad.full_tensor() for name, item in module.named_parameters()}
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, named[name])
        return loss.item()

    assert run_ranks(rank_main, 2) == [pytest.approx(wanted.item())] * 2
