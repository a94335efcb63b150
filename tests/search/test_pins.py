"""Pins do not make a search worse: what the free plan keeps changes nothing, and what it does not keep costs what the pin costs."""

from __future__ import annotations

import json
from functools import cache
from math import inf
from typing import Any

import pytest

import autopar
from autopar import zoo
from autopar.graph import Graph
from autopar.plan import Plan
from autopar.recording import replay
from autopar.search import SearchResult, find_pinned_plan, find_plan
from autopar.search.choices.pins import Pins, resolve_pins
from autopar.search.driver.pinned import keeps_pins
from autopar.search.folding.fold import fold_layers
from tests.graphs import machine

MODELS: dict[str, dict[str, Any]] = {
    "mlp": {"layers": 4},
    "gpt2": {"layers": 6},
    "llama3": {"layers": 6},
    "moe": {},
}
MESH = "dp=2,tp=2"


@cache
def graph(name: str) -> Graph:
    target = zoo.build(name, **MODELS[name])
    return autopar.capture(target.model, target.args, dict(target.kwargs), loss=target.loss, loss_args=target.loss_args)


@cache
def free_plan(name: str) -> Plan:
    return autopar.plan(graph(name), mesh=MESH, time_limit=600)


def without_times(plan: Plan) -> Any:
    """The plan's file without seconds of searches and without pins."""
    data = json.loads(plan.to_json())

    def strip(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: strip(item) for key, item in value.items() if key not in ("pins", "solve_seconds", "cpu_seconds")}
        return [strip(item) for item in value] if isinstance(value, list) else value

    return strip(data)


def specs_of(plan: Plan, captured: Graph) -> dict[str, str]:
    """The spec of each graph input in a plan, for its own shape."""
    schedule = replay(plan, captured)
    sizes = schedule.machine.mesh.sizes
    return {item.name: str(item.own_spec(schedule.specs[item.tensor], sizes)) for item in captured.inputs}


@pytest.mark.parametrize(
    ("name", "pinned"),
    [
        *((name, "one weight") for name in MODELS),
        *((name, "all weights") for name in ("mlp", "llama3")),
        *((name, "an input") for name in ("mlp", "moe")),
    ],
)
def test_a_pin_that_the_free_plan_keeps_changes_nothing(name: str, pinned: str) -> None:
    plan, captured = free_plan(name), graph(name)
    weights = [item.name for item in captured.of_kind("parameter")]
    first = next(iter(captured.of_kind("input"))).name
    names = {"one weight": weights[len(weights) // 2 : len(weights) // 2 + 1], "all weights": weights, "an input": [first]}[pinned]
    prefix = "input:" if pinned == "an input" else ""
    specs = specs_of(plan, captured)
    again = autopar.plan(captured, mesh=MESH, time_limit=600, constraints={prefix + one: specs[one] for one in names})
    assert again.pins
    assert without_times(again) == without_times(plan)


@cache
def searched(name: str) -> SearchResult:
    return find_plan(graph(name), machine(MESH), time_limit=600, effort="low")


def other_pin(name: str) -> dict[str, str]:
    """A pin of a matrix in one of the layers between, otherwise than the free plan has it."""
    captured = graph(name)
    item = next(one for one in captured.of_kind("parameter") if ".2." in one.name and len(captured.tensors[one.tensor].shape) == 2)
    return {item.name: next(spec for spec in ("R S0", "S1 R") if spec != str(searched(name).schedule.specs[item.tensor]))}


def test_a_pin_of_one_layer_leaves_the_others_alone() -> None:
    name = "llama3"
    free, pins, on = searched(name), other_pin(name), machine(MESH)
    found = find_pinned_plan(graph(name), on, pins=pins, time_limit=600, effort="low")
    resolved = resolve_pins(graph(name), on.mesh, pins)
    assert not keeps_pins(free.schedule, resolved) and keeps_pins(found.schedule, resolved)
    assert found.seconds <= free.seconds * 1.01
    assert free.bound_seconds <= found.bound_seconds * (1 + 1e-9) <= found.seconds * (1 + 2e-9)
    assert set(found.baselines) == set(free.baselines)
    assert all(phase.step_after == inf for phase in found.trace if phase.name.startswith("without pins")), "no plans that keep the pin"
    assert {phase.name.split(": ")[0] for phase in found.trace} >= {"without pins", "alike", "pinned"}


def test_pins_of_one_layer_hold_for_all_where_none_disagrees() -> None:
    captured, on = graph("llama3"), machine(MESH)
    folding = fold_layers(captured)
    assert folding is not None
    one = resolve_pins(captured, on.mesh, {"layers.3.attn.wq.weight": "S0 R"})
    spread = folding.spread_pins(one)
    assert folding.pins(one) is None and spread is not None
    layers = {item.name.split(".")[1] for item in folding.graph.inputs if item.tensor in spread.inputs}
    assert layers == {"1", "4"}, "the two that stand for those between"
    two = resolve_pins(captured, on.mesh, {"layers.3.attn.wq.weight": "S0 R", "layers.4.attn.wq.weight": "R S0"})
    assert folding.spread_pins(two) is None
    assert folding.spread_pins(Pins()) == Pins()
