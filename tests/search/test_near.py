"""Meshes of three axes searched from plans of merged axes, near the best so far, against the search over all choices."""

import math
from dataclasses import replace
from typing import Any

import pytest

from autopar.cost_models import Machine, Mesh, load_hardware
from autopar.errors import InfeasibleError
from autopar.graph import Graph, GraphInput, GraphOutput, Op, Ref, Tensor
from autopar.rules import find_rule, strategies
from autopar.schedule import Limits
from autopar.schedule.limit_search import LimitSearch, best_schedule
from autopar.schedule.scheduled_plan import Sample, ScheduledPlan
from autopar.search import Thresholds, find_plan
from autopar.search.choices.pins import Pins
from autopar.search.choices.space import Space
from autopar.search.coarsening.merged_axes import axis_merges
from autopar.search.coarsening.one_axis import one_axis_neighbourhood
from autopar.search.settings import PROOF
from autopar.sharding import Blocks, ShardingSpec
from tests.search.small_graphs import small_graph, small_machine

SEEDS = [*range(4), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 16))]
UNLIMITED = 2**62
ROOM = 1 + 1e-9
ALONE = ((2, 1, 1), (1, 2, 1), (1, 1, 2))
"""Sizes under which a spec is what one axis has of it."""


@pytest.fixture(scope="module")
def four_axes() -> Machine:
    return Machine(Mesh.parse("a=2,b=1,c=3,d=2,e=4"), load_hardware("h100-sxm"))


def test_neighbouring_axes_are_merged_in_every_way(four_axes: Machine) -> None:
    found = [(str(item.machine.mesh), item.members) for item in axis_merges(four_axes, 2)]
    assert found == [("a=2,c_d_e=24", ((0,), (2, 3, 4))), ("a_c=6,d_e=8", ((0, 2), (3, 4))), ("a_c_d=12,e=4", ((0, 2, 3), (4,)))]


def test_a_spec_of_merged_axes_and_back(four_axes: Machine) -> None:
    merging = list(axis_merges(four_axes, 2))[1]
    assert str(merging.spec(ShardingSpec.parse("S1 R +P0max"))) == "S34 R +P0max +P2max"
    assert str(merging.spec(ShardingSpec.parse("R S10"))) == "R S3402"
    pins = merging.pins(Pins({"x": ShardingSpec.parse("S34 S02")}, {"output:0": ShardingSpec.parse("R S3402")}))
    assert pins is not None and str(pins.inputs["x"]) == "S1 S0" and str(pins.outputs["output:0"]) == "R S10"
    assert merging.pins(Pins({"x": ShardingSpec.parse("S3 R")})) is None, "a part of a merged axis"


def test_an_axis_that_the_model_itself_names_is_not_merged(four_axes: Machine) -> None:
    merging, *_, last = axis_merges(four_axes, 2)
    assert merging.pins(Pins(on_axes={"op": ((0, 0), (2, 1))})) is None
    kept, renumbered = merging.pins(Pins(on_axes={"op": ((0, None),)})), last.pins(Pins(on_axes={"op": ((4, 0),)}))
    assert kept is not None and kept.on_axes == {"op": ((0, None),)}
    assert renumbered is not None and renumbered.on_axes == {"op": ((1, 0),)}


def test_collectives_inside_of_operators_run_over_all_that_is_merged(four_axes: Machine) -> None:
    """A split softmax on merged axes is one of the mesh itself."""
    op = Op("y", "aten._softmax.default", ("x",), ("y",), (Ref(0), -1, False))
    tensors = {name: Tensor(name, (96, 96), "float32") for name in "xy"}
    rule, own = find_rule(op, tensors), [tensors["x"], tensors["y"]]
    there = set(strategies(rule, own, four_axes.mesh.sizes))
    tried = 0
    for merging in axis_merges(four_axes, 2):
        for strategy in strategies(rule, own, merging.machine.mesh.sizes):
            tried += bool(strategy.inner)
            assert replace(merging.strategy(strategy), factors=()) in {replace(other, factors=()) for other in there}
    assert tried


@pytest.mark.parametrize("seed", range(4))
def test_around_a_plan_one_axis_is_used_otherwise(seed: int) -> None:
    graph, machine = small_graph(seed), small_machine(seed, "2x2x2")
    space, found = Space(graph, machine, "adamw", Pins()), find_plan(graph, machine, memory_bytes=UNLIMITED, baselines=False)
    assert found.scheduled_plan is not None
    plan = found.scheduled_plan.assignment
    around, more = one_axis_neighbourhood(space, [plan]), 0
    for op in graph.ops:
        mine, offered = plan.strategies[op.name], around.op_choices(op).strategies
        assert mine in offered
        for other in space.op_choices(op).strategies:
            pairs = [*zip(mine.inputs, other.inputs, strict=True), *zip(mine.outputs, other.outputs, strict=True)]
            axes = sum(any(one.normalized(ALONE[axis]) != two.normalized(ALONE[axis]) for one, two in pairs) for axis in range(3))
            more += other in offered and axes == 1
            assert (other in offered) == (axes <= 1 or other == mine), (op.name, mine, other)
    assert more or not graph.ops


FROM_MERGED_AXES = Thresholds(coarse_entries=0, whole_gap=2.0)
"""Thresholds under which three axes are searched from plans of merged axes, in their neighbourhoods."""
THEN_ALL = replace(FROM_MERGED_AXES, whole_gap=-1.0)
"""Thresholds under which all choices are searched after that."""


@pytest.mark.parametrize("seed", SEEDS)
def test_a_plan_of_merged_axes_is_as_good_on_the_mesh_itself(seed: int) -> None:
    graph, machine = small_graph(seed), small_machine(seed, "2x2x2")
    for merging in axis_merges(machine, 2):
        found = find_plan(graph, merging.machine, memory_bytes=UNLIMITED, baselines=False)
        assert found.scheduled_plan is not None
        assignment = merging.assignment(found.scheduled_plan.assignment)
        samples = (Sample(1.0, graph, assignment),)
        start = found.schedule.limits
        here = best_schedule(graph, assignment, machine, found.optimizer, UNLIMITED, start=start, tries=24, samples=samples)
        assert here.seconds * graph.microbatches <= found.seconds * ROOM, merging.machine.mesh


@pytest.mark.parametrize("thresholds", [FROM_MERGED_AXES, THEN_ALL], ids=["nearby", "all"])
@pytest.mark.parametrize("seed", SEEDS)
def test_plan_from_merged_axes_is_no_worse_than_theirs_and_keeps_a_true_bound(seed: int, thresholds: Thresholds) -> None:
    """The bound holds for the best over all choices. (A plan may beat the bound of the search over all choices, which knows one order of
    the axes on a dim alone: see ``sharding.ALL_ORDERS``.)"""
    graph, machine = small_graph(seed), small_machine(seed, "2x2x2")
    whole = find_plan(graph, machine, memory_bytes=UNLIMITED)
    merged = [find_plan(graph, merging.machine, memory_bytes=UNLIMITED) for merging in axis_merges(machine, 2)]
    found = find_plan(graph, machine, memory_bytes=UNLIMITED, thresholds=thresholds)
    assert found.bound_seconds <= whole.seconds * ROOM, "a bound on every plan"
    assert found.bound_seconds <= found.seconds
    assert found.seconds <= min(item.seconds for item in merged) * ROOM
    assert found.seconds <= min((item.seconds for item in found.baselines.values() if item.feasible), default=math.inf) * ROOM
    assert set(found.baselines) == set(whole.baselines)
    assert all(found.sizes[key] <= whole.sizes[key] for key in whole.sizes)
    assert thresholds is FROM_MERGED_AXES or found.sizes == whole.sizes, "all choices are in the problem"


def test_plan_below_the_bound_of_the_meshs_own_choices_reports_the_floor() -> None:
    """The plan was a warm start from merged axes, and is not called optimal for having no other bound."""
    graph, machine = small_graph(0), small_machine(0, "2x2x2")
    merged = [find_plan(graph, merging.machine, memory_bytes=UNLIMITED) for merging in axis_merges(machine, 2)]
    found = find_plan(graph, machine, memory_bytes=UNLIMITED, thresholds=THEN_ALL)
    assert found.seconds < found.own_seconds, "the case that is tried here"
    assert found.floor_seconds == found.bound_seconds <= min(item.bound_seconds for item in merged) * ROOM
    assert found.bound_seconds < found.seconds
    assert found.status == "feasible"


def test_warm_start_from_merged_axes_keeps_its_schedule_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own schedule on the mesh itself is as short, though no other limits are tried there."""
    graph, machine, run = small_graph(17), small_machine(17, "2x2x2"), LimitSearch.run
    drafts = [find_plan(graph, merging.machine, memory_bytes=UNLIMITED, baselines=False) for merging in axis_merges(machine, 2)]

    def impatient(tuning: LimitSearch, start: Limits | None, tries: int, *more: Any, **options: Any) -> ScheduledPlan:
        return run(tuning, start, 0 if tuning.machine.mesh == machine.mesh else tries, *more, **options)

    monkeypatch.setattr(LimitSearch, "run", impatient)
    found = find_plan(graph, machine, memory_bytes=UNLIMITED, thresholds=FROM_MERGED_AXES)
    assert found.seconds <= min(draft.seconds for draft in drafts) * ROOM


@pytest.mark.parametrize(("gap", "searches"), [(1.0, 1), (PROOF, 2)])
def test_no_more_merged_meshes_are_searched_than_the_gap_asks_for(gap: float, searches: int) -> None:
    graph, machine = small_graph(2), small_machine(2, "2x2x2")
    found = find_plan(graph, machine, memory_bytes=UNLIMITED, gap=gap, thresholds=Thresholds(coarse_entries=0))
    assert found.bound_seconds > 0
    assert sum(record.name == "merged axes: baselines" for record in found.trace) == searches


def test_limit_that_no_neighbour_fits_is_refused_by_the_search_over_all_choices() -> None:
    with pytest.raises(InfeasibleError, match="least"):
        find_plan(small_graph(1), small_machine(1, "2x2x2"), memory_bytes=1, thresholds=Thresholds(coarse_entries=0))


def test_all_choices_are_searched_only_with_work_and_memory_to_spare() -> None:
    graph, machine = small_graph(1), small_machine(1, "2x2x2")
    whole = find_plan(graph, machine, memory_bytes=UNLIMITED, thresholds=THEN_ALL)
    assert whole.sizes == find_plan(graph, machine, memory_bytes=UNLIMITED).sizes
    tight = find_plan(graph, machine, memory_bytes=int(1.5 * whole.memory.peak), thresholds=THEN_ALL)
    assert tight.sizes["choices"] < whole.sizes["choices"], "the best plan of merged axes holds more than half of the memory"
    hurried = find_plan(graph, machine, memory_bytes=UNLIMITED, thresholds=replace(THEN_ALL, entries_per_work=1))
    assert hurried.sizes["choices"] < whole.sizes["choices"], "all choices would take more work than is left"


def test_merged_axis_never_splits_blocks_of_a_fused_weight() -> None:
    """Two axes cannot split each block of one dim, so a merged one may not either: its plans would be nobody's."""
    blocks = Blocks(0, 3)
    tensors = {name: Tensor(name, shape, "float32") for name, shape in {"x": (8, 16), "w": (3, 16, 16), "y": (8, 3, 16)}.items()}
    contract = Op("y", "autopar.contract.default", ("x", "w"), ("y",), (Ref(0), Ref(1), "b k, n f k -> b n f"))
    inputs = (GraphInput("x", "input", "x"), GraphInput("w", "parameter", "w", trained=False, blocks=blocks))
    graph = Graph("inference", tensors, inputs, (contract,), (GraphOutput("y", "output", "y"),))
    machine = Machine(Mesh.parse("a=2,b=2,c=2"), load_hardware("h100-sxm"))
    for merging in axis_merges(machine, 2):
        space = Space(graph, merging.machine, "none", merging.pins(Pins()))
        specs = space.input_specs(inputs[1])
        assert any(any(spec.dims) for spec in specs)
        assert all(blocks.own_spec(merging.spec(spec), machine.mesh.sizes) is not None for spec in specs)
    limit = 4 * 8 * 16 + 4 * 8 * 48 + 4 * 3 * 16 * 16 // 2
    find_plan(graph, machine, memory_bytes=limit, thresholds=Thresholds(coarse_entries=0))  # the weight has to be split
