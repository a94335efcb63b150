"""Layers and collectives under torch.profiler, and what training loops do to copies and norms of a compiled module."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.profiler import ProfilerActivity, profile

import autopar
from autopar.plan import Plan
from tests.runtime.test_training import on_ranks, whole

X, IDS = torch.randn(8, 16), torch.randint(0, 16, (8,))


class Deep(nn.Module):
    """Two layers by number, and a table that is looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layers = nn.Embedding(16, 16), nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return (self.layers(x) + self.table(ids)).square().mean()


def deep() -> Deep:
    torch.manual_seed(0)
    return Deep()


def plan_of(mesh: str) -> Plan:
    whole = {"*weight": "R R"} if mesh == "2" else {"layers.0.weight": "S0 R", "layers.2.weight": "S0 S1" if mesh == "2x2" else "S0 R"}
    pins = {"input:x": "S0 R", "input:ids": "S0", **whole}
    return autopar.plan(deep(), (X, IDS), mesh=mesh, hardware="cpu-cluster", constraints=pins)


def test_layers_and_collectives_are_ranges_while_a_profiler_records() -> None:
    plan = plan_of("dp=2")

    def run(rank: int) -> tuple[list[str], bool, str]:
        module = autopar.compile(deep(), plan)
        with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiled:
            module(X, IDS).backward()
        again = module(X, IDS).item()
        with profile(activities=[ProfilerActivity.CPU], acc_events=True) as failed:
            try:
                module(X, IDS + 100)
            except (IndexError, RuntimeError, autopar.AutoparError) as error:
                words = str(error)
        names = [event.name for event in profiled.events() if event.name.startswith("autopar ")]
        return names, abs(again - deep()(X, IDS).item()) < 1e-6, words + str(len(failed.events()) > 0)

    for names, right, words in on_ranks(run, 2):
        layers = {f"autopar {phase} layers.{number}" for phase in ("forward", "backward") for number in (0, 2)}
        assert right and layers <= set(names) and "autopar forward table" in names
        calls = [name for name in names if " over dp: " in name]
        assert sum(name.startswith("autopar start ") for name in calls) == len(plan.collectives) and len(calls) >= len(plan.collectives) > 0
        assert "table" in words or "index" in words, words


def test_copies_are_made_while_gradients_are_set() -> None:
    """Gradients lie in buckets then, which torch does not copy; a copy of a plain module has none."""
    plan = plan_of("2")

    def run(rank: int) -> tuple[list[bool], list[float]]:
        module = autopar.compile(deep(), plan)
        module(X, IDS).backward()
        offsets = [one.grad.to_local().storage_offset() for one in module.parameters()]
        copied, averaged = copy.deepcopy(module), AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        torch.optim.SGD(module.parameters(), lr=1.0).step()
        averaged.update_parameters(module)
        averaged.update_parameters(module)
        pairs = list(zip(copied.parameters(), module.parameters(), averaged.parameters(), strict=True))
        right = [one.grad is None and other.grad is not None for one, other, _ in pairs]
        return [any(offsets), *right, copied.training], [copied(X, IDS).item(), averaged(X, IDS).item()]

    plain = deep()
    wanted = [plain(X, IDS).item()]
    plain(X, IDS).backward()
    torch.optim.SGD(plain.parameters(), lr=1.0).step()
    wanted.append(plain(X, IDS).item())  # the first update copies, the second averages equal weights
    for right, found in on_ranks(run, 2):
        assert all(right), right
        assert found == pytest.approx(wanted, rel=1e-5)


def test_norms_over_two_axes_are_one_call_without_a_warning() -> None:
    plan = plan_of("2x2")

    class Heard(logging.Handler):
        def __init__(self) -> None:
            super().__init__()
            self.words: list[str] = []

        def emit(self, record: Any) -> None:
            self.words.append(record.getMessage())

    def run(rank: int) -> tuple[list[str], float]:
        heard = Heard()
        logging.getLogger("torch.distributed.tensor._redistribute").addHandler(heard)
        module = autopar.compile(deep(), plan)
        module(X, IDS).backward()
        return heard.words, whole(nn.utils.clip_grad_norm_(module.parameters(), 1.0)).item()

    plain = deep()
    plain(X, IDS).backward()
    wanted = nn.utils.clip_grad_norm_(plain.parameters(), 1.0).item()
    for words, norm in on_ranks(run, 4):
        assert words == [] and norm == pytest.approx(wanted, rel=1e-5)
