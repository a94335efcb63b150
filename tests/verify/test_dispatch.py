"""Mixtures of experts whose rows travel to the ranks of their experts give the values and gradients of one device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.check import check
from autopar.cost_models import Link, load_hardware
from autopar.errors import InfeasibleError, UsageError
from autopar.recording.replaying import replay
from autopar.rules import find_askers
from autopar.runtime.instructions import expert_exchange
from autopar.runtime.instructions.expert_exchange import KeptWays, Told, find_way
from autopar.runtime.module.compiling import check_fixed_sizes
from autopar.runtime.steps.simulation import simulate
from autopar.target import Target
from autopar.verify import verify

TOKENS, WIDTH, EXPERTS = 64, 64, 8


class Mixture(nn.Module):
    """Gated experts with biases, some for each token; ``sliced`` takes gate and up every second column."""

    def __init__(self, choices: int, sliced: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.choices, self.sliced, self.router = choices, sliced, nn.Linear(WIDTH, EXPERTS)
        self.up = nn.Parameter(0.3 * torch.randn(EXPERTS, WIDTH, 16))
        self.down, self.bias = nn.Parameter(0.3 * torch.randn(EXPERTS, 8, WIDTH)), nn.Parameter(torch.randn(EXPERTS, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).softmax(-1).topk(self.choices, -1)
        chosen, order = ids.flatten().sort()
        ends = torch.histc(chosen.float(), bins=EXPERTS, min=0, max=EXPERTS - 1).cumsum(0, dtype=torch.int32)
        made = F.grouped_mm(x[order // self.choices], self.up, offs=ends)
        gate, up = (made[:, ::2], made[:, 1::2]) if self.sliced else made.chunk(2, -1)
        made = F.grouped_mm(F.silu(gate) * up, self.down, offs=ends) + self.bias[chosen]
        made = made * weights.flatten()[order].unsqueeze(-1)
        back = torch.empty_like(order)
        back[order] = torch.arange(order.shape[0])
        return x + made[back].view(-1, self.choices, WIDTH).sum(1)


def target_of(choices: int, sliced: bool = False, tokens: int = TOKENS) -> Target:
    return Target(Mixture(choices, sliced), (torch.randn(tokens, WIDTH),), {}, lambda out: out.tanh().square().mean(), ())


def planned(target: Target, mesh: str, pins: dict[str, str], microbatches: int = 1) -> autopar.Plan:
    """On links so slow that as few bytes travel as can."""
    slow = Link(1e-12, 1e4)
    hardware = replace(load_hardware("cpu-cluster"), node=slow, network=slow)
    graph = autopar.capture(target.model, target.args, loss=target.loss, microbatches=microbatches)
    return autopar.plan(graph, mesh=mesh, hardware=hardware, constraints=pins)


WAYS = [
    ("4", "S0 R R", "S0 R"), ("2x2", "S01 R R", "S01 R"), ("2x2", "S10 R R", "S01 R"), ("2x2", "S0 S1 R", "S01 R"),
    ("2x2", "S1 S0 R", "S01 R"), ("3x2", "S1 R R", "S1 R"), ("2", "S0 R R", "S0 R"), ("2x2", "R S01 R", "S01 R"),
]  # fmt: skip


@pytest.mark.parametrize(("mesh", "rows", "x"), WAYS)
@pytest.mark.parametrize("sliced", [False, True])
def test_rows_travel_to_their_experts(mesh: str, rows: str, x: str, sliced: bool) -> None:
    target = target_of(1 if "2" in mesh else 2, sliced)  # two choices are as many bytes to two ranks as all tokens
    made = planned(target, mesh, {"op:dispatch": rows, "input:x": x})
    travels = any(item.id is None and item.kind == "all_to_all" for item in made.collectives)
    assert travels or rows.startswith("R")
    result = verify(made, target, backend="simulate", steps=2)
    assert result.passed, result.problems


def test_processes_send_rows_too_and_some_get_none() -> None:
    """All tokens choose the same expert."""
    target = target_of(1)
    with torch.no_grad():
        target.model.router.bias[3] = 100.0
    made = planned(target, "2", {"op:dispatch": "S0 R R", "input:x": "S0 R"})
    assert any(item.id is None and item.kind == "all_to_all" for item in made.collectives)
    result = verify(made, target, backend="gloo", steps=2)
    assert result.passed, result.problems


@pytest.mark.parametrize(("microbatches", "operators"), [(1, 6), (2, 3)])
def test_numbers_of_rows_are_told_once_a_segment(microbatches: int, operators: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """``operators`` of a microbatch send rows or their numbers, in forward and backward. Each segment forgets what it was told."""
    target = target_of(1)
    graph = autopar.capture(target.model, target.args, loss=target.loss, microbatches=microbatches)
    made = planned(target, "2", {"op:dispatch": "S0 R R", "input:x": "S0 R"}, microbatches)
    schedule, told, kept = replay(made, graph), Counter[str](), list[KeptWays]()
    torch.manual_seed(0)
    given = {item.tensor: torch.randn(graph.tensors[item.tensor].shape) for item in graph.inputs if item.name != "x"}
    given |= {item.tensor: target.args[0] for item in graph.inputs if item.name == "x"}

    class Kept(KeptWays):
        def __init__(self) -> None:
            super().__init__()
            kept.append(self)

    def counted(name: str, find: Callable[..., Told]) -> Callable[..., Told]:
        def run(*args: Any) -> Told:
            told[name] += 1
            return (yield from find(*args))

        return run

    monkeypatch.setattr("autopar.runtime.execution.binding.KeptWays", Kept)
    monkeypatch.setattr(expert_exchange, "find_way", counted("once", expert_exchange.find_way))
    found = simulate(schedule, given)
    monkeypatch.setattr(Kept, "find", lambda self, *args: counted("each", find_way)(*args))
    wanted = simulate(schedule, given)
    assert all(map(torch.equal, found.outputs, wanted.outputs))
    assert found.observed == wanted.observed
    assert told == {"once": 2 * 2 * microbatches, "each": operators * 2 * microbatches}
    assert len(kept) == 4
    assert not any(one._found for one in kept)


@pytest.mark.parametrize("x", ["S0 R", "R R"])
def test_the_host_waits_where_it_is_told_numbers_of_rows(x: str) -> None:
    """Once in forward, and once in backward: whether rows travel or a rank takes those of its experts."""
    target = target_of(1)
    graph = autopar.capture(target.model, target.args, loss=target.loss)
    slow = Link(1e-12, 1e4)
    hardware = replace(load_hardware("h100-sxm"), node=slow, network=slow)
    made = autopar.plan(graph, mesh="2", hardware=hardware, constraints={"op:dispatch": "S0 R R", "input:x": x}, execute="eager")
    waits = [row.of for row in made.schedule if row.reads_back]
    assert [graph.producer[name].phase for name in waits] == ["forward", "backward"]
    assert find_askers(graph.ops) == set(waits)
    assert check(made, graph) == ()
    changed = tuple(row.model_copy(update={"reads_back": None}) if row.of == waits[0] else row for row in made.schedule)
    assert any("reads_back" in str(item) for item in check(made.model_copy(update={"schedule": changed}), graph))


def test_rows_that_cannot_be_made_as_pinned_are_not_moved_there() -> None:
    """Six rows for each expert are not four equal parts."""
    with pytest.raises(InfeasibleError, match="no plan keeps all pins"):
        planned(target_of(1, tokens=48), "2x2", {"op:dispatch": "R S01 R", "input:x": "S01 R"})


def test_programs_of_fixed_size_keep_experts_whole() -> None:
    target = target_of(2)
    graph = autopar.capture(target.model, target.args, loss=target.loss)
    made = planned(target, "2", {"op:dispatch": "S0 R R"})
    with pytest.raises(UsageError, match="experts are split among ranks"):
        check_fixed_sizes(replay(made, graph), "graph")
