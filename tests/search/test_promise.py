"""What plans take in sequence, and which changes of one come first."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

import pytest

from autopar.schedule import AGAIN
from autopar.schedule.ordering import Prices
from autopar.schedule.passes import ordered
from autopar.search.baselines import find_baselines
from autopar.search.changes import moves, splits
from autopar.search.moving import _promising
from autopar.search.promise import Work
from autopar.search.recompute import POLICIES, recompute
from autopar.search.tuning import best_schedule
from tests.graphs import random_graph
from tests.search.test_moving import space_of


@pytest.mark.parametrize("seed", range(3))
def test_a_plan_takes_in_sequence_what_its_list_does(seed: int) -> None:
    """Second runs included; of what changes make of it as well, as long as all its runs are read and no two reshards are the same."""
    graph = random_graph(seed, layers=3, batch=16, width=16)
    space = space_of(graph)
    work, compared = Work(space), 0
    for plan in find_baselines(space)[0].values():
        again = recompute(graph, plan, POLICIES["full"](graph) or [op.name for op in graph.ops if op.phase == "forward"][:3], space.machine)
        found = best_schedule(graph, again, space.machine, "adamw", 2**62, tries=0)
        changed = (change(again) for change in chain(moves(space, found), splits(space, found)))
        for one in (plan, again, *(made for made in changed if made is not None)):
            listed = ordered(graph, one, space.machine)
            if len(listed.layouts) == len(one.layouts) and all(name + AGAIN in listed.operations for name in one.again):
                assert work.seconds(one) == pytest.approx(sum(item.seconds for item in listed.instructions))
                compared += 1
    assert compared > 20


@pytest.mark.parametrize("seed", range(3))
def test_plans_of_one_code_have_lists_that_take_the_same(seed: int) -> None:
    """Seconds and memory, under limits that let calls be shared and set operators aside; and many changes of a plan come to the same."""
    graph = random_graph(seed, layers=3, batch=16, width=16)
    space = space_of(graph)
    work, known, changed = Work(space), dict[int, tuple[float, int]](), 0
    for plan in find_baselines(space)[0].values():
        again = recompute(graph, plan, [op.name for op in graph.ops if op.phase == "forward"][:3], space.machine)
        found = best_schedule(graph, again, space.machine, "adamw", 2**62, tries=0)
        for one in (change(again) for change in chain(moves(space, found), splits(space, found))):
            if one is not None:
                made = best_schedule(graph, one, space.machine, "adamw", 2**62, tries=0)
                took = made.seconds, made.memory.peak
                assert known.setdefault(work.done(one).code, took) == pytest.approx(took)
                changed += 1
    assert len(set(known.values())) <= len(known) < 0.9 * changed


@pytest.mark.parametrize("seed", range(3))
def test_lists_after_the_first_are_as_the_first(seed: int) -> None:
    """With the prices that earlier lists of the graph asked for, of other plans."""
    graph = random_graph(seed, layers=2, batch=16, width=16)
    space = space_of(graph)
    prices = Prices(graph, space.machine)
    for plan in find_baselines(space)[0].values():
        found = best_schedule(graph, plan, space.machine, "adamw", 2**62, tries=0)
        for one in (plan, *(made for change in moves(space, found) if (made := change(plan)) is not None)):
            shared, alone = ordered(graph, one, space.machine, prices), ordered(graph, one, space.machine)
            assert shared.instructions == alone.instructions
            assert (shared.values, shared.collectives, shared.cuts) == (alone.values, alone.collectives, alone.cuts)


def test_what_was_asked_for_is_not_new() -> None:
    """Under the same; nor is another plan that takes the same: on two axes alike a tensor may be split over either."""
    graph = random_graph(1, layers=1, batch=16, width=16)
    space = space_of(graph)
    work, plan = Work(space), find_baselines(space)[0]["fsdp"]
    assert work.is_new(plan, "some limits")
    assert work.is_new(plan, "others")
    assert not work.is_new(replace(plan), "others")
    found = best_schedule(graph, plan, space.machine, "adamw", 2**62, tries=0)
    other = next(one for change in moves(space, found) if (one := change(plan)) is not None and work.done(one) != work.done(plan))
    assert work.is_new(other, "others")


def test_what_adds_nothing_to_be_done_comes_first() -> None:
    """Of a plan that fits, each change is among the first or among the others; of one that does not, all are among the first."""
    graph = random_graph(1, layers=3, batch=16, width=16)
    space = space_of(graph)
    work = Work(space)
    plan = find_baselines(space)[0]["fsdp"]
    found = best_schedule(graph, plan, space.machine, "adamw", 2**62, tries=0)

    def made(limit: int, less: bool) -> list[float]:
        changes = chain(moves(space, found), splits(space, found))
        some = (change(plan) for change in _promising(changes, work, found, limit, less))
        return [work.seconds(one) for one in some if one is not None]

    every = [one for change in chain(moves(space, found), splits(space, found)) if (one := change(plan)) is not None]
    first, others = made(found.memory.peak, less=True), made(found.memory.peak, less=False)
    assert first
    assert others
    assert len(first) + len(others) == len(every)
    assert max(first) <= work.seconds(plan) * (1 + 1e-9) < min(others)
    assert len(made(found.memory.peak - 1, less=True)) == len(every)
    assert not made(found.memory.peak - 1, less=False)
