"""Ranks that pass their own rows, as a DistributedSampler gives them."""

from __future__ import annotations

from functools import lru_cache, partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import autopar
from autopar.plan import Plan
from autopar.runtime import export_program, load_program
from tests.runtime.test_training import gradients, on_ranks, refused, same

X, Y = torch.randn(20, 16, dtype=torch.float64), torch.randn(20, 8, dtype=torch.float64)


def mse(outputs: Tensor, wanted: Tensor) -> Tensor:
    return (outputs - wanted).square().mean()


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32, dtype=torch.float64), nn.Tanh(), nn.Linear(32, 8, dtype=torch.float64))


@lru_cache
def plan_of(microbatches: int = 1, inputs: str = "local") -> Plan:
    pins = {"input:input": "S0 R"} | ({"input:wanted": "R R"} if inputs == "global" else {})
    return autopar.plan(
        net(), (X[:8],), loss=mse, loss_args=(Y[:8],), mesh="dp=2,tp=2", hardware="cpu-cluster", constraints=pins, inputs=inputs,  # type: ignore[arg-type]
        microbatches=microbatches,
    )  # fmt: skip


def wanted_of(size: int) -> list[float]:
    """The losses of an epoch on one device, in the order of rows of a DistributedSampler without shuffling."""
    return [mse(net()(X[at : at + size]), Y[at : at + size]).item() for at in range(0, len(X), size)]


@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_distributed_sampler_gives_each_rank_its_rows(microbatches: int) -> None:
    """Batches of 8, 8 and 4 rows, of which each of two replicas has half."""
    plan = plan_of(microbatches)

    def run(rank: int) -> tuple[list[float], bool]:
        module, data = autopar.compile(net(), plan), TensorDataset(X, Y)
        assert module.replica == {"num_replicas": 2, "rank": rank // 2}
        loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, shuffle=False, **module.replica))
        found = [module(x, y) for x, y in loader] if microbatches == 1 else [module(*next(iter(loader)))]
        found[0].backward()
        reference = net()
        mse(reference(X[:8]), Y[:8]).backward()
        return [one.item() for one in found], same(gradients(module), gradients(reference))

    for found, alike in on_ranks(run, 4):
        assert alike and found == pytest.approx(wanted_of(8)[: len(found)], rel=1e-12)


def test_rows_that_make_up_no_batch_are_named_with_their_numbers(tmp_path: Path) -> None:
    """Each input's rows per rank: in calls of one's own, of a plan for whole inputs, and of an exported program."""
    plan, whole, folder = plan_of(), plan_of(inputs="global"), tmp_path / "program"
    export_program(plan, net(), folder)

    def run(rank: int) -> list[str]:
        module, other = autopar.compile(net(), plan), autopar.compile(net(), whole, inputs="local")
        at, loaded = rank // 2, load_program(folder)
        assert loaded(X[4 * at :][:4], Y[4 * at :][:4]).item() == pytest.approx(wanted_of(8)[0])
        calls = (module, X[:4], Y[:2]), (loaded, X[:2], Y[:2]), (module, X[:4] + rank, Y[:4]), (other, X[:4], Y[:4])
        return [refused(partial(*call)) for call in calls]

    for rank, (own, loaded, replica, other) in enumerate(on_ranks(run, 4)):
        assert "make up no one batch: input 4 of 8 over dp; wanted 2 of 4 over dp\nhint: pass equally many rows of each" in own
        assert "rows that each rank passes: input 4 of 8 over dp; wanted 4 of 8 over dp" in loaded
        assert f"rank {rank ^ 1} is given another input than this rank in call" in replica and "**module.replica" in replica
        assert "input 4 of 8 over dp; wanted 4 on every rank" in other and "plan with inputs='local'" in other
