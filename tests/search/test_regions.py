"""Some operators of a plan chosen anew together: which they are, what stays as it is, and what comes of it."""

from __future__ import annotations

from random import Random

import pytest

from autopar.graph import Graph
from autopar.schedule import make_schedule, memory
from autopar.search import scarcity
from autopar.search.baselines import find_baselines
from autopar.search.regions import MANY, around, region
from autopar.search.scarcity import change_some
from autopar.search.trials import Trials
from tests.graphs import random_graph
from tests.search.test_in_less import trials as searched
from tests.search.test_moving import space_of


def reached(graph: Graph, first: str, among: frozenset[str]) -> set[str]:
    """Those of some operators that tensors which few read lead to from one of them, by way of these alone."""
    tensors = {name: {*graph.op[name].inputs, *graph.op[name].outputs} for name in among}
    few = {tensor for tensor in graph.tensors if len(graph.consumers[tensor]) < MANY}
    found, growing = set[str](), [first]
    while growing:
        name = growing.pop()
        found.add(name)
        growing += [other for other in among - found if tensors[name] & tensors[other] & few]
    return found


@pytest.mark.parametrize("seed", range(4))
def test_a_region_is_operators_that_tensors_connect(seed: int) -> None:
    """So many, or all that there are."""
    graph, draws = random_graph(seed, layers=3, batch=16, width=16), Random(seed)
    every = frozenset(op.name for op in graph.ops)
    drawn = [region(graph, 5, draws) for _ in range(20)]
    assert len(set(drawn)) > 5
    for names in drawn:
        first = min(names)
        assert reached(graph, first, names) == names
        assert len(names) == min(5, len(reached(graph, first, every)))
    assert [region(graph, 5, Random(7)) for _ in range(2)] == [region(graph, 5, Random(7))] * 2


def test_around_a_region_everything_is_as_in_the_plan() -> None:
    graph = random_graph(1, layers=3, batch=16, width=16)
    space = space_of(graph)
    plan = find_baselines(space)[0]["fsdp"]
    names = region(graph, 4, Random(0))
    part = around(space, plan, names)
    assert part.offers(plan)
    for op in graph.ops:
        offered = part.op_choices(op).strategies
        assert offered == (space.op_choices(op).strategies if op.name in names else (plan.strategies[op.name],))
    read = {tensor for name in names for tensor in graph.op[name].inputs}
    gradients = {owner for output, owner in graph.owners.items() if graph.producer[output.tensor].name in names}
    assert read | gradients
    for item in graph.inputs:
        touched = item.tensor in read | gradients
        assert part.input_specs(item) == (space.input_specs(item) if touched else (plan.inputs[item.tensor],))


def short_of_memory() -> Trials:
    """A search that knows a plan written by hand that just fits."""
    some = searched(2**62)
    plan = find_baselines(some.model.space)[0]["fsdp"]
    some.limit = memory(make_schedule(some.model.space.graph, plan, some.model.space.machine), "adamw").peak
    some.offer(some.schedule(plan, None, 0), "baseline")
    assert some.fits
    return some


def test_what_is_chosen_anew_is_kept_where_it_is_faster_and_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    some = short_of_memory()
    monkeypatch.setattr(scarcity, "IDLE_REGIONS", 12)
    before = some.best
    assert before is not None
    some.time_limit, some.bound = 1e9, 0.0
    change_some(some, 1.0)
    assert some.best is not None
    assert some.best.seconds < before.seconds
    assert some.best.memory.peak <= some.limit


def test_it_ends_where_many_regions_gave_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    some, asked = short_of_memory(), list[float]()
    some.time_limit, some.bound = 1e9, 0.0
    monkeypatch.setattr(scarcity, "IDLE_REGIONS", 7)
    monkeypatch.setattr(scarcity, "_answer", lambda trials, model, prices, limit, gap, until: asked.append(limit / trials.limit))
    change_some(some, 1.0)
    assert len(asked) == 7
    assert len(set(asked)) > 1
    assert max(asked) <= 1.0
