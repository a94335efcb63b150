"""Attention over a split sequence: ranks trade halves of their queries, so that none has more keys to see under a causal mask than another,
or keys and values travel around them."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.compare import explain
from autopar.cost_models import Hardware, load_hardware
from autopar.plan import Plan
from autopar.report.parallelism_words import ways
from autopar.rules import expansion
from autopar.target import Target
from autopar.verify import verify
from autopar.verify.launch import run_ranks

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


def plan_on(ranks: int, way: str = "s mirrored") -> Plan:
    """On a machine of slow arithmetic, where links cost nothing but kernels do, or gathering costs and what is hidden does not. Without
    a way on a real one."""
    real = load_hardware("h100-sxm")
    if not way:
        return autopar.plan(target().model, target().args, mesh=f"cp={ranks}", hardware=real)
    link = replace(real.node, latency_seconds=1e-12, bandwidth=1e15 if way == "s mirrored" else 2e9)
    flops = tuple((dtype, rate * 1e-6) for dtype, rate in real.peak_flops)
    launch = 2e-6 if way == "s mirrored" else 1e-12
    slow = replace(
        real, node=link, network=link, efficiencies=(), kernel_launch_seconds=launch, peak_flops=flops, overlap_slowdown=0.0
    )  # fmt: skip
    return autopar.plan(target().model, target().args, mesh=f"cp={ranks}", hardware=slow)


def factors(plan: Plan) -> set[str]:
    return {name for row in plan.ops if "attention" in row.op for name in row.factors or {}}


WAYS = ("s mirrored", "s ring")


def test_halves_are_traded_where_attention_takes_long() -> None:
    plan = plan_on(4)
    assert factors(plan) == {"s mirrored"}
    inside = [row for row in plan.collectives if row.kind == "permute" and row.id is None]
    assert [row.phase for row in inside] == ["forward"] * 3 + ["backward"] * 3
    assert not factors(plan_on(4, "")) & set(WAYS), "a few rows are not worth a call"


def test_keys_travel_where_gathering_them_would_be_waited_for() -> None:
    """Beside work of longer turns: what is waited for are halves, traded before and after, and the gradients' last hop."""
    plan = plan_on(4, "s ring")
    assert factors(plan) == {"s ring"}
    inside = [row for row in plan.collectives if row.kind == "permute" and row.id is None]
    assert [row.phase for row in inside] == ["forward"] * (2 + 3 + 2) + ["backward"] * (3 + 7 + 2)
    runs = {row.of: row for row in plan.schedule if row.kind == "run" and "attention" in row.of}
    for op in (row for row in plan.ops if row.name in runs):
        own = [row.seconds for row in inside if row.before == op.name]
        waited = own[:2] + own[-2:] if op.phase == "forward" else own[:3] + own[-3:]
        assert runs[op.name].seconds == pytest.approx(op.seconds + sum(waited)) and sum(own) > sum(waited)
    assert "  factors split: s ring over cp" in explain(plan, next(iter(runs)))
    assert {way.words for way in ways(plan) if way.shape[1:3] == (1, LENGTH)} == {"ring attention over cp"}


def test_check_finds_what_a_ring_does_not_take() -> None:
    plan = plan_on(4, "s ring")
    run = next(row for row in plan.schedule if row.kind == "run" and "attention" in row.of)
    hop = next(row for row in plan.collectives if row.before == run.of)
    for kind, row, key, changed in (
        ("schedule", run, "seconds", run.seconds * 0.9), ("collectives", hop, "bytes", hop.bytes // 2),
    ):  # fmt: skip
        rows = [item.model_copy(update={key: changed}) if item is row else item for item in getattr(plan, kind)]
        found = [str(item) for item in autopar.check(plan.model_copy(update={kind: tuple(rows)}))]
        assert any(f"{kind}[" in item and f".{key}" in item for item in found), found


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_values_are_those_of_one_device(ranks: int, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where both run the same way: on two ranks a backward that is mirrored is a little faster beside a ring."""
    offered = expansion._ways
    monkeypatch.setattr(expansion, "_ways", lambda rule, parts: (one for one in offered(rule, parts) if f"s {one}" == way))
    expansion._expand.cache_clear()
    plan = plan_on(ranks, way)
    monkeypatch.undo()
    expansion._expand.cache_clear()
    assert factors(plan) == {way}
    assert not autopar.check(Plan.from_json(plan.to_json(), "the plan"))
    result = verify(plan, target(), backend="gloo", steps=2)  # in one process ranks would not hold what is added up at one moment
    assert result.passed, result.problems


def test_keys_of_each_microbatch_travel() -> None:
    several = Target(target().model, (torch.randn(2, LENGTH, WIDTH),), {})
    hardware = Hardware.from_dict(plan_on(4, "s ring").hardware, "the plan's")
    plan = autopar.plan(several.model, several.args, mesh="cp=4", hardware=hardware, microbatches=2)
    assert factors(plan) == {"s ring"} and plan.microbatches == 2 and not autopar.check(plan)
    result = verify(plan, several, backend="simulate", steps=2)
    assert result.passed, result.problems


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("execute", ["eager", "graph"])
def test_on_ranks_that_send(execute: str, way: str) -> None:
    plan, model = plan_on(2, way), target().model
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
