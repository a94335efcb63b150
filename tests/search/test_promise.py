"""What plans take in sequence, and which changes of one come first."""

from __future__ import annotations

from itertools import chain

import pytest

from autopar.schedule import AGAIN
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
