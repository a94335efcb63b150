"""The search against known optima and brute force; what it finds on chains of known models; what counts is work, not the clock."""

from __future__ import annotations

import itertools
import math
import os
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings

from autopar.solvers import Status
from autopar.solvers.pipeline import Mode, PipelineProblem, simulate, solve_pipeline
from autopar.solvers.pipeline import solving as solving_module
from autopar.solvers.pipeline.cut_search import CutSearch
from autopar.solvers.pipeline.incumbent import PipelineIncumbent
from autopar.solvers.pipeline.intervals import Intervals
from tests.solvers.pipeline.problems import random_pipeline, shortest_order, shortest_step
from tests.solvers.pipeline.replay import replay
from tests.strategies import pipelines

CI_CHAINS = 100
"""Random chains compared with brute force; ``AUTOPAR_CHAINS=400`` compares more."""


def chain(forward, backward, weights=None, held=0, rest=0):
    weights = weights or [0] * len(forward)
    return tuple((Mode(f, b, w, held, rest),) for f, b, w in zip(forward, backward, weights, strict=True))


def equal(layers, held=0, rest=0):
    return chain([1] * layers, [2] * layers, held=held, rest=rest)


HEAVY_HEAD = chain([1, 2, 2, 2, 2, 2, 2, 3], [0, 4, 4, 4, 4, 4, 4, 6])
KEPT_OR_AGAIN = ((Mode(1, 2, held=4), Mode(1, 3, held=1)),) * 9
THREE = chain([1] * 3, [1] * 3, [1] * 3, held=1)
FOUR = chain([1] * 4, [1] * 4, [1] * 4, held=1)
KNOWN = {
    "equal layers, more on the first stage": (PipelineProblem(equal(16), 2, 4), 111),
    "one cut of 455 is the best": (PipelineProblem(equal(16), 4, 4), 78),
    "a heavy head and transfers": (PipelineProblem(HEAVY_HEAD, 3, 4, transfer=2), 97),
    "short of memory, fewer layers first": (PipelineProblem(equal(12, held=1), 3, 4, limit=9), 81),
    "weights rest too": (PipelineProblem(equal(16, held=1, rest=2), 2, 4, limit=44), 120),
    "layers run again where memory is short": (PipelineProblem(KEPT_OR_AGAIN, 3, 4, limit=18), 60),
    "W split": (PipelineProblem(THREE, 3, 4, split=True), 14),
    "W split, two in flight": (PipelineProblem(THREE, 3, 4, split=True, limit=2), 17),
    "two chunks in a loop": (PipelineProblem(HEAVY_HEAD, 2, 4, chunks=2), 100),
    "two chunks in a v": (PipelineProblem(HEAVY_HEAD, 2, 4, chunks=2, placement="v"), 103),
    "two chunks, W split, little memory": (PipelineProblem(FOUR, 2, 3, chunks=2, split=True, limit=3), 20),
    "the same in a v": (PipelineProblem(FOUR, 2, 3, chunks=2, placement="v", split=True, limit=3), 21),
    "inference": (PipelineProblem(chain([3, 1, 2, 2, 1, 4], [0] * 6), 3, 5, transfer=1, training=False), 35),
}


@pytest.mark.parametrize(("problem", "optimum"), KNOWN.values(), ids=list(KNOWN))
def test_known_optima_are_found_and_proved(problem, optimum):
    found = solve_pipeline(problem, time_limit=600.0)
    assert (found.step, found.bound, found.status) == (optimum, optimum, Status.OPTIMAL)
    assert replay(problem, found.plan)[0] == optimum


def test_random_chains_against_brute_force():
    """Fused, split, chunks, limits, transfers, modes, inference: optimum in 95 %, at worst 2 % over, the bound never above."""
    ratios, bounds = [], []
    for seed in range(int(os.environ.get("AUTOPAR_CHAINS", CI_CHAINS))):
        problem = random_pipeline(seed)
        found = solve_pipeline(problem, time_limit=600.0)
        best = shortest_step(problem, math.inf if found.step is None else found.step)
        if found.step is None:
            assert found.status == Status.INFEASIBLE and math.isinf(best), problem.name
            continue
        step, bytes_held = replay(problem, found.plan)
        assert step == pytest.approx(found.step, rel=1e-12) and list(simulate(problem, found.plan).peak_bytes) == bytes_held
        assert found.bound <= best * (1 + 1e-9), problem.name
        ratios.append(found.step / best if best else 1.0)
        if problem.limit is None:
            bounds.append(found.bound / best if best else 1.0)
    assert sum(ratio <= 1 + 1e-9 for ratio in ratios) >= 0.95 * len(ratios)
    assert max(ratios) <= 1.02
    assert sum(bounds) / len(bounds) >= 0.97


@settings(max_examples=30)
@given(pipelines(layers=5, devices=3, microbatches=3))
def test_brute_force_needs_no_answer_to_begin_with(problem):
    """What the comparison above leaves out, on smaller chains."""
    found = solve_pipeline(problem, time_limit=600.0)
    assert shortest_step(problem) == pytest.approx(math.inf if found.step is None else found.step, rel=1e-9)


@pytest.mark.parametrize("split", [False, True])
def test_brute_force_agrees_with_every_order_written_out(split):
    """Two devices, two microbatches: all permutations of each device's operations."""
    from autopar.solvers.pipeline import PipelinePlan, parse_orders

    problem = PipelineProblem(chain([1, 2], [3, 1], [1, 2], held=1), 2, 2, transfer=0.5, split=split, limit=2)
    kinds = problem.kinds
    lines = [{" ".join(line) for line in itertools.permutations([f"{kind}{c}" for kind in kinds for _ in range(2)])} for c in range(2)]
    ordered = [[line for line in device if line.replace("0", "1").startswith("F1")] for device in lines]
    steps = [replay(problem, PipelinePlan((1, 1), (0, 0), parse_orders(list(pair)))) for pair in itertools.product(*ordered)]
    costs = tuple((m.forward, m.backward, m.weights, m.held, m.rest) for (m,) in problem.layers)
    assert shortest_order(problem, costs, math.inf) == min(step[0] for step in steps if step is not None)


def model(layers: int, head: float, devices: int, microbatches: int, limit: float | None = None) -> PipelineProblem:
    """Layers of f 1, b 2 that hold 1; an embedding of no seconds; a head in layers."""
    rows = [Mode(0, 0), *[Mode(1, 2, held=1)] * layers, Mode(head, 2 * head)]
    return PipelineProblem(tuple((row,) for row in rows), devices, microbatches, transfer=0.02, limit=limit)


@pytest.mark.parametrize(
    ("problem", "found_by_hand"),
    [
        pytest.param(model(32, 2.41, 4, 16), 480.0, id="8B, 4 devices"),
        pytest.param(model(32, 2.41, 4, 16, 32), 506.9, id="8B in the memory of 1F1B"),
        pytest.param(model(80, 1.23, 8, 64), 2145.0, id="70B, 8 devices, 64 microbatches"),
        pytest.param(model(80, 1.23, 8, 16), 672.2, id="70B, 16 microbatches", marks=pytest.mark.slow),
        pytest.param(model(80, 1.23, 8, 32, 80), 1249.9, id="70B in the memory of 1F1B", marks=pytest.mark.slow),
        pytest.param(model(126, 0.66, 16, 32), 1068.6, id="405B, 16 devices", marks=pytest.mark.slow),
    ],
)
def test_known_models_are_cut_as_well_as_a_prototype_did(problem, found_by_hand):
    begin = time.process_time()
    found = solve_pipeline(problem, time_limit=600.0)
    assert found.step <= found_by_hand + 0.05 and found.bound <= found.step
    assert time.process_time() - begin < 40


@pytest.mark.parametrize("split", [False, True])
def test_more_chunks_than_branch_and_bound_has_bits_for_are_cut_too(split):
    problem = PipelineProblem(chain([1] * 24, [2] * 24, [1] * 24), 12, 2, chunks=2, split=split)
    found = solve_pipeline(problem, work=0.05, time_limit=600.0)
    assert found.bound <= found.step == replay(problem, found.plan)[0]


def test_more_memory_or_fewer_seconds_never_cost_more():
    problem = PipelineProblem(equal(12, held=1), 3, 4, limit=8)
    steps = [solve_pipeline(replace(problem, limit=limit), time_limit=600.0).step for limit in (8, 9, 10, 12, 20, None)]
    assert steps == sorted(steps, reverse=True) and steps[0] == 84
    quicker = replace(problem, layers=((Mode(1, 1, held=1),), *problem.layers[1:]))
    assert solve_pipeline(quicker, time_limit=600.0).step <= 84


def test_the_same_work_gives_the_same_answer():
    problem = model(20, 1.5, 4, 8, 14)
    first, second = (solve_pipeline(problem, work=0.3, time_limit=600.0, seed=3) for _ in range(2))
    assert (first.plan, first.step, first.bound, first.work) == (second.plan, second.step, second.bound, second.work)
    assert not first.cut_off


def test_a_limit_that_nothing_fits_is_proved_infeasible():
    found = solve_pipeline(PipelineProblem(equal(4, held=2, rest=3), 2, 3, limit=9), time_limit=600.0)
    assert (found.status, found.plan, found.smallest_limit) == (Status.INFEASIBLE, None, 10)
    assert "within the limit 9" in found.message
    fits = PipelineProblem(equal(4, held=2, rest=3), 2, 3, limit=10)
    assert solve_pipeline(fits, time_limit=600.0).plan is not None


@pytest.mark.parametrize("unit", [1e9 / 3, 1e15 / 7])
def test_fractions_of_many_bytes_fit_as_whole_ones_do(unit):
    for limit in range(2, 9):
        whole, fractions = (solve_pipeline(PipelineProblem(chain([1] * 12, [2] * 12, held=held), 4, 3, limit=limit * held),
                                           work=0.02, time_limit=600.0) for held in (1, unit))  # fmt: skip
        assert (fractions.step, fractions.bound) == (whole.step, whole.bound)


def test_the_time_limit_cuts_off():
    found = solve_pipeline(model(80, 1.23, 8, 32), time_limit=0.05)
    assert found.cut_off and found.solve_seconds < 10


def test_ctrl_c_keeps_the_best(monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(solving_module, "improve", interrupted)
    monkeypatch.setattr(PipelineIncumbent, "done", property(lambda self: False))
    found = solve_pipeline(model(8, 1.5, 2, 4), time_limit=600.0)
    assert found.message == solving_module.INTERRUPTED and found.plan is not None


def test_a_bound_above_a_step_that_is_known_is_a_mistake():
    incumbent = PipelineIncumbent(PipelineProblem(equal(4), 2, 2), 0.0, math.inf, math.inf)
    CutSearch(incumbent, Intervals(incumbent.problem), 0).run(math.inf, 0)
    incumbent.prove(incumbent.step)
    with pytest.raises(AssertionError):
        incumbent.prove(incumbent.step + 1)


def test_progress_is_told():
    told = []
    solve_pipeline(model(8, 1.5, 2, 4), time_limit=600.0, progress=lambda *figures: told.append(figures))
    steps = [step for step, *_ in told if step is not None]
    assert steps == sorted(steps, reverse=True) and len(told) > 1
