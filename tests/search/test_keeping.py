"""What folded layers keep and make again, against the schedule of the whole graph."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from math import inf
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from autopar import api
from autopar.check import check
from autopar.effort import unlimited
from autopar.rules import is_alias
from autopar.schedule import Assignment, make_schedule, memory
from autopar.schedule.legality import check_legal
from autopar.schedule.tuning import LEAN, ScheduledPlan
from autopar.search.baselines.recipes import find_baselines
from autopar.search.choices.pins import Pins
from autopar.search.choices.space import Space
from autopar.search.folding.tied_model import TiedModel, tie_model
from autopar.search.ilp.build import build_model
from autopar.search.ilp.decode import decode_assignment
from autopar.search.ilp.model import InSequence, Model, Weights
from autopar.search.ilp.overlap import LearnedOverlap
from autopar.search.memory import crossover as keeping
from autopar.search.memory import reduced_limit as scarcity
from autopar.search.memory.crossover import CrossoverRequest, solve_restricted
from autopar.search.memory.memory_repair import count_bytes
from autopar.search.memory.reduced_limit import cross_over_plans
from autopar.search.settings import CROSSOVER_MOMENTS
from solvers import solve
from tests.search.test_folding import folding, graph, machine

PLANS = ("ddp", "fsdp", "megatron")


@cache
def space() -> Space:
    return Space(folding().graph, machine("dp=2,tp=2"), "adamw", Pins())


@cache
def plans() -> tuple[Assignment, ...]:
    found, _ = find_baselines(space())
    return tuple(found[name] for name in PLANS)


def tied(*some: Assignment, moments: int = CROSSOVER_MOMENTS) -> TiedModel:
    found = tie_model(
        build_model(space().restricted_to_plans(some, folding().representatives), recompute_times=moments, alike=folding().representatives),
        folding(),
    )
    assert found is not None
    return found


def answer(model: TiedModel, limit: int | None, gap: float = 1e-6) -> tuple[float, Assignment, int]:
    """Seconds in sequence of the best answer, its assignment, and the most bytes that it counts at any time."""
    problem, unit = model.problem(limit, InSequence())
    found = solve(problem, time_limit=inf, gap=gap)
    assert found.choices is not None and found.objective is not None
    most = count_bytes(problem, found.choices, len(folding().graph.ops) + 1).max()
    return found.objective * unit, decode_assignment(model, model.expand(found.choices)), int(most)


def peak(assignment: Assignment) -> int:
    """Of the leanest schedule of the whole graph."""
    whole = folding().unfold(assignment)
    assert whole is not None
    return memory(make_schedule(graph(), whole, machine("dp=2,tp=2"), LEAN), "adamw").peak


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("moments", [0, CROSSOVER_MOMENTS])
def test_a_folded_problem_counts_what_all_layers_hold(name: str, moments: int) -> None:
    """A little less than the schedule, which holds more while a reshard runs."""
    _, found, most = answer(tied(plans()[PLANS.index(name)], moments=moments), None)
    assert 0.9 * peak(found) <= most <= peak(found) * (1 + 1e-9)


def test_second_runs_unfold_to_all_layers_between() -> None:
    _, kept, most = answer(tied(*plans()), None)
    _, found, _ = answer(tied(*plans()), int(0.7 * most), gap=1e-2)
    assert {name for name in found.again - kept.again if not is_alias(graph().op[name])}, "more than views, which cost nothing"
    whole = folding().unfold(found)
    assert whole is not None
    group = folding().group
    places = [{group.ops[name][1] for name in whole.again if group.repeat_of(name) == repeat} for repeat in range(len(group.repeats))]
    assert places[1] and all(some == places[1] for some in places[1:-1])
    schedule = make_schedule(graph(), whole, machine("dp=2,tp=2"), LEAN)
    check_legal(schedule, "unfolded")
    ran = {item.of.removesuffix("@again") for item in schedule.instructions if item.kind == "run" and item.phase == "recompute"}
    assert {name for name in ran if group.repeat_of(name) in group.left_out} == {
        name for name in whole.again if group.repeat_of(name) in group.left_out
    }


def test_strategies_of_several_plans_are_no_worse_than_of_one() -> None:
    alone = [answer(tied(plan, moments=0), None)[0] for plan in plans()]
    together = answer(tied(*plans(), moments=0), None)[0]
    assert together <= min(alone) * (1 + 1e-6)


def test_what_is_fitted_fits() -> None:
    _, kept, most = answer(tied(*plans()), None)
    limit = int(0.8 * most)
    with patch("autopar.search.memory.crossover.CROSSOVER_SOLVE_WORK", inf):
        wanted = CrossoverRequest(limit, CROSSOVER_MOMENTS, 3, 0, unlimited(), (0.95,))
        found, prices = solve_restricted(space(), plans(), LearnedOverlap.first(0.0), wanted, folding())
    assert found is not None and found.memory.peak <= limit < peak(kept)
    assert found.schedule.graph is graph() and prices != LearnedOverlap.first(0.0)
    check_legal(found.schedule, "fitted")


@pytest.mark.parametrize("first", [False, True])
def test_a_draft_ends_with_the_first_that_fits(monkeypatch: pytest.MonkeyPatch, first: bool) -> None:
    shares, run, limit = [], keeping.RestrictedProblem.run, int(0.8 * answer(tied(*plans()), None)[2])

    def noted(self: keeping._Keeping, prices: Weights, share: float, best: ScheduledPlan | None) -> ScheduledPlan | None:
        shares.append(share)
        return run(self, prices, share, best)

    monkeypatch.setattr(keeping.RestrictedProblem, "run", noted)
    monkeypatch.setattr(keeping, "CROSSOVER_SOLVE_WORK", inf)
    wanted = CrossoverRequest(limit, CROSSOVER_MOMENTS, 3, 0, unlimited(), (1e-6, 0.95, 0.9), first)
    found, _ = solve_restricted(space(), plans(), LearnedOverlap.first(0.0), wanted, folding())
    assert found is not None and found.memory.peak <= limit
    assert shares == ([1e-6, 0.95, 0.95] if first else [1e-6, 0.95, 0.95, 0.9])  # of the first that has answers, other prices too


@pytest.mark.slow
def test_no_problem_of_the_whole_depth_is_built_for_a_large_graph() -> None:
    """A plan that fits is found with the folded problem alone, and is no worse than any written by hand."""
    free = api.plan(graph(), mesh="dp=2,tp=2", hardware="h100-sxm")
    limit = int(0.6 * free.predicted.peak_memory_bytes_per_rank)
    seen: list[int] = []
    real = build_model

    def build(of: Space) -> Model:
        seen.append(len(of.graph.ops))
        return real(of)

    with patch("autopar.search.driver.state.LARGE_ENTRIES", 0), patch("autopar.search.driver.search_model.build_model", build):
        plan = api.plan(graph(), mesh="dp=2,tp=2", hardware="h100-sxm", memory=limit, time_limit=600.0)
    assert seen == [len(folding().graph.ops)]
    assert plan.predicted.peak_memory_bytes_per_rank <= limit and check(plan) == ()
    assert plan.objective.seconds <= min(row.objective_seconds for row in plan.baselines.values() if row.feasible and row.objective_seconds)
    assert np.isfinite(plan.objective.bound_seconds) and plan.objective.bound_seconds <= plan.objective.seconds


def test_strategies_that_add_a_whole_value_to_a_partial_sum_can_be_made_again() -> None:
    """What such an operator alone reads stays whole where it is kept for the second run."""
    masked, plan, on = 0, find_baselines(space())[0]["megatron"], machine("dp=2,tp=2")
    for op in space().graph.ops:
        for strategy in space().op_choices(op).strategies:
            if op.phase == "forward" and sum(bool(spec.partial) for spec in strategy.inputs) > 1:
                changed = replace(plan, strategies={**plan.strategies, op.name: strategy})
                model = build_model(space().restricted_to_plans((changed,)), recompute_times=1)
                problem, _ = model.problem(None, InSequence())
                found = solve(problem, time_limit=inf, gap=1e-3)
                assert found.choices is not None, (op.name, strategy)
                check_legal(make_schedule(space().graph, decode_assignment(model, model.expand(found.choices)), on, LEAN), "the test")
                masked += 1
                break
    assert masked > 4


@pytest.mark.parametrize("estimated", [True, False])
def test_estimates_of_deep_graphs_are_compared_with_each_other(estimated: bool) -> None:
    """What a pass is compared with: a schedule at full depth may be longer than its estimate, which hides what the next one gains."""
    first, seen = SimpleNamespace(estimated=estimated), list[Any]()

    def kept(plans: object, prices: object, budget: object, shares: object, best: object) -> tuple[Any, object]:
        seen.append(best)
        trials.gained = len(seen) == 1
        return first, prices

    counts = {"apart": 0, "limit": 1}
    flags = {"folded": True, "large": False, "draft": False, "gained": False}
    trials: Any = SimpleNamespace(model=None, rivals=(), answers=[], kept=kept, **counts, **flags)
    with patch.object(scarcity, "_solve_within", lambda *asked: "another"):
        cross_over_plans(trials, LearnedOverlap.first(0.0), unlimited())
    assert seen == [None, first if estimated else None]
    assert trials.answers == ["another"]
