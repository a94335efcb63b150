"""The limit search: which limits of the passes are tried for an assignment, and what is kept."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.cost_models import Machine, Mesh, load_hardware
from autopar.schedule import Limits, Schedule, limit_search, memory, simulated, step_seconds
from autopar.schedule.in_place import assign_in_place
from autopar.schedule.instructions import LEAN_LIMITS
from autopar.schedule.legality import check_legal
from autopar.schedule.limit_ladders import cap_ladder
from autopar.schedule.limit_search import LimitSearch, best_schedule
from autopar.schedule.passes import default_limits
from autopar.schedule.scheduled_plan import Sample
from autopar.schedule.settings import LIMIT_LADDERS, NEAREST_RUNGS
from autopar.search.baselines.recipes import find_baselines
from autopar.search.choices.pins import Pins
from autopar.search.choices.space import Space
from tests.assignments import random_assignment
from tests.graphs import random_graph
from tests.schedule.cases import hardware_of


def space() -> Space:
    graph = random_graph(8, layers=12, batch=64, width=32)
    return Space(graph, Machine(Mesh.parse("x=2,y=2"), load_hardware("h100-sxm"), "roofline"), "adamw", Pins())


@pytest.mark.parametrize("limit", [1, 4096, 2**20, 7 * 2**30, 2**62])
def test_values_tried_are_within_the_memory_there_is(limit: int) -> None:
    for ladder in LIMIT_LADDERS.values():
        found = cap_ladder(ladder, limit)
        assert max(found) <= max(limit, 1)
        assert list(found) == sorted(found)
        assert found == ladder or ladder[-1] > limit


def test_of_little_that_is_sent_there_are_calls_of_a_part() -> None:
    """Where all values fit in the smallest bucket there is but nothing: fewer calls than values, and more than one."""
    machine = Machine(Mesh.parse("x=4"), load_hardware("cpu-cluster"), "roofline")
    on = Space(random_graph(7, layers=12, batch=256, width=128), machine, "adamw", Pins())
    plan = find_baselines(on)["fsdp"]
    search = LimitSearch(plan, (Sample(1.0, on.graph, plan),), on.machine, "adamw", 2**62)
    found = search.run(None, 100)
    assert 1 < found.schedule.limits.bucket_bytes < search.effective_bytes["bucket_bytes"]
    values = [sum(call.kind == "all_gather" for call in schedule.calls) for schedule in (search.samples[0][1].first, found.schedule)]
    assert 1 < values[1] < values[0]
    one = best_schedule(on.graph, plan, on.machine, "adamw", 2**62, tries=0)
    assert found.placed_seconds < 0.97 * one.placed_seconds


def test_of_little_models_the_same_limits_are_tried_whatever_memory_there_is() -> None:
    """As long as that is enough: what is found with much memory is found with no more than it holds."""
    on = space()
    plan = find_baselines(on)["fsdp"]

    def tried(limit: int) -> dict[str, list[int]]:
        search = LimitSearch(plan, (Sample(1.0, on.graph, plan),), on.machine, "adamw", limit)
        return {name: list(search.ladder(name)) for name in LIMIT_LADDERS}

    free = tried(2**62)
    most = max(value for values in free.values() for value in values)
    assert 1 < most < 2**20, "a little model"
    assert tried(most) == free
    assert tried(most - 1) == {name: [value for value in values if value < most] for name, values in free.items()} != free


def test_a_list_that_comes_again_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its plan has the limits under which it came, and the memory and times of a list that is measured alone."""
    on, measured = space(), list[Schedule]()

    def noted(schedule: Schedule) -> Schedule:
        measured.append(schedule)
        return assign_in_place(schedule)

    monkeypatch.setattr(limit_search, "assign_in_place", noted)
    plan = find_baselines(on)["ddp"]
    search = LimitSearch(plan, (Sample(1.0, on.graph, plan),), on.machine, "adamw", 2**62)
    limits = default_limits(on.machine)
    for aside in (limits.aside_bytes, limits.aside_bytes + 1):
        placed = search.samples[0][1].under(replace(limits, aside_bytes=aside))
        found = search._measure(placed.limits, [(1.0, placed)], 1.0, 1.0)
        alone = assign_in_place(replace(placed))
        assert found.limits.aside_bytes == found.schedule.limits.aside_bytes == aside
        assert found.schedule == alone and found.slots == simulated(alone) and found.memory == memory(alone, "adamw")
        assert found.memory.optimizer > 0 and found.memory.peak == memory(alone, "none").peak + found.memory.optimizer
    assert len(measured) == 1


def test_what_takes_as_long_as_its_operators_is_tuned_no_further() -> None:
    on = space()
    samples = (Sample(1.0, on.graph, find_baselines(on)["ddp"]),)
    tuned, left = (LimitSearch(samples[0].assignment, samples, on.machine, "adamw", 2**62) for _ in range(2))
    found = tuned.run(None, 100)
    share = 1 - tuned.operator_seconds / found.seconds
    assert 0.0 < share < 1.0
    near = left.run(None, 100, gain=1.01 * (1 - left.operator_seconds / left.try_limits(found.schedule.limits)))
    assert len(left.tried) < len(tuned.tried)
    assert near.seconds <= found.seconds * 1.02


def test_calls_are_joined_as_far_as_they_fit() -> None:
    """Where all in one bucket do not fit, some in each do: far fewer calls than values."""
    on = space()
    plan = find_baselines(on)["fsdp"]
    free, lean = (
        best_schedule(on.graph, plan, on.machine, "adamw", limit, start=start, tries=0)
        for limit, start in ((2**62, None), (1, LEAN_LIMITS))
    )
    limit = (free.memory.peak + lean.memory.peak) // 2
    found = best_schedule(on.graph, plan, on.machine, "adamw", limit, tries=24)
    assert found.memory.peak <= limit
    assert len(found.schedule.collectives) < 0.7 * len(lean.schedule.collectives)
    assert found.seconds < 0.9 * lean.seconds


def test_of_what_fits_under_no_limits_the_leanest_alone_is_looked_at() -> None:
    on = space()
    plan = find_baselines(on)["ddp"]
    samples = (Sample(1.0, on.graph, plan),)
    least = LimitSearch(plan, samples, on.machine, "adamw", 1).least_bytes
    short, enough = (LimitSearch(plan, samples, on.machine, "adamw", limit) for limit in (least - 1, least))
    assert short.run(None, tries=24).memory.peak >= least and short.tried == {LEAN_LIMITS}
    assert enough.run(None, tries=24).memory.peak >= least and len(enough.tried) > 1


@pytest.mark.parametrize("name", ["ddp", "fsdp", "zero2", "megatron"])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.7, 1.0, 2.0])
def test_the_best_plan_fits_and_is_the_fastest_that_does(name: str, share: float) -> None:
    on = space()
    plan = find_baselines(on)[name]
    free, lean = (
        best_schedule(on.graph, plan, on.machine, "adamw", limit, start=start, tries=0)
        for limit, start in ((2**62, None), (1, LEAN_LIMITS))
    )
    limit = int(lean.memory.peak + share * (free.memory.peak - lean.memory.peak))
    search = LimitSearch(plan, (Sample(1.0, on.graph, plan),), on.machine, "adamw", limit)
    found = search.run(None, tries=24)
    assert found.memory.peak <= limit
    assert found.memory == memory(found.schedule, "adamw")
    for limits in search.tried:
        one = best_schedule(on.graph, plan, on.machine, "adamw", limit, start=limits, tries=0)
        assert one.memory.peak > limit or found.placed_seconds <= one.placed_seconds * (1 + 1e-9)


def test_beyond_a_rung_that_trails_none_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    on = space()
    plan = find_baselines(on)["fsdp"]
    search = LimitSearch(plan, (Sample(1.0, on.graph, plan),), on.machine, "adamw", 2**62)
    try_limits = search.try_limits
    trailing = []

    def worse_below(limits: Limits) -> float:
        seconds = try_limits(limits)
        trailing.append(limits.ahead_bytes) if limits.ahead_bytes < begun else None
        return seconds * 2 if limits.ahead_bytes < begun else seconds

    begun = search.effective_bytes["bucket_bytes"] // 4
    monkeypatch.setattr(search, "try_limits", worse_below)
    search.run(Limits(ahead_bytes=begun), tries=100)
    assert search.best is not None and search.best.limits.ahead_bytes >= begun
    assert set(trailing) == {begun // 2}, "less is not tried"
    assert {limits.ahead_bytes for limits in search.tried} > {2 * begun, 4 * begun}, "more is"


def test_what_trails_and_gains_little_has_no_other_limits_tried() -> None:
    on = space()
    plan = find_baselines(on)["fsdp"]
    samples = (Sample(1.0, on.graph, plan),)
    alone, beside = (LimitSearch(plan, samples, on.machine, "adamw", 2**62) for _ in range(2))
    best = alone.run(None, tries=24)
    trailing = beside.run(None, tries=24, incumbent_seconds=best.seconds / 1.2)
    assert beside.tried < alone.tried
    assert len({limits.ahead_bytes for limits in beside.tried}) == 1 + NEAREST_RUNGS
    assert len({(limits.bucket_bytes, limits.aside_bytes) for limits in beside.tried}) == 1
    assert trailing.seconds >= best.seconds


def test_calls_are_reordered_in_the_end_where_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """And where the plan does not trail by much."""
    graph, on = random_graph(8, layers=4, batch=64, width=32), Machine(Mesh.parse("x=4,y=2"), hardware_of(True), "roofline")
    gained = 0
    for seed in range(4):
        plan = random_assignment(graph, on, seed)
        search, full = (LimitSearch(plan, (Sample(1.0, graph, plan),), on, "adamw", 2**62) for _ in range(2))
        found, placed = search.run(None, 0), search.best
        assert placed is not None and found.seconds <= placed.seconds
        assert found.seconds == pytest.approx(step_seconds(found.schedule, "adamw"))
        assert found.placed_seconds == placed.seconds
        check_legal(found.schedule, "the search")
        assert full.run(None, 0, incumbent_seconds=placed.seconds / 1.2) is full.best
        if found is not placed:
            gained += 1
            with monkeypatch.context() as patched:
                larger = replace(found.memory, peak=2**63)
                patched.setattr("autopar.schedule.limit_search.memory", lambda *_, larger=larger: larger)
                assert full.run(None, 0) is full.best
    assert gained
