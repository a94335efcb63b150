"""Per-layer and selective recomputation: what is kept, what it costs, and that it runs."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from autopar import api, compare, zoo
from autopar.check import check
from autopar.cost_models import Machine
from autopar.graph import Graph
from autopar.importer import capture_graph
from autopar.options import parse_mesh, resolve_hardware
from autopar.plan import Plan
from autopar.schedule import Assignment, Schedule, make_schedule, memory, step_seconds
from autopar.schedule.storages import storage_bytes
from autopar.search.baselines.checkpointing import POLICIES, full_policy, recompute, selective_policy
from autopar.search.baselines.recipes import find_baselines
from autopar.search.choices.pins import resolve_pins
from autopar.search.choices.space import Space
from autopar.target import Target
from autopar.verify import verify
from tests.graphs import machine, plan_of

LAYERS = 4
SIZES = {"layers": str(LAYERS), "width": "64", "batch": "8", "seq": "32", "vocab": "64"}


@cache
def target(name: str) -> Target:
    torch.manual_seed(0)
    return zoo.build(name, mode="train", **SIZES)


@cache
def graph_of(name: str) -> Graph:
    made = target(name)
    return capture_graph(made.model, made.args, made.kwargs, mode="train", loss=made.loss, loss_args=made.loss_args)


@cache
def baselines(name: str, where: Machine) -> dict[str, Assignment]:
    graph = graph_of(name)
    return find_baselines(Space(graph, where, "adamw", resolve_pins(graph, where.mesh, {})))


def schedule_of(name: str, baseline: str, policy: str, mesh: str = "dp=2,tp=2") -> Schedule:
    graph, where = graph_of(name), machine(mesh)
    assignment = baselines(name, where)[baseline]
    if policy:
        assignment = recompute(graph, assignment, POLICIES[policy](graph), where)
    return make_schedule(graph, assignment, where)


def kept(schedule: Schedule) -> tuple[set[str], int]:
    """The tensors made by forward operators that are there when backward begins, and the bytes of the storages they lie in."""
    there = set[str]()
    for item in schedule.instructions:
        if item.half == "backward":
            break
        there = there - set(item.reads) if item.kind == "free" else there | set(item.writes)
    made = {value for value in there if schedule.values[value].tensor in schedule.graph.producer}
    roots = {schedule.storage[value] for value in made}
    return {schedule.values[value].tensor for value in made}, sum(storage_bytes(schedule, root) for root in roots)


@pytest.mark.parametrize("name", ["gpt2", "llama3"])
def test_full_keeps_what_enters_each_layer(name: str) -> None:
    schedule = schedule_of(name, "fsdp", "full")
    graph, again = schedule.graph, full_policy(schedule.graph)
    inside = {tensor for tensor in kept(schedule)[0] if graph.producer[tensor].module.startswith("layers.")}
    assert len(inside) == LAYERS, "the last sum of each layer enters the next one, or the last norm"
    assert {op.name for op in graph.ops if op.target.startswith("autopar.attention.")} <= again
    assert all(graph.op[name].phase == "forward" and graph.op[name].module.startswith("layers.") for name in again)


@pytest.mark.parametrize("name", ["gpt2", "llama3"])
def test_selective_makes_attention_again_alone(name: str) -> None:
    schedule = schedule_of(name, "fsdp", "selective")
    again = {item.of.removesuffix("@again") for item in schedule.instructions if item.phase == "recompute" and item.kind == "run"}
    graph = schedule.graph
    assert again <= selective_policy(graph) and sum(graph.op[op].target.startswith("autopar.attention.") for op in again) == LAYERS
    assert not [op for op in again if graph.op[op].target == "autopar.contract.default"], "projections run once"


@pytest.mark.parametrize("baseline", ["ddp", "zero2", "fsdp", "megatron", "megatron_sp"])
def test_less_memory_for_more_time(baseline: str) -> None:
    plain, some, most = (schedule_of("gpt2", baseline, policy) for policy in ("", "selective", "full"))
    held, steps = zip(*[(kept(item)[1], step_seconds(item, "adamw")) for item in (plain, some, most)], strict=True)
    assert 2 * held[2] < held[1] < held[0]
    assert memory(most, "adamw").peak <= memory(plain, "adamw").peak
    assert steps[0] <= steps[1] < steps[2]
    ratio = most.compute_seconds() / plain.compute_seconds()
    assert 1.1 < ratio < 1.5, "about one more forward"
    matrices = {item.tensor for item in plain.graph.of_kind("parameter") if len(plain.graph.tensors[item.tensor].shape) > 1}
    if baseline in ("ddp", "zero2", "fsdp"):
        gathers = [[part.layout.tensor for call in item.calls for part in call.parts] for item in (plain, most)]
        once, again = (sum(tensor in matrices for tensor in found) for found in gathers)
        assert once == again, "what backward gathers anyhow is gathered for second runs as well"


@pytest.mark.parametrize(("name", "baseline"), [("gpt2", "fsdp"), ("llama3", "megatron_sp"), ("gpt2", "zero2")])
def test_it_runs_and_takes_the_memory_that_was_predicted(name: str, baseline: str) -> None:
    plan = Plan.from_json(plan_of(schedule_of(name, baseline, "full")).to_json())
    assert check(plan) == ()
    assert {row.phase for row in plan.recomputed} == {"recompute"} and plan.recomputed
    found = verify(plan, target(name), backend="simulate", steps=2)
    assert found.passed, found.problems
    assert found.measured_bytes == pytest.approx(found.predicted_bytes, rel=0.05)


@torch.library.custom_op("recompute_test::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@double.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


double.register_autograd(lambda ctx, grad: grad * 2)


class Own(nn.Module):
    """A layer with an operator that nobody knows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x).tanh())
        return double(x).square().sum()


def test_an_operator_of_the_users_own_is_kept_with_the_reason() -> None:
    graph = capture_graph(Own(), (torch.ones(4, 8),), {}, mode="train")
    (op,) = [op for op in graph.ops if op.target.startswith("recompute_test")]
    where = machine("dp=2")
    space = Space(graph, where, "adamw", resolve_pins(graph, where.mesh, {}))
    assignment = find_baselines(space)["ddp"]
    with pytest.raises(ValueError, match=rf"{op.name} may not run a second time: it has no rule"):
        recompute(graph, assignment, [op.name], where)
    told = "\n".join(compare.explain(plan_of(make_schedule(graph, assignment, where)), op.name))
    assert f"since {op.target} may not run a second time: it has no rule" in told


def test_explain_says_what_is_made_again_and_what_is_kept() -> None:
    plan = plan_of(schedule_of("gpt2", "fsdp", "full"))
    row = plan.recomputed[0]
    first = "\n".join(compare.explain(plan, row.name.removesuffix("@again")))
    assert f"recomputed in backward by {row.name}" in first
    assert "\n".join(compare.explain(plan, row.name)).startswith(f"operator {row.name} (")
    made = {entry.tensor for row in plan.captured for entry in row.outputs}
    entering = next(entry.tensor for row in plan.recomputed for entry in row.inputs if entry.value is None and entry.tensor in made)
    assert "kept for backward as" in "\n".join(compare.explain(plan, entering))
    assert "operators are recomputed in backward" in str(plan)
    assert any("recomputed in backward only in the second" in line for line in compare.diff(plan_of(schedule_of("gpt2", "fsdp", "")), plan))


TWICE = """
from tests.search.test_recompute import POLICIES, schedule_of
for policy in POLICIES:
    made = schedule_of("gpt2", "fsdp", policy)
    print(list(made.layouts), [tuple(item) for item in made.instructions])
"""


@pytest.mark.slow
def test_second_runs_are_in_one_order_whatever_the_order_of_a_set() -> None:
    """Another process has other hashes."""
    told = []
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        told.append(subprocess.run([sys.executable, "-c", TWICE], check=True, capture_output=True, text=True, env=environment).stdout)
    assert told[0] == told[1]
    assert "@again" in told[0]


@pytest.mark.usefixtures("short_search")
def test_no_plan_is_worse_than_making_all_layers_again() -> None:
    """No plan found is worse than one that makes its layers again and fits; with ``off`` there is none."""
    graph = graph_of("gpt2")
    options: dict[str, Any] = {"mesh": "dp=4", "hardware": "h100-sxm", "time_limit": 60.0}  # they come first, and take a few seconds
    where = Machine(parse_mesh("dp=4"), resolve_hardware("h100-sxm"), "roofline")
    lean = make_schedule(graph, recompute(graph, baselines("gpt2", where)["fsdp"], full_policy(graph), where), where)
    limit = memory(lean, "adamw").peak
    plan = api.plan(graph, memory=limit, **options)
    assert plan.predicted.peak_memory_bytes_per_rank <= limit and check(plan) == ()
    assert plan.baselines["fsdp"].feasible and "fsdp+full" in plan.baselines, "tried where memory binds, though it just fits"
    assert plan.objective.seconds <= step_seconds(lean, "adamw") * (1 + 1e-9)
    without = api.plan(graph, memory=limit, recompute="off", **options)
    assert not without.recomputed and not [name for name in without.baselines if "+" in name]
