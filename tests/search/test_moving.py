"""Changes of a plan one at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, islice, pairwise

import pytest

from autopar.graph import Graph
from autopar.schedule import Assignment, make_schedule, memory
from autopar.schedule.freeing import free
from autopar.schedule.liveness import held
from autopar.search import moving
from autopar.search.baselines import find_baselines
from autopar.search.changes import Change, kept_for_backward, moves, splits, with_part_kept
from autopar.search.moving import _held_at_peak, _improved, improve, lighten
from autopar.search.pins import Pins
from autopar.search.promise import Work
from autopar.search.recompute import POLICIES, recompute
from autopar.search.space import Space
from autopar.search.tuning import LEAN, Timed, best_schedule
from cost_models import Machine, Mesh, load_hardware
from tests.graphs import random_graph

MESH = "x=2,y=2"


def space_of(graph: Graph) -> Space:
    return Space(graph, Machine(Mesh.parse(MESH), load_hardware("h100-sxm"), "roofline"), "adamw", Pins())


def changes_of(space: Space, plan: Assignment) -> Iterator[Change]:
    found = best_schedule(space.graph, plan, space.machine, "adamw", 2**62, tries=0)
    return chain(moves(space, found), splits(space, found))


@pytest.mark.parametrize("seed", range(4))
def test_what_every_change_makes_is_a_plan(seed: int) -> None:
    """One change upon the other, each is legal after every pass; an input lies as the change says, and its gradient with it."""
    graph = random_graph(seed, layers=3, batch=16, width=16)
    space = space_of(graph)
    plans = list(find_baselines(space)[0].values())[: 2 + seed % 2]
    for plan in plans:
        made, left = 0, []
        for number, change in enumerate(changes_of(space, plan)):
            changed = change(plan) if number % 7 == seed else None
            if changed is not None:
                schedule = make_schedule(graph, changed, space.machine, LEAN)
                named = {item.name: item.tensor for item in graph.inputs}
                leaves = [schedule.specs[value] for output, value in schedule.outputs if output.kind == "output"]
                assert left in ([], leaves), "outputs leave as before"
                left = leaves
                for output, value in schedule.outputs:
                    if output.kind == "gradient":
                        assert schedule.specs[value] == changed.inputs[named[output.name]]
                plan, made = changed, made + 1
        assert made >= 10


def test_of_what_backward_reads_a_part_is_kept() -> None:
    """Each on its own and all together: legal, gathered for backward, and with less in memory between the halves of the step."""
    graph = random_graph(0, layers=4, batch=16, width=16)
    space = space_of(graph)
    plain = find_baselines(space)[0]["megatron"]
    names = kept_for_backward(graph)
    assert names

    def between(plan: Assignment) -> int:
        schedule = make_schedule(graph, plan, space.machine, LEAN)
        last = max(place for place, item in enumerate(schedule.instructions) if item.half == "forward")
        return held(schedule, "none")[last]

    cut = [plan for name in names if (plan := with_part_kept(space, plain, name)) is not None]
    assert cut
    assert all(between(plan) <= between(plain) for plan in cut)
    every = plain
    for name in names:
        every = with_part_kept(space, every, name) or every
    assert between(every) < between(plain)


def test_what_fits_goes_on_to_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where bytes over the limit count so little that the first way ends beyond it."""
    graph = random_graph(2, layers=2, batch=64, width=32)
    space = space_of(graph)
    plan = find_baselines(space)[0]["fsdp"]
    limit = memory(make_schedule(graph, plan, space.machine, LEAN), "adamw").peak

    def tune(plan: Assignment) -> Timed:
        return best_schedule(graph, plan, space.machine, "adamw", limit, tries=0)

    begin = tune(plan)
    assert _improved(space, begin, limit, tune, math.inf, None, 0.0, Work(space)).memory.peak > limit
    monkeypatch.setattr(moving, "OVER", 0.0)
    found = improve(space, begin, limit, tune, math.inf)
    assert found.memory.peak <= limit
    assert found.seconds <= begin.seconds


def test_second_runs_come_and_go() -> None:
    """Without its second runs again, a plan is what it was, in time and in memory."""
    graph = random_graph(2, layers=4, batch=16, width=16)
    space = space_of(graph)
    plain = find_baselines(space)[0]["ddp"]
    plan = recompute(graph, plain, POLICIES["full"](graph) or [op.name for op in graph.ops if op.phase == "forward"][:3], space.machine)
    assert plan.again
    while plan.again:
        for change in changes_of(space, plan):
            changed = change(plan)
            if changed is not None and changed.again < plan.again:
                plan = changed
                break
        else:
            raise AssertionError("no change takes a second run away")
    one, other = (make_schedule(graph, some, space.machine, LEAN) for some in (plain, plan))
    assert len(one.instructions) == len(other.instructions)
    assert memory(one, "adamw").peak == memory(other, "adamw").peak


@pytest.mark.parametrize("seed", [1, pytest.param(3, marks=pytest.mark.slow), pytest.param(8, marks=pytest.mark.slow)])
def test_a_plan_is_improved_within_the_limit(seed: int) -> None:
    graph = random_graph(seed, layers=2, batch=64, width=32)
    space = space_of(graph)
    written = find_baselines(space)[0]

    def timed(plan: Assignment, limit: int) -> Timed:
        return best_schedule(graph, plan, space.machine, "adamw", limit, tries=0)

    for name, share in (("fsdp", 1.0), ("ddp", 0.8)):
        limit = int(share * timed(written[name], 2**62).memory.peak)
        begin = timed(written[name], limit)
        found = improve(space, begin, limit, lambda plan, limit=limit: timed(plan, limit), float("inf"))  # type: ignore[misc]
        assert found.memory.peak <= limit
        assert found.seconds < begin.seconds * 0.98 or begin.memory.peak > limit
        guided = improve(space, begin, limit, lambda plan, limit=limit: timed(plan, limit), float("inf"), found.assignment)  # type: ignore[misc]
        assert guided.memory.peak <= max(limit, begin.memory.peak)
        assert guided.seconds <= begin.seconds or begin.memory.peak > limit
        allowed = {name: {begin.assignment.inputs[name], spec} for name, spec in found.assignment.inputs.items()}
        assert all(spec in allowed[name] for name, spec in guided.assignment.inputs.items())


def test_changes_are_compared_as_they_are_scheduled() -> None:
    """With the plan they change under the same limits, not with what became of that when calls were reordered."""
    graph = random_graph(1, layers=2, batch=64, width=32)
    space = space_of(graph)
    begin = best_schedule(graph, find_baselines(space)[0]["fsdp"], space.machine, "adamw", 2**62, tries=0)
    hurried = replace(begin, seconds=0.5 * begin.seconds)
    found = moving._swept(space, hurried, chain(moves(space, begin), splits(space, begin)), 2**62, math.inf, math.inf, Work(space))
    assert found.assignment != begin.assignment and found.seconds < 0.98 * begin.seconds


def test_the_first_that_a_call_gathers_lie_whole_together() -> None:
    graph = random_graph(1, layers=4, batch=16, width=16)
    space = space_of(graph)
    found = best_schedule(graph, find_baselines(space)[0]["zero1"], space.machine, "adamw", 2**62, tries=0)
    gathered = {part.layout.tensor for call in found.schedule.calls if call.kind == "all_gather" for part in call.parts}
    before = found.assignment.inputs
    plans = [change(found.assignment) for change in moves(space, found)]
    moved = [{name for name, spec in plan.inputs.items() if spec != before[name]} for plan in plans if plan is not None]
    together = [names for names in moved if len(names) > 1]
    assert together and all(names <= gathered for names in together)
    for one, other in pairwise(sorted(together, key=len)):
        assert one <= other


@pytest.mark.parametrize("seed", range(3))
def test_a_plan_without_a_limit_is_changed_until_it_fits(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is legal after every pass; where bytes are cheap it keeps what it has."""
    graph = random_graph(seed, layers=4, batch=16, width=64)
    space = space_of(graph)
    begin = best_schedule(graph, find_baselines(space)[0]["ddp"], space.machine, "adamw", 2**62, tries=0)
    limit = int(0.75 * begin.memory.peak)
    found = lighten(space, begin, limit, math.inf)
    assert found.memory.peak <= limit
    assert make_schedule(graph, found.assignment, space.machine, found.schedule.limits).instructions == free(found.schedule).instructions
    monkeypatch.setattr(moving, "DEARER", (1e-6,))
    cheap = lighten(space, begin, limit, math.inf)
    assert cheap.memory.peak > limit
    assert cheap.seconds <= found.seconds


def test_of_what_is_held_at_the_peak_less_is_held() -> None:
    graph = random_graph(0, layers=4, batch=64, width=32)
    space = space_of(graph)
    found = best_schedule(graph, find_baselines(space)[0]["ddp"], space.machine, "adamw", 2**62, tries=0)
    full = _held_at_peak(found)
    assert full and full <= frozenset(graph.tensors)
    every = sum(1 for _ in chain(moves(space, found), splits(space, found)))
    some = sum(1 for _ in chain(moves(space, found, full), splits(space, found, full)))
    assert 0 < some < every


def test_of_what_takes_as_long_that_is_kept_which_holds_less(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = random_graph(1, layers=2, batch=16, width=16)
    space = space_of(graph)
    begin = best_schedule(graph, find_baselines(space)[0]["fsdp"], space.machine, "adamw", 2**62, tries=0)
    holds = {number: begin.memory.peak + more for number, more in enumerate((8, -8, 0, -16))}
    made = (change(begin.assignment) for change in changes_of(space, begin.assignment))
    tried = list(islice((one for one in made if one is not None), len(holds)))
    assert len(tried) == len(holds)

    def schedule_below(graph: Graph, plan: Assignment, *given: object) -> Timed:
        held = next((holds[number] for number, one in enumerate(tried) if one is plan), begin.memory.peak)
        return replace(begin, assignment=plan, memory=replace(begin.memory, peak=held))

    monkeypatch.setattr(moving, "schedule_below", schedule_below)
    changes = [lambda plan, one=one: one for one in tried]
    found = moving._swept(space, begin, changes, 2**62, math.inf, math.inf, Work(space))
    assert found.assignment is tried[3]
    assert moving._swept(space, begin, changes[:3], 2**62, math.inf, math.inf, Work(space)).assignment is tried[1]
    assert moving._swept(space, begin, changes[:1], 2**62, math.inf, math.inf, Work(space)) is begin
