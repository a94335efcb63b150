"""Which meshes and numbers of microbatches are searched, and in which order."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest

import autopar
from autopar import zoo
from autopar.cost_models import Machine, Mesh
from autopar.errors import TimeLimitError
from autopar.planning.screening import HOPELESS, MORE_GAIN, MOST_LEADERS, NEAR_LEADER, PATIENCE, count_leaders, rank
from autopar.schedule.limit_search import best_schedule
from autopar.search import Screened, Shared, find_plan, screen_baselines
from autopar.search.baselines.recipes import find_baselines
from autopar.search.choices.pins import Pins
from autopar.search.choices.space import Space
from tests.graphs import machine, two_layers
from tests.search.test_baselines import graph_of, machine_of
from tests.search.test_folding import graph as deep_graph
from tests.search.test_folding import machine as deep_machine

LIMIT = 100
FAST, SLOW = (Machine(Mesh.parse(mesh), machine("2").hardware) for mesh in ("dp=4", "tp=4"))
"""Two machines that the fakes below tell apart."""


def plan(seconds: float, peak: int = 90, *, recomputes: bool = False) -> Screened:
    return Screened("fsdp", seconds, peak, recomputes=recomputes)


def test_candidates_that_fit_come_first_by_seconds_then_the_others_by_bytes() -> None:
    screened = {"dp=4": plan(3.0, LIMIT + 2), "tp=4": plan(4.0), "dp=2,tp=2": plan(1.0, LIMIT + 1), "cp=4": plan(2.0), "ep=4": None}
    machines = [Machine(Mesh.parse(mesh), FAST.hardware) for mesh in screened]
    ranked, in_time = rank(iter([1]), machines, lambda number, one: screened[str(one.mesh)], LIMIT, lambda: True)
    assert [str(item.machine.mesh) for item in ranked] == ["cp=4", "tp=4", "dp=2,tp=2", "dp=4", "ep=4"] and in_time
    assert [item.fits(LIMIT) for item in ranked] == [True, True, False, False, False]


def test_leaders_are_those_whose_plan_by_hand_fits_and_is_near_the_best() -> None:
    def leaders(*plans: Screened) -> int:
        left = iter(plans)
        return count_leaders(rank(iter([1]), [FAST] * len(plans), lambda number, one: next(left), LIMIT, lambda: True)[0], LIMIT)

    assert leaders(plan(1.0), plan(0.99 * NEAR_LEADER), plan(1.01 * NEAR_LEADER)) == 2
    assert leaders(*[plan(1.0)] * (MOST_LEADERS + 1)) == MOST_LEADERS
    assert leaders(plan(1.0), plan(1.0, LIMIT + 1)) == 1
    assert leaders(plan(1.0, LIMIT + 1), plan(1.0, LIMIT + 1)) == 0


@pytest.mark.parametrize(("more", "first"), [(1 / (1 + MORE_GAIN) - 0.01, 2), (0.99, 1)])
def test_more_microbatches_come_first_only_where_they_gain_much(more: float, first: int) -> None:
    ranked, _ = rank(iter([1, 2]), [FAST], lambda number, one: plan(more if number > 1 else 1.0), LIMIT, lambda: True)
    assert [item.number for item in ranked] == [first, 3 - first]


def test_numbers_end_with_a_plan_that_has_memory_to_spare() -> None:
    asked = list[int]()

    def screen(number: int, one: Machine) -> Screened:
        asked.append(number)
        return plan(1.0, 50 if number > 1 else 90)

    rank(iter([1, 2, 4]), [FAST], screen, LIMIT, lambda: True)
    assert asked == [1, 2]
    asked.clear()
    rank(iter([1, 2, 4]), [FAST], lambda number, one: asked.append(number) or plan(1.0, 50, recomputes=True), LIMIT, lambda: True)
    assert asked == [1, 2, 4], "it has it for the sake of recomputation"


def test_numbers_end_after_some_without_a_gain_on_the_best_meshes_alone() -> None:
    asked = list[tuple[int, str]]()

    def screen(number: int, one: Machine) -> Screened:
        asked.append((number, str(one.mesh)))
        return plan({"dp=4": 2.0, "tp=4": 1.0, "cp=4": 3.0}[str(one.mesh)])

    machines = [Machine(Mesh.parse(mesh), FAST.hardware) for mesh in ("dp=4", "tp=4", "cp=4")]
    rank(iter([1, 2, 4, 8, 16]), machines, screen, LIMIT, lambda: True)
    assert {number for number, _ in asked} == {1, 2, 4} and max(number for number, _ in asked) == 2**PATIENCE
    assert [mesh for number, mesh in asked if number == 2] == ["tp=4", "dp=4"]


def test_what_there_is_no_time_to_screen_is_searched_last_and_said() -> None:
    left = [True, False]
    ranked, in_time = rank(iter([1, 2]), [SLOW, FAST], lambda number, one: plan(1.0), LIMIT, lambda: left.pop(0))
    assert [(item.machine, item.screened is None) for item in ranked] == [(SLOW, False), (FAST, True)] and not in_time

    def numbers() -> Iterator[int]:
        yield 1
        raise TimeLimitError("no time to capture", "allow more")

    ranked, in_time = rank(numbers(), [FAST], lambda number, one: plan(1.0), LIMIT, lambda: True)
    assert [item.number for item in ranked] == [1] and not in_time


def test_a_mesh_whose_best_plan_by_hand_is_far_behind_has_no_hope() -> None:
    found = find_plan(two_layers(), machine("dp=2,tp=2"), effort="low")
    ranked, _ = rank(iter([1]), [FAST], lambda number, one: plan(HOPELESS * found.seconds * 1.01), LIMIT, lambda: True)
    assert not ranked[0].is_hopeful(found)
    ranked, _ = rank(iter([1]), [FAST], lambda number, one: plan(HOPELESS * found.seconds * 0.99), LIMIT, lambda: True)
    assert ranked[0].is_hopeful(found)


@pytest.mark.parametrize("mesh", ["dp=4", "dp=2,tp=2"])
@pytest.mark.parametrize("name", ["gpt2", "mlp"])
def test_what_is_screened_is_a_baseline_of_the_search_before_its_limits_are_tuned(name: str, mesh: str) -> None:
    graph, where = graph_of(name, "train"), machine_of(mesh)
    screened = screen_baselines(graph, where, 2**60, "adamw", {}, recompute=True, shared=Shared())
    found = find_plan(graph, where, effort="low")
    assert screened is not None and not screened.recomputes
    assert found.baselines[screened.name].step_seconds <= screened.seconds * (1 + 1e-9)
    assert screened.seconds <= 1.5 * min(one.step_seconds for one in found.baselines.values())


def test_where_memory_is_short_the_best_that_recomputes_and_fits_is_taken() -> None:
    graph, where = graph_of("gpt2", "train"), machine_of("dp=2,tp=2")
    free = screen_baselines(graph, where, 2**60, "adamw", {}, recompute=True, shared=Shared())
    assert free is not None
    limit = free.peak - 1
    least = screen_baselines(graph, where, limit, "adamw", {}, recompute=True, shared=Shared())
    without = screen_baselines(graph, where, limit, "adamw", {}, recompute=False, shared=Shared())
    assert least is not None and without is not None
    assert least.worth(limit) <= without.worth(limit)
    tight = screen_baselines(graph, where, 1, "adamw", {}, recompute=True, shared=Shared())
    assert tight is not None and tight.peak > 1 and tight.worth(1)[0] == 1


@pytest.mark.parametrize("mesh", ["dp=4", "dp=2,tp=2"])
def test_a_deep_graph_is_estimated_from_short_ones(mesh: str) -> None:
    """The whole one, under the same limits, takes and holds the same to a few percent."""
    where, shared = deep_machine(mesh), Shared()
    screened = screen_baselines(deep_graph(), where, 2**60, "adamw", {}, recompute=False, shared=shared)
    assert screened is not None and list(shared.spaces) == ["folded"]
    plan = find_baselines(Space(deep_graph(), where, "adamw", Pins()))[screened.name]
    whole = best_schedule(deep_graph(), plan, where, "adamw", 2**60, tries=0)
    assert screened.seconds == pytest.approx(whole.step_seconds, rel=0.03)
    assert screened.peak == pytest.approx(whole.memory.peak, rel=0.03)


def test_of_several_meshes_the_plan_is_no_worse_than_of_the_best_alone() -> None:
    target = zoo.build("mlp", layers=4, batch=64, inputs=64, width=64, outputs=64)
    plan = partial(autopar.plan, target.model, target.args, hardware="cpu-cluster", effort="low", time_limit=600.0)
    alone = [plan(mesh=mesh) for mesh in ("dp=4", "dp=2,tp=2")]
    both = plan(devices=4)
    assert both.objective.seconds <= min(one.objective.seconds for one in alone) * (1 + 1e-9)


def test_a_pin_that_one_mesh_cannot_take_leaves_the_others() -> None:
    target = zoo.build("mlp", layers=2, batch=64, inputs=64, width=64, outputs=64)
    pins = {"layers.0.weight": "S1 R"}
    found = autopar.plan(
        target.model, target.args, devices=4, hardware="cpu-cluster", effort="low", constraints=pins, time_limit=600.0
    )  # fmt: skip
    assert found.mesh == {"dp": 2, "tp": 2}
