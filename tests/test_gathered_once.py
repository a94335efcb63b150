"""Weights that are gathered once a step and kept over its microbatches: chosen where they pay, run as planned, seen by ``check``."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.check import check
from autopar.check.pipelines import check_pipeline
from autopar.compare import explain
from autopar.cost_models import Machine
from autopar.graph import Accumulation, Graph
from autopar.pipeline.layer_tables import measure_layers
from autopar.pipeline_plan import PipelinePlan
from autopar.plan import Plan
from autopar.recording import replay
from autopar.schedule import make_schedule
from autopar.schedule.simulation import step_seconds
from autopar.schedule.text import format_instructions, parse
from autopar.search.baselines.recipes import find_baselines
from autopar.search.choices.pins import Pins
from autopar.search.choices.space import Space
from autopar.verify import verify
from autopar.verify.launch import run_ranks
from tests.graphs import machine, random_schedule, two_layers

PINS = {"up.weight": "S0 R", "down.weight": "S0 R", "up.bias": "R", "down.bias": "R", "input:x": "S0 R"}
"""Rows and weights split alike, as FSDP has them: each weight is gathered."""
COUNT = 4
"""Microbatches."""


class Wide(nn.Module):
    """Two weights that are small beside the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 512), nn.Linear(512, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu()).square().mean()


def example() -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    return Wide().double(), (torch.randn(2048 * COUNT, 64, dtype=torch.float64),)


@lru_cache
def plan_of(memory: int = 0, microbatches: int = COUNT) -> Plan:
    model, args = example()
    asked: dict[str, Any] = {"memory": memory} if memory else {}
    return autopar.plan(model, args, mesh="dp=4", hardware="cpu-cluster", constraints=PINS, microbatches=microbatches, **asked)


def made_once(plan: Plan) -> list[str]:
    return [row.tensor for row in plan.reshards if row.once]


def gathers_in_a_step(plan: Plan) -> dict[str, int]:
    """How often each weight is gathered in a step."""
    found = dict[str, int]()
    for row in plan.collectives:
        for part in row.members:
            if row.kind == "all_gather":
                found[part.tensor] = found.get(part.tensor, 0) + row.times
    return found


def test_weights_are_gathered_once_where_there_is_room() -> None:
    plan = plan_of()
    assert sorted(made_once(plan)) == ["down.weight", "up.weight"]
    assert gathers_in_a_step(plan) == {"down.weight": 1, "up.weight": 1}
    assert plan_of(microbatches=1).microbatches == 1 and not made_once(plan_of(microbatches=1))
    assert check(plan) == () and Plan.from_json(plan.to_json()) == plan


def test_where_memory_is_short_they_are_gathered_in_each_microbatch() -> None:
    """A copy of both takes 512 KiB: below that at least one is gathered again and again, and the step takes longer."""
    ample = plan_of()
    short = plan_of(ample.predicted.peak_memory_bytes_per_rank - 100_000)
    assert len(made_once(short)) < 2 and short.predicted.peak_memory_bytes_per_rank <= short.memory_limit_bytes_per_rank
    assert max(gathers_in_a_step(short).values()) >= COUNT
    assert short.objective.seconds > ample.objective.seconds and check(short) == ()


def test_explain_says_so() -> None:
    found = "\n".join(explain(plan_of(), "down.weight"))
    assert "kept over all microbatches as 'R R', 262144 bytes on each rank" in found
    found = "\n".join(explain(plan_of(), "up.weight@once"))
    assert "from 'S0 R' to 'R R' once a step, kept over its microbatches: all_gather over dp of 262144 bytes" in found


@pytest.mark.parametrize("backend", ["gloo", "simulate"])
def test_the_step_and_its_memory_are_those_predicted(backend: Any) -> None:
    found = verify(plan_of(), example(), backend=backend, steps=2)
    assert found.passed, found.problems


@pytest.mark.parametrize("execute", ["eager", "graph"])
def test_gradients_are_those_of_one_device(execute: Any) -> None:
    plan, (model, args) = plan_of(), example()
    model(*args).backward()
    wanted = {name: parameter.grad for name, parameter in model.named_parameters()}

    def rank_main(rank: int) -> float:
        model, args = example()
        module = autopar.compile(model, plan, execute=execute)
        for _ in range(2):  # what is kept of one step is not of the next
            module.zero_grad()
            module(*args).backward()
        errors = [(parameter.grad.full_tensor() - wanted[name]).abs().max().item() for name, parameter in module.named_parameters()]
        return max(errors)

    assert max(run_ranks(rank_main, 4)) < 1e-12


def test_the_next_step_gathers_what_the_optimizer_has_changed() -> None:
    plan = plan_of()

    def train(module: Any) -> list[float]:
        optimizer, found = torch.optim.SGD(module.parameters(), lr=0.1), list[float]()
        for _ in range(3):
            loss = module(*example()[1])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    wanted = train(example()[0])
    assert wanted[0] > wanted[1] > wanted[2]
    for found in run_ranks(lambda rank: train(autopar.compile(example()[0], plan)), 4):
        assert found == pytest.approx(wanted, rel=1e-12)


def in_microbatches() -> Graph:
    graph = two_layers()
    return graph.accumulated(Accumulation(3, tuple(item.tensor for item in graph.of_kind("input"))))


def test_the_text_of_a_list_says_what_runs_once_before_all() -> None:
    schedule = random_schedule(in_microbatches(), machine("x=2,y=2"), 4, once=1.0)
    text = format_instructions(schedule.instructions)
    assert text.startswith("forward, once before all\n") and parse(text) == schedule.instructions


def test_the_bound_is_below_plans_that_gather_once() -> None:
    model, args = example()
    graph = autopar.capture(model, args, microbatches=COUNT)
    plan = autopar.plan(model, args, mesh="2x2", hardware="cpu-cluster", microbatches=COUNT)
    where = Machine(machine("2x2").mesh, replay(plan, graph).machine.hardware)
    least = math.inf
    for seed in range(40):
        least = min(least, step_seconds(random_schedule(graph, where, seed, once=0.5), "adamw"))
    assert plan.objective.bound_seconds <= min(least, plan.objective.seconds)


@pytest.mark.parametrize(("name", "up", "down"), [("zero1", 1, 1), ("zero2", 1, 1), ("fsdp", COUNT, 2 * COUNT)])
def test_how_often_plans_by_hand_gather(name: str, up: int, down: int) -> None:
    """ZeRO-1 and ZeRO-2 hold whole parameters while microbatches run. FSDP gathers them in each half that reads them: ``up`` in forward."""
    model, args = example()
    graph = autopar.capture(model, args, microbatches=COUNT)
    where = machine("dp=4")
    schedule = make_schedule(graph, find_baselines(Space(graph, where, "adamw", Pins()))[name], where)
    counts = dict[str, int]()
    for item in schedule.instructions:
        if item.kind == "start" and schedule.collectives[item.of].kind == "all_gather":
            for part in schedule.collectives[item.of].parts:
                counts[part.layout.tensor] = counts.get(part.layout.tensor, 0) + schedule.times(item)
    assert (counts["up.weight"], counts["down.weight"]) == (up, down)


def rows_before(data: Any, kind: str) -> list[Any]:
    found = [row for row in data["schedule"] if row.get("microbatch", 0) < 0 and row["kind"] == kind]
    assert found
    return found


EDITS: list[tuple[Callable[[Any], Any], str]] = [
    (lambda data: rows_before(data, "start")[0].update(microbatch=0), "is no reshard made once, or is one and runs in microbatches"),
    (lambda data: [row.pop("once") for row in data["reshards"] if row.get("once")], "is no reshard made once"),
    (lambda data: data["schedule"].append(data["schedule"].pop(0)), "instructions are what runs before all"),
    (lambda data: [row.update(phase="backward") for row in data["reshards"] if row.get("once")], "of one microbatch, or in backward"),
    (lambda data: data["collectives"][0].update(times=COUNT), f"times: {COUNT} in the plan, 1 recomputed"),
    (lambda data: data["predicted"].update(step_seconds=data["predicted"]["step_seconds"] * 0.99), "predicted.step_seconds"),
    (lambda data: data["predicted"]["memory"].update(activations=data["predicted"]["memory"]["activations"] - 8), "memory.activations"),
]


@pytest.mark.parametrize(("edit", "said"), EDITS, ids=[said for _, said in EDITS])
def test_check_sees_an_edit(edit: Callable[[Any], Any], said: str) -> None:
    assert_seen(plan_of(), edit, said)


def assert_seen(plan: Plan, edit: Callable[[Any], Any], said: str) -> None:
    """``check`` finds an edit of the plan's file."""
    data = json.loads(plan.to_json())
    edit(data)
    found = check(Plan.from_json(json.dumps(data)))
    assert any(said in str(difference) for difference in found), found


class Deep(nn.Sequential):
    """Four layers in a row."""

    def __init__(self) -> None:
        super().__init__(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square().mean()


@lru_cache
def pipeline() -> PipelinePlan:
    torch.manual_seed(0)
    pins = {f"{layer}.0.weight": "S0 R" for layer in range(4)}
    return autopar.plan_pipeline(
        Deep().double(), (torch.randn(32, 64, dtype=torch.float64),), mesh="pp=2,dp=2", microbatches=COUNT, hardware="cpu-cluster",
        constraints=pins,
    )  # fmt: skip


def test_stages_of_a_pipeline_gather_before_their_first_microbatch() -> None:
    plan = pipeline()
    assert check_pipeline(plan) == () and PipelinePlan.from_json(plan.to_json()) == plan
    for stage in plan.stages:
        first = sum(row.seconds for row in stage.plan.schedule if row.microbatch < 0)
        assert made_once(stage.plan) and stage.begin_seconds == pytest.approx(first)
    data = json.loads(plan.to_json())
    data["stages"][1]["begin_seconds"] = 0.0
    assert any("begin_seconds" in str(one) for one in check_pipeline(PipelinePlan.from_json(json.dumps(data))))


def test_a_layer_holds_its_copy_at_rest_and_not_for_each_microbatch() -> None:
    """Beside the same list whose gathers run in every microbatch."""
    model, args = example()
    schedule = replay(plan_of(), autopar.capture(model, args, microbatches=COUNT))
    items = tuple(item._replace(microbatch=max(item.microbatch, 0)) for item in schedule.instructions)
    once, each = (measure_layers(made, "adamw") for made in (schedule, replace(schedule, instructions=items)))
    copies = sum(schedule.local_bytes(value) for value in schedule.kept_values)
    assert sum(modes[0].rest for modes in once.modes) - sum(modes[0].rest for modes in each.modes) == copies > 0
    assert sum(modes[0].held for modes in once.modes) < sum(modes[0].held for modes in each.modes)
