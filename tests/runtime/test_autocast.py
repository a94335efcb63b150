"""Training under the casts of ``torch.autocast``: losses of a single process under it."""

from __future__ import annotations

import copy
import fnmatch
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar import zoo
from autopar.errors import UsageError
from autopar.runtime.execution.binding import bind
from autopar.runtime.module.compiling import rebuild
from autopar.runtime.ranks.backends import LockstepRanks
from autopar.target import Target
from autopar.verify import verify
from autopar.verify.launch import run_ranks
from tests.importer.test_autocast import SIZES

STEPS = 4
FIRST = 1e-5
"""Relative difference of first losses. In bfloat16 they are 1e-4 off without autocast."""


def losses_of(model: nn.Module, target: zoo.Target, dtype: torch.dtype) -> list[float]:
    """Of steps of one process under autocast, loss function and all."""
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for _ in range(STEPS):
        with torch.autocast("cpu", dtype):
            outputs = model(*target.args)
            loss = outputs if target.loss is None else target.loss(outputs, *target.loss_args)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


ROWS = {"input:*": "S0 R"}
TENSOR = {"*.w1.weight": "S0 R", "*.w3.weight": "S0 R", "*.up.weight": "S0 R", "*.query.weight": "S0 R", "*.wq.weight": "S0 R"}


@pytest.mark.parametrize(
    ("name", "half", "mesh", "pins"),
    [
        ("gpt2", "bfloat16", "dp=2", ROWS), ("gpt2", "float16", "tp=2", TENSOR), ("llama3", "bfloat16", "tp=2", TENSOR),
        ("resnet", "bfloat16", "dp=2", {"input:images": "S0 R R R"}), ("moe", "bfloat16", "dp=2", ROWS),
    ],
)  # fmt: skip
def test_losses_are_those_of_a_single_process_under_autocast(name: str, half: str, mesh: str, pins: Mapping[str, str]) -> None:
    torch.manual_seed(0)
    target = zoo.build(name, **{**SIZES[name], **({"layers": 2} if "layers" in SIZES[name] else {})})
    graph = autopar.capture(target.model, target.args, loss=target.loss, loss_args=target.loss_args, compute_dtype=f"autocast-{half}")
    names = [f"{'input:' if item.kind == 'input' else ''}{item.name}" for item in graph.inputs]
    there = {pin: spec for pin, spec in pins.items() if fnmatch.filter(names, pin)}
    plan = autopar.plan(graph, mesh=mesh, hardware="cpu-cluster", constraints=there)
    assert plan.collectives
    wanted = losses_of(copy.deepcopy(target.model), target, getattr(torch, half))

    def train(rank: int) -> list[float]:
        module = autopar.compile(target.model, plan, loss=target.loss)
        assert {parameter.dtype for parameter in module.parameters()} == {torch.float32}
        optimizer, found = torch.optim.AdamW(module.parameters(), lr=1e-3), []
        for _ in range(STEPS):
            loss = module(*target.args, *target.loss_args)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    for found in run_ranks(train, 2):
        assert found == pytest.approx(wanted, rel=1e-3)
        assert found[0] == pytest.approx(wanted[0], rel=FIRST), "before an update has made more of rounding"


class Scored(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(self.up(x)))


def test_verify_and_calls_of_another_size_compute_as_autocast_does() -> None:
    """A compiled module takes autocast of its dtype around the call, and refuses another."""
    torch.manual_seed(0)
    model, x, y = Scored(), torch.randn(8, 16), torch.randint(8, (8,))
    call: dict[str, Any] = {"loss": nn.functional.cross_entropy, "loss_args": (y,), "compute_dtype": "autocast-bfloat16"}
    plan = autopar.plan(model, (x,), mesh="2", hardware="cpu-cluster", constraints={"input:x": "S0 R"}, **call)
    found = verify(plan, Target(model, (x,), loss=call["loss"], loss_args=(y,)), backend="simulate")
    assert found.passed, found.problems

    def run(rank: int) -> tuple[float, float, str, str]:
        module = autopar.compile(model, plan, loss=call["loss"])
        with torch.autocast("cpu", torch.bfloat16):
            within = module(x, y).item()
        logits = autopar.compile(model, autopar.plan(model, (x,), mesh="2", mode="inference", compute_dtype="autocast-bfloat16"))(x)
        with torch.autocast("cpu", torch.float16), pytest.raises(UsageError, match="autocast to float16, the plan computes in") as error:
            module(x, y)
        return within, module(x[:4], y[:4]).item(), str(logits.dtype), str(error.value)

    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        wanted = [call["loss"](model(x[:rows]), y[:rows]).item() for rows in (8, 4)]
    for *losses, dtype, error in run_ranks(run, 2):
        assert losses == pytest.approx(wanted, rel=1e-3) and dtype == "torch.bfloat16"
        assert "compute_dtype='autocast-float16'" in error


def test_a_norm_that_only_cpus_have_a_kernel_for_is_refused_elsewhere() -> None:
    model, x = Scored(), torch.randn(8, 16)
    plan = autopar.plan(model, (x,), mesh="2", hardware="cpu-cluster", compute_dtype="autocast-bfloat16")
    _, schedule = rebuild(model, plan)
    message = r"norm normalises bfloat16 beside float32 weights, for which cuda has no kernel\nhint: give the norm float32"
    with pytest.raises(UsageError, match=message):
        bind(schedule, LockstepRanks(schedule.machine.mesh), torch.device("cuda"))
    assert bind(schedule, LockstepRanks(schedule.machine.mesh), torch.device("cpu"))
