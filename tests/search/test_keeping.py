"""What folded layers keep and make again, against the schedule of the whole graph."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from math import inf

import numpy as np
import pytest

from autopar.effort import unlimited
from autopar.rules import is_alias
from autopar.schedule import Assignment, make_schedule, memory
from autopar.schedule.instructions import LEAN_LIMITS
from autopar.schedule.legality import check_legal
from autopar.search import Shared, Thresholds, find_plan
from autopar.search.baselines.recipes import find_baselines
from autopar.search.choices.pins import Pins
from autopar.search.choices.space import Space
from autopar.search.folding.tied_model import TiedModel, tie_model
from autopar.search.ilp.build import build_model
from autopar.search.ilp.decode import decode_assignment
from autopar.search.ilp.model import InSequence
from autopar.search.ilp.overlap import LearnedOverlap
from autopar.search.ilp.rematerialization import find_recompute_times
from autopar.search.memory.crossover import CrossoverRequest, solve_restricted
from autopar.search.memory.memory_repair import count_bytes
from autopar.search.settings import CROSSOVER_MOMENTS
from autopar.solvers import solve
from tests.search.test_folding import folding, graph, machine

PLANS = ("ddp", "fsdp", "megatron")


@cache
def space() -> Space:
    return Space(folding().graph, machine("dp=2,tp=2"), "adamw", Pins())


@cache
def plans() -> tuple[Assignment, ...]:
    found = find_baselines(space())
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
    return memory(make_schedule(graph(), whole, machine("dp=2,tp=2"), LEAN_LIMITS), "adamw").peak


@pytest.mark.parametrize("moments", range(1, 10))
def test_equal_layers_may_run_again_at_as_many_times(moments: int) -> None:
    """However near the end of the graph they stand. Otherwise the folded problem has no crossover."""
    short, alike = folding().graph, folding().representatives
    found = find_recompute_times(short, {op.name: place for place, op in enumerate(short.ops)}, moments, alike).times
    counts = {(alike.get(name, name), len(times)) for name, times in found.items()}
    assert len(counts) == len({group for group, _ in counts})
    assert all(len(set(times)) == len(times) <= moments for times in found.values())


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
    schedule = make_schedule(graph(), whole, machine("dp=2,tp=2"), LEAN_LIMITS)
    check_legal(schedule, "unfolded")
    ran = {item.of.removesuffix("@again") for item in schedule.instructions if item.kind == "run" and item.phase == "recompute"}
    assert {name for name in ran if group.repeat_of(name) in group.left_out} == {
        name for name in whole.again if group.repeat_of(name) in group.left_out
    }


def test_strategies_of_several_plans_are_no_worse_than_of_one() -> None:
    alone = [answer(tied(plan, moments=0), None)[0] for plan in plans()]
    together = answer(tied(*plans(), moments=0), None)[0]
    assert together <= min(alone) * (1 + 1e-6)


def request(limit: int, shares: tuple[float, ...], stops_at_first: bool = False) -> CrossoverRequest:
    """A crossover with unlimited work."""
    return CrossoverRequest(limit, CROSSOVER_MOMENTS, 3, 0, unlimited(), shares, stops_at_first)


def test_crossover_fits_in_the_limit_and_learns_prices() -> None:
    _, kept, most = answer(tied(*plans()), None)
    limit = int(0.8 * most)
    found, prices = solve_restricted(space(), plans(), LearnedOverlap.first(0.0), request(limit, (0.95,)), folding())
    assert found is not None and found.memory.peak <= limit < peak(kept)
    assert found.schedule.graph is graph() and prices != LearnedOverlap.first(0.0)
    check_legal(found.schedule, "fitted")


def test_crossover_of_a_draft_ends_with_the_first_plan_that_fits() -> None:
    limit, prices = int(0.8 * answer(tied(*plans()), None)[2]), LearnedOverlap.first(0.0)
    whole, draft, alone = (
        solve_restricted(space(), plans(), prices, asked, folding())
        for asked in (request(limit, (1e-6, 0.95, 0.9)), request(limit, (1e-6, 0.95, 0.9), True), request(limit, (1e-6, 0.95)))
    )
    assert draft[0] is not None and alone[0] is not None and draft[0].memory.peak <= limit
    assert draft[0].assignment == alone[0].assignment and draft[1] == alone[1] != whole[1]


@pytest.mark.slow
def test_large_folded_problem_is_solved_without_the_whole_one() -> None:
    """A plan that fits is found with the folded problem alone, and is no worse than any written by hand."""
    on, shared = machine("dp=2,tp=2"), Shared()
    limit = int(0.6 * find_plan(graph(), on).memory.peak)
    found = find_plan(
        graph(), on, memory_bytes=limit, recompute=True, time_limit=600.0, shared=shared, thresholds=Thresholds(large_entries=0)
    )
    assert set(shared.models) == {"folded"}
    assert found.memory.peak <= limit
    assert found.seconds <= min(row.seconds for row in found.baselines.values() if row.feasible)
    assert np.isfinite(found.bound_seconds) and found.bound_seconds <= found.seconds


def test_strategies_that_add_a_whole_value_to_a_partial_sum_can_be_made_again() -> None:
    """What such an operator alone reads stays whole where it is kept for the second run."""
    masked, plan, on = 0, find_baselines(space())["megatron"], machine("dp=2,tp=2")
    for op in space().graph.ops:
        for strategy in space().op_choices(op).strategies:
            if op.phase == "forward" and sum(bool(spec.partial) for spec in strategy.inputs) > 1:
                changed = replace(plan, strategies={**plan.strategies, op.name: strategy})
                model = build_model(space().restricted_to_plans((changed,)), recompute_times=1)
                problem, _ = model.problem(None, InSequence())
                found = solve(problem, time_limit=inf, gap=1e-3)
                assert found.choices is not None, (op.name, strategy)
                answer = decode_assignment(model, model.expand(found.choices))
                check_legal(make_schedule(space().graph, answer, on, LEAN_LIMITS), "the test")
                masked += 1
                break
    assert masked > 4
