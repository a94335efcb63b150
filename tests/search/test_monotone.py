"""What must not happen when more is allowed: hypothesis looks for a graph on which it does."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cost_models import Hardware, Machine
from autopar.errors import InfeasibleError
from autopar.graph import Graph
from autopar.search import SearchResult, find_plan
from tests.strategies import SEEDS, SMALL_MESHES, small_graph, small_machine, small_pins

TOLERANCE = 0.05
"""Searches of two limits may stop at different plans; what is proved must agree exactly."""


def searched(graph: Graph, machine: Machine, seed: int = 0, **more: object) -> SearchResult:
    pins = small_pins(graph, machine, seed)
    return find_plan(graph, machine, optimizer=optimizer_of(graph), constraints=pins, baselines=False, time_limit=3600.0, **more)  # type: ignore[arg-type]


def optimizer_of(graph: Graph) -> str:
    return "adamw" if graph.mode == "train" else "none"


@settings(max_examples=25, derandomize=True)
@given(SEEDS, SMALL_MESHES, st.floats(0.3, 1.0))
def test_more_memory_never_costs_more(seed: int, mesh: str, share: float) -> None:
    graph, machine = small_graph(seed), small_machine(seed, mesh)
    free = searched(graph, machine, seed)
    limit = int(free.memory.peak * share)
    try:
        tight = searched(graph, machine, seed, memory_bytes=limit)
    except InfeasibleError:
        return
    assert tight.memory.peak <= limit
    assert free.seconds <= tight.seconds * (1 + TOLERANCE)
    assert free.bound_seconds <= tight.seconds * (1 + 1e-9), "what bounds every plan bounds those that fit"


@settings(max_examples=25, derandomize=True)
@given(SEEDS, SMALL_MESHES)
def test_a_limit_that_the_answer_keeps_to_changes_nothing_that_is_proved(seed: int, mesh: str) -> None:
    graph, machine = small_graph(seed), small_machine(seed, mesh)
    free = searched(graph, machine, seed)
    same = searched(graph, machine, seed, memory_bytes=free.memory.peak)
    assert same.memory.peak <= free.memory.peak
    assert same.seconds <= free.seconds * (1 + TOLERANCE)
    assert same.bound_seconds <= free.seconds * (1 + 1e-9)


@settings(max_examples=25, derandomize=True)
@given(SEEDS, SMALL_MESHES)
def test_a_pin_never_helps(seed: int, mesh: str) -> None:
    """The unpinned problem holds every pinned plan."""
    graph, machine = small_graph(seed), small_machine(seed, mesh)
    pinned = searched(graph, machine, seed)
    free = find_plan(graph, machine, optimizer=optimizer_of(graph), baselines=False, time_limit=3600.0)
    assert free.bound_seconds <= pinned.seconds * (1 + 1e-9)
    assert free.seconds <= pinned.seconds * (1 + TOLERANCE)


@settings(max_examples=25, derandomize=True)
@given(SEEDS, SMALL_MESHES, st.floats(1.0, 8.0))
def test_faster_hardware_never_costs_more(seed: int, mesh: str, factor: float) -> None:
    """All bandwidths and rates times a factor, latencies divided by it: every plan takes that much less, and so does the answer."""
    graph, machine = small_graph(seed), small_machine(seed, mesh)
    slow, fast = searched(graph, machine, seed), searched(graph, faster(machine, factor), seed)
    assert fast.seconds == pytest.approx(slow.seconds / factor, rel=TOLERANCE)
    assert fast.bound_seconds <= slow.seconds / factor * (1 + 1e-9)


def faster(machine: Machine, factor: float) -> Machine:
    data = machine.hardware.to_dict()
    for link in data["links"].values():
        link["latency_seconds"] /= factor
        link["bandwidth"] *= factor
    data["memory_bandwidth"] *= factor
    data["kernel_launch_seconds"] /= factor
    data["peak_flops"] = {dtype: flops * factor for dtype, flops in data["peak_flops"].items()}
    return replace(machine, hardware=Hardware.from_dict(data))


@settings(max_examples=15, derandomize=True)
@given(SEEDS, SMALL_MESHES)
def test_the_same_seed_gives_the_same_plan(seed: int, mesh: str) -> None:
    graph, machine = small_graph(seed), small_machine(seed, mesh)
    one, other = (searched(graph, machine, seed) for _ in range(2))
    assert one.schedule.instructions == other.schedule.instructions
    assert (one.seconds, one.bound_seconds) == (other.seconds, other.bound_seconds)


@settings(max_examples=20, derandomize=True)
@given(SEEDS, SMALL_MESHES)
def test_under_the_communication_model_the_objective_is_the_sum(seed: int, mesh: str) -> None:
    """In sequence, call by call, nothing joined, and proved."""
    graph, machine = small_graph(seed), replace(small_machine(seed, mesh), cost_model="communication")
    found = searched(graph, machine, seed)
    calls = found.schedule.calls
    assert all(len(call.parts) == 1 for call in calls)
    inner = [
        machine.collective_seconds(item.kind, item.bytes, [machine.mesh.whole(axis) for axis in item.axes])
        for operation in found.schedule.operations.values()
        for item in operation.strategy.inner
    ]
    assert found.seconds == pytest.approx(sum(call.seconds(machine) for call in calls) + sum(inner), rel=1e-9, abs=1e-15)
    assert found.status == "optimal"
