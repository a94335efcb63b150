"""The bound of one rank with the memory of all, against every set of second runs and against plans on meshes."""

from __future__ import annotations

import math

import pytest

from autopar.effort import unlimited
from autopar.schedule import make_schedule, memory, step_seconds
from autopar.schedule.instructions import LEAN_LIMITS
from autopar.search.baselines.checkpointing import apply_policies
from autopar.search.baselines.recipes import find_baselines
from autopar.search.bounds.aggregated_memory import aggregated_memory_bound
from autopar.search.bounds.surrogate import floor_of_space
from autopar.search.choices.pins import Pins
from autopar.search.choices.space import Space
from autopar.search.ilp.build import build_model
from autopar.search.ilp.decode import decode_assignment
from autopar.solvers import solve
from tests.search.small_graphs import small_machine
from tests.search.test_again import chain, drawn, every_set, one_rank
from tests.search.test_folding import folding, graph, machine


@pytest.mark.parametrize("seed", [None, *range(6)], ids=str)
def test_no_set_of_second_runs_is_below_it(seed: int | None) -> None:
    some, on = (chain(4), one_rank()) if seed is None else (drawn(seed), small_machine(seed, "x=1"))
    space = Space(some, on, "sgd", Pins())
    plain = build_model(space)
    choices = solve(plain.problem(None)[0], time_limit=math.inf).choices
    assert choices is not None
    base = decode_assignment(plain, choices)
    sets = list(every_set(some, base, on))
    floor, raised = floor_of_space(space, None), 0
    for limit in sorted({peak for _, peak in sets}):
        best = min(seconds for seconds, peak in sets if peak <= limit)
        bound = aggregated_memory_bound(space, None, limit, unlimited())
        assert bound <= best * (1 + 1e-9)
        raised += bound > floor * 1.001
    assert raised or seed is not None, "where memory is short something has to be made again"


@pytest.mark.parametrize("mesh", [pytest.param("dp=4", marks=pytest.mark.slow), "dp=2,tp=2"])
def test_no_plan_on_a_mesh_is_below_it(mesh: str) -> None:
    on = machine(mesh)
    space, small = (Space(some, on, "adamw", Pins()) for some in (graph(), folding().graph))
    for name in ("ddp", "fsdp"):
        for _, leaner in apply_policies(graph(), find_baselines(space)[name], on):
            schedule = make_schedule(graph(), leaner, on, LEAN_LIMITS)
            bound = aggregated_memory_bound(small, folding(), memory(schedule, "adamw").peak, unlimited())
            assert bound <= step_seconds(schedule, "adamw")


def test_folded_layers_say_the_same() -> None:
    on = machine("dp=2,tp=2")
    whole, small = (Space(some, on, "adamw", Pins()) for some in (graph(), folding().graph))
    limit = int(0.7 * memory(make_schedule(graph(), find_baselines(whole)["fsdp"], on, LEAN_LIMITS), "adamw").peak)
    free, tied = aggregated_memory_bound(whole, None, limit, unlimited()), aggregated_memory_bound(small, folding(), limit, unlimited())
    assert free > floor_of_space(whole, None) * 1.001, "memory is short"
    assert free * 0.98 <= tied <= free * (1 + 1e-3), "a bound on layers left free"
