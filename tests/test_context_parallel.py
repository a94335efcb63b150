"""Causal attention whose query sequence is split, keys and values gathered: found, priced, run and verified, forward and backward."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import autopar
from autopar import zoo
from autopar.check import check
from autopar.cost_models import Machine, Mesh, load_hardware
from autopar.pricing import compute_seconds
from autopar.rules import find_rule, strategies
from autopar.verify import verify


@pytest.mark.parametrize(
    ("name", "heads", "mesh"),
    [
        ("gpt2", {"heads": 1}, "x=2"),
        ("llama3", {"heads": 2, "kv_heads": 1}, "x=4"),
        ("llama3", {"heads": 1, "kv_heads": 1}, "x=2,y=2"),
    ],
)
def test_where_only_queries_can_be_split_the_plan_splits_them_and_is_verified(name: str, heads: dict[str, Any], mesh: str) -> None:
    torch.manual_seed(0)
    made = zoo.build(name, layers=1, batch=1, **heads)
    plan = autopar.plan(made.model, made.args, mesh=mesh, hardware="cpu-cluster", cost_model="communication", time_limit=600)
    forward, backward = (op for op in plan.ops if op.op.startswith("autopar.attention"))
    keys = " ".join(["R R R R", *(f"+P{axis}" for axis in range(len(plan.mesh)))])
    q, k, v = (entry.spec for entry in forward.inputs)
    assert q in ("R R S0 R", "R R S01 R", "R R S10 R") and k == v == "R R R R"
    assert [entry.spec for entry in backward.outputs] == [backward.inputs[1].spec, keys, keys]
    found = verify(plan, made, backend="simulate", steps=2)
    assert found.passed and not found.problems
    assert check(plan) == ()


def test_the_slowest_rank_is_what_split_queries_cost() -> None:
    """Of n parts of the queries the last does (2n - 1) / n^2 of the work under a causal mask."""
    made = zoo.build("llama3", layers=1, batch=4, seq=4096)
    graph = autopar.capture(made.model, made.args)
    hardware = replace(load_hardware("cpu-cluster"), kernel_launch_seconds=0.0, launch_overlaps=True)  # arithmetic alone counts
    machine = Machine(Mesh.parse("x=4"), hardware)
    operators = [op for op in graph.ops if op.target.startswith("autopar.attention")]
    assert len(operators) == 2
    for op in operators:
        tensors = [graph.tensors[name] for name in (*op.inputs, *op.outputs)]
        seconds = {
            "".join(name for name, _ in strategy.factors): compute_seconds(op, graph.tensors, strategy, machine)
            for strategy in strategies(find_rule(op, graph.tensors), tensors, (4,))
        }
        assert seconds["b"] == seconds["h"] == pytest.approx(seconds[""] / 4)
        assert seconds["s"] == pytest.approx(seconds[""] * 7 / 16)
        assert seconds["s mirrored"] == pytest.approx(seconds[""] / 4)
