"""check agrees with what the search writes and with random legal plans, and finds every tampering."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import autopar
from autopar import zoo
from autopar.check import check
from autopar.plan import Plan
from autopar.recording import load
from tests.fused import Layer
from tests.graphs import random_plan, two_layer_plan, two_layers
from tests.strategies import MESHES, SEEDS
from tests.test_plan import broken


@pytest.mark.parametrize("cost_model", ["roofline", "communication"])
@pytest.mark.parametrize("mesh", ["dp=1", "dp=2", "dp=2,tp=2", "x=1,y=4", "x=2,y=2,z=2"])
def test_found_plans_hold(mesh: str, cost_model: Any) -> None:
    assert check(two_layer_plan(mesh, cost_model)) == ()


@given(st.sampled_from(MESHES), SEEDS)
def test_random_plans_hold(mesh: str, seed: int) -> None:
    assert [str(item) for item in check(random_plan(mesh, seed))] == []


def test_the_graph_is_compared(plan_file: Path) -> None:
    plan = load(plan_file)
    assert check(plan, two_layers()) == ()
    assert check(plan, two_layers(batch=32))[0].where == "model.graph_sha256"


def test_how_microbatches_add_up_is_compared() -> None:
    """The loss of the step would be twice that of the batch, or half of it."""
    target = zoo.build("mlp", layers="2", batch=8)
    graph = autopar.capture(target.model, target.args, loss=target.loss, loss_args=target.loss_args, microbatches=2)
    made = autopar.plan(graph, mesh="dp=2", hardware="cpu-cluster")
    assert check(made, graph) == () and made.accumulation is not None
    weight = 1.5 - made.accumulation.weight
    edited = made.model_copy(update={"accumulation": made.accumulation.model_copy(update={"weight": weight})})
    assert [str(item) for item in check(edited, graph)] == [f"accumulation.weight: {weight} in the plan, {1.5 - weight} for the target"]


TAMPERINGS = [
    (("parameters", "layers.0.weight", "spec"), "S1 S0", "w0 has the spec 'S1 S0', it is read as"),
    (("objective", "seconds"), 1e-9, "objective.seconds"),
    (("objective", "bound_seconds"), 0.0, "objective.gap"),
    (("objective", "gap"), 0.5, "objective.gap"),
    (("predicted", "peak_memory_bytes_per_rank"), 5, "predicted.peak_memory_bytes_per_rank"),
    (("predicted", "memory", "activations"), 5, "predicted.memory.activations"),
    (("predicted", "received_bytes_per_rank"), 5, "predicted.received_bytes_per_rank"),
    (("predicted", "communication_seconds"), 5.0, "predicted.communication_seconds"),
    (("predicted", "step_seconds"), 5.0, "predicted.step_seconds"),
    (("memory_limit_bytes_per_rank",), 10, "over the limit of 10"),
    (("collectives", 0, "bytes"), 8, "collectives[0].bytes: 8 in the plan"),
    (("collectives", 0, "axes"), ["tp"], "collectives[0]: "),
    (("collectives", 0, "kind"), "permute", "collectives[0]: "),
    (("collectives", 0, "seconds"), 1.0, "collectives[0].seconds: 1 in the plan"),
    (("collectives", 0, "before"), "gw0", "collectives[0].before: 'gw0'"),
    (("collectives",), [], "collectives: missing: step 0 of the reshard loss@output:0:0, all_reduce over dp,tp of 4 bytes"),
    (("ops", 0, "inputs", 1, "spec"), "R R", "ops.h"),
    (("ops", 0, "outputs", 0, "spec"), "R R", "ops.h"),
    (("ops", 0, "factors"), {"k": ["pp"]}, "the mesh has no axis 'pp'"),
    (("ops", 0, "attributes", "args", 2), "b k, n k -> n b", "ops"),
    (("ops", 4, "seconds"), 1.0, "ops.gw1.seconds: 1 in the plan"),
    (("ops", 2, "inputs", 0, "tensor"), "nowhere", "ops.loss.inputs[0]: reads nowhere"),
    (("mesh",), {"dp": 4, "tp": 1}, "axis of size 1"),
    (("mesh",), {"dp": 3, "tp": 2}, "schedule[0].bytes: 512 in the plan, 384 recomputed"),
    (("inputs", "x", "shape"), [16, 9], "x"),
    (("outputs", "loss", "spec"), "+P0", "partial"),
    (("model", "graph_sha256"), "0" * 64, "their hash is"),
    (("model", "optimizer"), "sgd", "predicted.memory.optimizer"),
    (("model", "optimizer"), "magic", "unknown optimizer 'magic'"),
]


@pytest.mark.parametrize(("path", "value", "said"), TAMPERINGS, ids=lambda value: None)
def test_tampering_is_found(plan_file: Path, path: tuple[str | int, ...], value: Any, said: str) -> None:
    plan = Plan.from_json(broken(json.loads(plan_file.read_text()), *path, value=value))
    found = "\n".join(map(str, check(plan)))
    assert found
    assert said in found, found


def test_a_reshard_taken_out_is_found(plan_file: Path) -> None:
    data = json.loads(plan_file.read_text())
    removed = data["reshards"].pop(0)
    found = check(Plan.from_json(json.dumps(data)))
    assert any(removed["value"] in str(item) for item in found)


def test_a_reshard_that_nobody_makes_is_found(plan_file: Path) -> None:
    data = json.loads(plan_file.read_text())
    data["reshards"][0]["before"] = "no_such_op"
    assert any("which the plan does not have" in item.what for item in check(Plan.from_json(json.dumps(data))))


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("S0/3 R", "dim 0 of size 45 is not 3 blocks of 2 equal parts, as S0/3 R has it"),
        ("S0 R", "dim 0 of [45, 15] is 3 equal blocks, each of which would have to be cut alike; S0 R does not"),
    ],
)
def test_blocks_that_cannot_be_cut_so_are_told(tmp_path: Path, spec: str, said: str) -> None:
    """Three blocks of 15 rows on two ranks: what is wrong is the parameter's own spec, whatever follows from it."""
    model, x = Layer(15, 3, gate_up=False), torch.randn(4, 6, 15)
    plan = autopar.plan(model, (x,), mesh="2", hardware="cpu-cluster", constraints={"qkv.0.weight": "R R"})
    plan.save(tmp_path / "plan.json")
    text = (tmp_path / "plan.json").read_text()
    row = '"shape": [45, 15], "dtype": "float32", "spec": "{}", "index"'
    edited = text.replace(row.format("R R"), row.format(spec))
    assert edited != text
    row = '"shape": [3, 15, 15], "dtype": "float32", "spec": "{}"'
    edited = edited.replace(row.format("R R R"), row.format("R S0 R"))
    (tmp_path / "plan.json").write_text(edited)
    first = check(load(tmp_path / "plan.json"))[0]
    assert str(first) == f"parameters.qkv.0.weight: {said}"
