"""Bounds: never above an optimum, equal to what is known of some chains, and over all cuts no more than over each."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given, settings

from autopar.solvers.pipeline import Mode, PipelineProblem, solve_pipeline
from autopar.solvers.pipeline.bounds import (
    AllCuts,
    bound_cut,
    bound_memory,
    bound_sections,
    bound_total,
    bound_total_chunks,
    bound_trips,
    round_up,
    step_unit,
)
from autopar.solvers.pipeline.chain import make_chain
from autopar.solvers.pipeline.exact_orders import OrderSearch
from autopar.solvers.pipeline.intervals import Intervals
from tests.solvers.pipeline.problems import all_cuts, shortest_order, shortest_step
from tests.strategies import pipelines


def mixes_of(problem, cut):
    ends = list(itertools.accumulate(cut))
    intervals = Intervals(problem)
    return itertools.product(*(intervals.mixes(begin, end) for begin, end in zip((0, *ends), ends, strict=False)))


def equal(layers, devices, microbatches, **more):
    return PipelineProblem(((Mode(1, 2, held=1),),) * layers, devices, microbatches, **more)


@settings(max_examples=60)
@given(pipelines(layers=5, devices=3, microbatches=3))
def test_no_bound_is_above_the_shortest_order(problem):
    search, least = OrderSearch(problem), math.inf
    for cut in itertools.islice(all_cuts(len(problem.layers), problem.total_chunks), 6):
        for mixes in itertools.islice(mixes_of(problem, cut), 4):
            costs = [mix.cost for mix in mixes]
            plain = tuple((c.forward, c.backward, c.weights, c.held, c.rest) for c in costs)
            optimum = shortest_order(problem, plain, math.inf)
            bound = bound_cut(problem, costs)
            assert bound <= optimum * (1 + 1e-9)
            assert math.isinf(bound) == math.isinf(optimum)
            if math.isfinite(bound):
                assert bound * (1 - 1e-9) <= search.load(make_chain(problem, costs)) <= optimum * (1 + 1e-9)
                least = min(least, optimum)
    assert AllCuts(problem).bound() <= least * (1 + 1e-9)


@settings(max_examples=100)
@given(pipelines())
def test_the_bound_over_all_cuts_is_at_most_that_of_each(problem):
    over_all = AllCuts(problem).bound()
    for cut in itertools.islice(all_cuts(len(problem.layers), problem.total_chunks), 40):
        for mixes in itertools.islice(mixes_of(problem, cut), 8):
            bound = bound_cut(problem, [mix.cost for mix in mixes])
            assert over_all <= round_up(bound, step_unit(problem)) * (1 + 1e-9)


@settings(max_examples=60)
@given(pipelines(chunked=False, modes=False))
def test_the_greedy_bound_is_the_least_over_the_cuts(problem):
    """One chunk a device and one mode a layer, W not split, no limit: bisection misses nothing. Elsewhere it may be lower."""
    least = min(bound_cut(problem, [mix.cost for mix in mixes]) for cut in all_cuts(len(problem.layers), problem.devices)
                for mixes in mixes_of(problem, cut))  # fmt: skip
    found = AllCuts(problem).bound()
    if problem.split or problem.limit is not None:
        assert found <= round_up(least, step_unit(problem)) * (1 + 1e-9)
    else:
        assert found == pytest.approx(round_up(least, step_unit(problem)), rel=1e-9)


def test_a_stage_that_can_take_no_layer_leaves_it_to_the_next():
    """The least cut puts one layer on each of the first three devices; greedily the second would have none that fits."""
    layers = [Mode(1, 1), Mode(0.5, 2.5), Mode(1.5, 1.5, held=1, rest=1), Mode(1.5, 3, held=2), Mode(2, 2)]
    problem = PipelineProblem(tuple((layer,) for layer in layers), 4, 2, transfer=1, limit=2)
    assert AllCuts(problem).bound() <= solve_pipeline(problem).step == 36


def test_equal_stages_meet_the_bound_of_the_last():
    """1F1B on equal stages without transfers: m t + (p - 1)(f + b)."""
    stages = [Mode(2, 4)] * 4
    problem = PipelineProblem(tuple((stage,) for stage in stages), 4, 8)
    assert bound_sections(problem, stages) == 8 * 6 + 3 * 6 == 66


def test_each_bound_is_the_larger_somewhere():
    problem = equal(3, 3, 4, limit=1)
    stages = [Mode(1, 2, held=1)] * 3
    assert bound_memory(problem, stages) == 4 * 9 > max(bound_sections(problem, stages), bound_trips(problem, stages))
    uneven = [Mode(1, 4), Mode(1, 1), Mode(1, 1)]
    free = equal(3, 3, 2)
    assert bound_trips(free, uneven) == 9 + 4 and bound_trips(free, uneven) > bound_sections(free, uneven)


@pytest.mark.parametrize(("layers", "devices", "bound"), [(8, 2, 54.86), (16, 2, 109.71)])
def test_the_closed_form_of_all_cuts(layers, devices, bound):
    assert bound_total(3.0 * layers, devices, 4) == pytest.approx(bound, abs=0.005)
    assert bound_total(3.0 * layers, devices, 4) <= AllCuts(equal(layers, devices, 4)).bound()


@pytest.mark.parametrize("seed", range(40))
def test_the_bound_with_chunks_is_below_every_cut_and_order(seed):
    chance = random.Random(seed)
    devices = chance.randint(1, 2)
    layers = tuple((Mode(chance.randint(0, 3), chance.randint(0, 4)),) for _ in range(chance.randint(2 * devices, 5)))
    problem = PipelineProblem(layers, devices, chance.randint(1, 3), chunks=2)
    work = sum(mode.forward + mode.backward for (mode,) in layers)
    assert bound_total_chunks(work, devices, problem.microbatches, 2) <= shortest_step(problem) * (1 + 1e-9)


def test_the_bound_with_chunks_is_that_without_where_there_is_one_and_more_than_a_share_of_the_work():
    assert bound_total_chunks(3.0, 8, 16, 1) == pytest.approx(bound_total(3.0, 8, 16))
    assert 16 * 3.0 / 8 < bound_total_chunks(3.0, 8, 16, 4) < bound_total_chunks(3.0, 8, 16, 2) < bound_total(3.0, 8, 16)


def test_the_least_is_not_rounded_for_layers_may_take_more():
    """Three layers of 4 seconds on two devices, two microbatches. All steps are whole seconds until a layer takes a little more."""
    problem = equal(3, 2, 2)
    assert AllCuts(problem).least() < AllCuts(problem).bound() == math.ceil(AllCuts(problem).least())
    longer = PipelineProblem(((Mode(1.25, 2.125),),) * 3, 2, 2)
    assert AllCuts(problem).least() <= AllCuts(longer).least() <= shortest_step(longer)


def test_steps_are_multiples_of_a_unit():
    assert step_unit(equal(4, 2, 2, transfer=0.02)) == 0.02
    assert round_up(62.7, 3.0) == 63.0 and round_up(63.0 + 1e-9, 3.0) == 63.0 and round_up(62.7, 0.0) == 62.7
    third = PipelineProblem(((Mode(1 / 3, 1),),), 1, 1)
    assert step_unit(third) == 0.0


def test_many_layers_of_next_to_no_seconds_count():
    """Each takes less than a rounding of the others, all of them more."""
    layers = ((Mode(1, 1),), *[(Mode(9e-10, 9e-10),)] * 100) * 5
    problem = PipelineProblem(layers, 2, 3)
    assert AllCuts(problem).bound() <= solve_pipeline(problem, time_limit=600.0).step
