"""A part of each tensor on a rank, as far as it takes to fit."""

from __future__ import annotations

import math

import pytest

from autopar.schedule import Assignment, make_schedule
from autopar.search.building import build_model
from autopar.search.exposure import Exposure
from autopar.search.extract import extract
from autopar.search.parting import parted
from autopar.search.pins import Pins
from autopar.search.space import Space
from autopar.search.tuning import Timed, best_schedule
from cost_models import Machine, Mesh, load_hardware
from solvers import solve
from tests.graphs import random_graph


def cheapest(seed: int, pins: Pins | None = None) -> tuple[Space, Assignment]:
    """The best plan without a limit: where launches decide, all ranks compute the same."""
    graph = random_graph(seed, layers=4, batch=64, width=32)
    space = Space(graph, Machine(Mesh.parse("x=2,y=2"), load_hardware("h100-sxm"), "roofline"), "adamw", pins or Pins())
    model = build_model(space)
    choices = solve(model.problem(None, Exposure.first(space.machine.hardware.overlap_slowdown))[0], time_limit=math.inf).choices
    assert choices is not None
    return space, extract(model, choices)


def timed(space: Space, plan: Assignment, limit: int) -> Timed:
    return best_schedule(space.graph, plan, space.machine, "adamw", limit, tries=24)


@pytest.mark.parametrize("seed", [0, 2, 8])
def test_what_does_not_fit_is_parted_until_it_does(seed: int) -> None:
    space, plan = cheapest(seed)
    free = timed(space, plan, 2**62)
    assert any(spec.is_replicated for spec in plan.inputs.values()), "there is something to part"
    for share in (0.9, 0.7):
        limit = int(share * free.memory.peak)
        found = list(parted(space, plan, limit, lambda some, limit=limit: timed(space, some, limit), math.inf))  # type: ignore[misc]
        assert found
        for one in found:
            make_schedule(space.graph, one.assignment, space.machine, one.schedule.limits)
            assert one.memory.peak <= limit
            assert one.assignment.strategies == plan.strategies
            assert one.assignment != plan


def test_nothing_is_parted_where_all_fits_and_none_is_found_where_nothing_does() -> None:
    space, plan = cheapest(0)
    free = timed(space, plan, 2**62)
    for one in parted(space, plan, free.memory.peak, lambda some: timed(space, some, free.memory.peak), math.inf):
        assert one.seconds <= free.seconds
    assert not list(parted(space, plan, 1, lambda some: timed(space, some, 1), math.inf))


def test_no_more_is_parted_than_there_is_time_for() -> None:
    space, plan = cheapest(0)
    tuned: list[Assignment] = []
    free = timed(space, plan, 2**62)

    def tune(some: Assignment) -> Timed:
        tuned.append(some)
        return free

    assert [one.assignment for one in parted(space, plan, 2**62, tune, 0.0)] == [plan] * 4
    assert tuned == [plan] * 4
