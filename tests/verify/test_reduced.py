"""verify --reduced: right plans pass on all their ranks in one process, wrong ones do not, and what cannot shrink is named."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar import zoo
from autopar.errors import MismatchError, UsageError
from autopar.graph import Graph
from autopar.plan import Plan
from autopar.recording import replay
from autopar.schedule import Schedule
from autopar.schedule.legality import check_legal
from autopar.verify import verify_reduced
from autopar.verify.reduced import layers, verifying
from autopar.verify.reduced.layers import with_fewer_layers
from autopar.verify.reduced.shrinking import shrink
from autopar.verify.reduced.verifying import verify_schedule
from benchmarks.models import stressed
from benchmarks.reduced import find_mutation
from tests.cli.running import autopar as command
from tests.graphs import machine, plan_of, random_schedule


def captured(name: str, mode: Any = "train", **keys: Any) -> Graph:
    made = zoo.build(name, mode=mode, device="meta", **keys)
    return autopar.capture(made.model, made.args, mode=mode)


def drawn(graph: Graph, mesh: str, seed: int = 0, again: float = 0.0) -> tuple[Plan, Schedule]:
    schedule = random_schedule(graph, machine(mesh), seed, again=again)
    return plan_of(schedule), schedule


@pytest.mark.parametrize(
    ("name", "mode", "mesh"),
    [
        ("mlp", "train", "2x2x2"), ("gpt2", "train", "2x4"), ("llama3", "train", "4x4"), ("llama3", "inference", "2x2"),
        ("moe", "train", "2x4"), ("resnet", "train", "2x2"), ("llama3", "train", "3x2"),
    ],
)  # fmt: skip
def test_plans_drawn_at_random_pass(name: str, mode: Any, mesh: str) -> None:
    graph = captured(name, mode)
    for seed in range(2):
        plan, schedule = drawn(graph, mesh, seed, again=0.3 if mode == "train" else 0.0)
        found = verify_schedule(plan, schedule, {})
        assert found.passed and found.ranks == schedule.machine.mesh.ranks, found.problems
        assert found.collectives == found.planned_collectives and found.operators == found.planned_operators
        assert found.output_error <= 1e-9 and max(found.gradient_errors.values(), default=0.0) <= 1e-9
        assert json.loads(json.dumps(found.to_json(), allow_nan=False))["compared_in"] == "float64"


def test_a_step_of_microbatches_is_compared_whole() -> None:
    made = zoo.build("gpt2", batch=16, device="meta")
    plan = autopar.plan(made.model, made.args, mesh="dp=2,tp=2", hardware=stressed(), microbatches=4, effort="low")
    found = verify_reduced(plan, made)
    assert plan.microbatches == 4 and found.passed, found.problems


def test_a_plan_is_run_at_a_part_of_its_sizes() -> None:
    """Equal layers alike, heads of a size of their own, every rank's part with two entries at least."""
    graph = captured("llama3", batch=64, seq=256, width=512, heads=32, hidden=1536, vocab=384)
    schedule = replay(autopar.plan(graph, mesh="4x4", hardware=stressed(), effort="low"), graph)
    small = shrink(schedule).schedule
    check_legal(small, "reduced")
    shapes = {item.name: small.graph.tensors[item.tensor].shape for item in small.graph.inputs}
    whole = {item.name: graph.tensors[item.tensor].shape for item in graph.inputs}
    assert sum(map(math.prod, shapes.values())) < sum(map(math.prod, whole.values())) / 8
    assert shapes["layers.0.ffn.w1.weight"] == shapes["layers.1.ffn.w1.weight"]
    for name, shape in shapes.items():
        for extent, before in zip(shape, whole[name], strict=True):
            assert before % extent == 0, name


def deep(layers: int = 6) -> tuple[Plan, Schedule]:
    """Equal layers, lying alike."""
    graph = captured("llama3", layers=layers)
    made = autopar.plan(graph, mesh="dp=2,tp=2", hardware=stressed(), effort="low")
    return made, replay(made, graph)


def test_equal_layers_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "MOST_RUNS", 0)  # none is kept for a bucket alone
    plan, schedule = deep(8)
    fewer = with_fewer_layers(schedule)
    assert fewer.layers == 8 and 2 <= fewer.kept < 8
    check_legal(fewer.schedule, "fewer layers")
    kinds = {(item.op.target, item.strategy) for item in schedule.operations.values()}
    assert {(item.op.target, item.strategy) for item in fewer.schedule.operations.values()} == kinds
    found = verify_schedule(plan, schedule, {})
    assert found.passed and found.layers == fewer.kept and found.operators < found.planned_operators, found.problems


def test_a_layer_that_lies_otherwise_is_kept() -> None:
    graph = captured("mlp", layers=4)
    _, schedule = drawn(graph, "2x2")  # strategies drawn at random: no two layers are equal
    assert len(graph.groups) == 1 and with_fewer_layers(schedule).kept == len(graph.groups[0])


@pytest.mark.parametrize(
    "name",
    [
        "reduce-scatter without its sum", "all-to-all in reverse order", "groups minor to major", "offsets of the first rank",
        "blocks joined along dim 0", "slices from the other end", "a gather along another dim", "an operator left out",
    ],
)  # fmt: skip
def test_what_is_wrong_is_found(name: str) -> None:
    row = find_mutation(name)
    assert row.plans and row.found


class Windows(nn.Module):
    """Windows of a dim, whose number no rule knows at another size."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.unfold(1, 3, 1).sum(-1)).square().mean()


def test_what_keeps_its_size_is_named_with_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        target = (Windows(), (torch.empty(16, 4096, 8),))
    plan = autopar.plan(*target, mesh="2", hardware="cpu-cluster")
    found = verify_reduced(plan, target)
    assert found.passed and "test_reduced.py:" in found.kept[0].reason and found.kept[0].size == 4096
    monkeypatch.setattr(verifying, "MOST_BYTES", 2**16)
    with pytest.raises(UsageError, match=r"keeps its 4096 entries \(aten.unfold at .*test_reduced.py:\d+\)") as refused:
        verify_reduced(plan, target)
    assert refused.value.message.count("\n") == 0


def test_an_index_that_is_baked_in_keeps_its_table() -> None:
    """A number of an entry beyond the reduced dim."""

    class Picked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 64)
            self.register_buffer("places", torch.tensor([0, 900]))

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x[:, self.places]).square().mean()

    target = (Picked(), (torch.randn(8, 1024, 64),))
    found = verify_reduced(autopar.plan(*target, mesh="2", hardware="cpu-cluster"), target)
    assert found.passed and any(item.size == 1024 for item in found.kept), found


def test_another_model_is_refused() -> None:
    made = zoo.build("mlp", device="meta")
    plan = autopar.plan(made.model, made.args, mesh="2", hardware="cpu-cluster")
    with pytest.raises(MismatchError, match="another model"):
        verify_reduced(plan, zoo.build("mlp", width=32, device="meta"))


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = zoo.build("mlp", device="meta")
    plan = autopar.plan(made.model, made.args, mesh="dp=2,tp=2", hardware="cpu-cluster", cost_model="communication")
    file = tmp_path / "plan.json"
    plan.save(file)
    done = command(capsys, "verify", file, "zoo:mlp", "--reduced", "--json")
    assert done.status == 0 and json.loads(done.out)["passed"], done.err
    told = command(capsys, "verify", file, "zoo:mlp", "--reduced", "--backend", "simulate")
    assert told.status == 2 and told.err.rstrip().endswith("hint: leave --backend and --steps out")
    wrong = command(capsys, "verify", file, "zoo:mlp,width=32", "--reduced")
    assert wrong.status == 3 and wrong.err.count("hint: ") == 1


def test_a_collective_out_of_turn_is_told() -> None:
    plan, schedule = drawn(captured("mlp"), "2x2")
    rows = plan.collectives
    turned = plan.model_copy(update={"collectives": (rows[1], rows[0], *rows[2:])})
    found = verify_schedule(turned, schedule, {})
    assert not found.passed and "planned is" in found.problems[0]
