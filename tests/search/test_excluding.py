"""What plans of little time do without: nothing that any plan has which takes no longer, and enough to bound more than weights alone."""

from __future__ import annotations

import numpy as np
import pytest

import autopar
from autopar import zoo
from autopar.graph import Graph
from autopar.search.bounds import Answer, Cuts, floor
from autopar.search.building import build_model
from autopar.search.excluding import within
from autopar.search.exposure import Alone
from autopar.search.extract import extract
from autopar.search.model import Model
from autopar.search.pins import Pins, resolve_pins
from autopar.search.solving import solve
from autopar.search.space import Space
from autopar.search.trials import UNLIMITED
from autopar.search.tuning import best_schedule
from cost_models import Machine
from solvers import Status
from tests.graphs import random_graph
from tests.search.small_graphs import small_graph, small_machine, small_pins
from tests.search.test_memory import drawn, machine

SOME = 1e-9


def small(seed: int) -> Model:
    graph, on = small_graph(seed), small_machine(seed, "x=2,y=2")
    return build_model(Space(graph, on, "sgd", resolve_pins(graph, on.mesh, small_pins(graph, on, seed))), again=2 * (seed % 2))


def random(seed: int) -> Model:
    on: Machine = machine("x=2,y=2")
    graph: Graph = random_graph(seed, layers=3)
    return build_model(Space(graph, on, "sgd", Pins()), again=2 * (seed % 2))


def taken(model: Model, choices: np.ndarray) -> float:
    """Seconds of the best schedule known of some choices."""
    space = model.space
    found = best_schedule(space.graph, extract(model, choices), space.machine, space.optimizer, UNLIMITED)
    return found.seconds


def has(model: Model, choices: np.ndarray) -> bool:
    return all(np.isfinite(edge.seconds[choices[edge.source], choices[edge.target]]) for edge in model.edges)


@pytest.mark.parametrize("make", [small, random])
def test_no_plan_loses_what_it_has_within_its_own_time(make: object) -> None:
    excluded = 0
    for seed in range(30):
        model = make(seed)  # type: ignore[operator]
        for number in range(2):
            choices = drawn(model, 10 * seed + number)
            seconds = taken(model, choices)
            assert has(within(model, seconds * (1 + SOME)), choices)
            own = Cuts(model, model.space.machine.hardware.overlap_slowdown)
            own.add(Answer(model, choices))
            assert own.best()[1] <= seconds * (1 + SOME)
            excluded += not has(within(model, 1.01 * floor(model)), choices)
    assert excluded > 10


@pytest.mark.parametrize(
    "pins", [{"layers.1.weight": "S0 R"}, {"head.weight": "S0 R"}, {"input:x": "S0 R"}, {"layers.1.weight": "R S0", "input:x": "S0 R"}]
)
def test_what_waits_for_little_is_kept(pins: dict[str, str]) -> None:
    """Weights gathered beside operators in both phases, and a loss that is summed late: plans that take hardly more than operators do."""
    target = zoo.build("mlp")
    graph, on = autopar.capture(target.model, target.args), machine("dp=2")
    model = build_model(Space(graph, on, "sgd", resolve_pins(graph, on.mesh, pins)))
    choices = solve(model.problem(None, Alone(1.0, on.hardware.overlap_slowdown))[0]).choices
    assert choices is not None
    seconds = taken(model, choices)
    assert has(within(model, seconds * (1 + SOME)), choices)
    least = within(model, 0.0)
    for number, late in model.late.items():
        before, after = (one.edges[number].seconds[:, late] for one in (model, least))
        assert late.any() and np.array_equal(before, after), "nothing waits for the loss"


def test_what_is_left_bounds_more_than_weights_alone() -> None:
    """Of a small MLP in little memory each plan waits for something, but half of one and half of another wait for nothing for long."""
    target = zoo.build("mlp")
    model = build_model(Space(autopar.capture(target.model, target.args), machine("dp=2,tp=2"), "adamw", Pins()), again=1)
    weights = Cuts(model, model.space.machine.hardware.overlap_slowdown).first()
    limit = int(0.4 * 128004)
    problem, unit = model.problem(limit, weights)
    alone = solve(problem).bound * unit
    assert alone < 109e-6
    least, _ = within(model, 117e-6).problem(limit, weights)
    assert solve(least).status is Status.INFEASIBLE
