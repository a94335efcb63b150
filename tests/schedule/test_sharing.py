"""share: equal reshards of one phase are made once."""

from __future__ import annotations

from autopar.graph import Phase
from autopar.schedule import Assignment, Layout
from autopar.schedule.ordering import order
from autopar.schedule.passes import default_limits
from autopar.schedule.sharing import share
from autopar.sharding import ShardingSpec
from tests.assignments import random_assignment
from tests.graphs import machine
from tests.schedule.cases import graph_of

R, S0, S1 = (ShardingSpec.parse(text) for text in ("R R", "S0 R", "R S0"))


def layout(value: str, spec: ShardingSpec, source: str = "w", phase: Phase = "forward") -> Layout:
    return Layout(value, "w", source, spec, phase, "reader")


def shared(*layouts: Layout, **reads: str) -> Assignment:
    return share(Assignment({}, {}, layouts, {(reader, 0): value for reader, value in reads.items()}))


def test_equal_reshards_are_one_and_all_read_it() -> None:
    found = shared(layout("one", R), layout("two", R), layout("three", S1), a="one", b="two", c="three")
    assert [item.value for item in found.layouts] == ["one", "three"]
    assert found.reads == {("a", 0): "one", ("b", 0): "one", ("c", 0): "three"}


def test_what_was_made_from_a_dropped_one_is_made_from_the_one_that_stays() -> None:
    """And becomes equal to what another was made of it."""
    chain = (layout("one", R), layout("two", R), layout("x", S1, "one"), layout("y", S1, "two"))
    found = shared(*chain, a="x", b="y")
    assert [(item.value, item.source) for item in found.layouts] == [("one", "w"), ("x", "one")]
    assert found.reads == {("a", 0): "x", ("b", 0): "x"}


def test_the_order_of_layouts_does_not_matter() -> None:
    """A layout may be listed before what it is made from."""
    chain = (layout("y", S1, "two"), layout("x", S1, "one"), layout("two", R), layout("one", R))
    found = shared(*chain, a="x", b="y")
    assert [item.value for item in found.layouts] == ["two", "y"]
    assert set((found.reads or {}).values()) == {"y"}


def test_phases_sources_and_specs_are_kept_apart() -> None:
    kept = (layout("f", R), layout("b", R, phase="backward"), layout("s", S0), layout("v", R, "s"))
    assert shared(*kept).layouts == kept


def test_what_is_shared_is_started_once() -> None:
    """On random assignments: no two parts move the same value to the same spec in one phase, and only fewer bytes move than before."""
    graph, where = graph_of("gpt2"), machine("x=2,y=2")
    fewer = 0
    for seed in range(4):
        apart = random_assignment(graph, where, seed)
        schedules = [order(graph, assignment, where, default_limits(where)) for assignment in (apart, share(apart))]
        moves = [(p.source, p.layout.spec, p.layout.phase, p.number) for call in schedules[1].calls for p in call.parts]
        assert len(moves) == len(set(moves))
        before, after = (sum(call.received_bytes for call in schedule.calls) for schedule in schedules)
        assert after <= before
        fewer += after < before
    assert fewer, "some assignment has something to share"
