"""Meshes of three axes searched from plans of merged axes, near the best so far, against the search over all choices."""

from dataclasses import replace
from typing import Any

import pytest

from autopar.errors import InfeasibleError
from autopar.graph import Graph, GraphInput, GraphOutput, Op, Ref, Tensor
from autopar.rules import find_rule, strategies
from autopar.schedule.tuning import Sample, best_schedule
from autopar.search import SearchResult, find_plan
from autopar.search.baselines.recipes import find_baselines
from autopar.search.choices.pins import Pins
from autopar.search.choices.space import Space
from autopar.search.coarsening.merged_axes import AxisMerge, axis_merges
from autopar.search.coarsening.one_axis import one_axis_neighbourhood
from autopar.search.driver import find_plan as finding
from autopar.search.driver import phase_table as rounds
from autopar.search.settings import PROOF
from autopar.sharding import Blocks, ShardingSpec
from cost_models import Machine, Mesh, load_hardware
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


def of_merged_axes(graph: Graph, merging: AxisMerge, monkeypatch: pytest.MonkeyPatch, **options: Any) -> SearchResult:
    """The plan that is begun from: unequal parts are those of one axis of the mesh itself."""
    with monkeypatch.context() as patch:
        patch.setattr(finding, "resolve_pins", lambda *_: merging.pins(Pins()))
        return find_plan(graph, merging.machine, memory_bytes=UNLIMITED, **options)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_plan_of_merged_axes_is_as_good_on_the_mesh_itself(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    graph, machine = small_graph(seed), small_machine(seed, "2x2x2")
    for merging in axis_merges(machine, 2):
        found = of_merged_axes(graph, merging, monkeypatch, baselines=False)
        assert found.scheduled_plan is not None
        assignment = merging.assignment(found.scheduled_plan.assignment)
        samples = (Sample(1.0, graph, assignment),)
        start = found.schedule.limits
        here = best_schedule(graph, assignment, machine, found.optimizer, UNLIMITED, start=start, tries=24, samples=samples)
        assert here.seconds * graph.microbatches <= found.seconds * ROOM, merging.machine.mesh


@pytest.mark.parametrize("wide", [2.0, -1.0])
@pytest.mark.parametrize("seed", SEEDS)
def test_plans_found_nearby_keep_their_bound(seed: int, wide: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound holds for the best over all choices; no plan costs more than those of merged axes, whether it is then looked around them or
    over all choices. (It may cost less than the bound of the search over all choices says, which knows one order of the axes on a dim
    alone: see ``sharding.ALL_ORDERS``.)"""
    graph, machine = small_graph(seed), small_machine(seed, "2x2x2")
    whole = find_plan(graph, machine, memory_bytes=UNLIMITED)
    merged = [of_merged_axes(graph, merging, monkeypatch) for merging in axis_merges(machine, 2)]
    looked, around = [], finding.one_axis_neighbourhood
    monkeypatch.setattr(finding, "one_axis_neighbourhood", lambda space, plans: (looked.append(plans), around(space, plans))[1])
    monkeypatch.setattr(finding, "COARSE_ENTRIES", 0)
    monkeypatch.setattr(finding, "WHOLE_GAP", wide)
    found = find_plan(graph, machine, memory_bytes=UNLIMITED)
    assert bool(looked) == (wide > 1)
    written = find_baselines(Space(graph, machine, found.optimizer, Pins()))[0].values()
    assert all(plan in plans for plans in looked for plan in written), "operators may be split as by hand, too"
    assert found.bound_seconds <= whole.seconds * ROOM, "a bound on every plan"
    assert found.bound_seconds <= found.seconds
    assert found.seconds <= min(item.seconds for item in merged) * ROOM
    assert set(found.baselines) == set(whole.baselines)


def test_a_plan_below_the_bound_of_the_meshs_own_choices_has_that_of_all_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was begun from on merged axes, and is not called optimal for having no other bound."""
    graph, machine = small_graph(0), small_machine(0, "2x2x2")
    merged = [of_merged_axes(graph, merging, monkeypatch) for merging in axis_merges(machine, 2)]
    monkeypatch.setattr(finding, "COARSE_ENTRIES", 0)
    monkeypatch.setattr(finding, "WHOLE_GAP", -1.0)
    found = find_plan(graph, machine, memory_bytes=UNLIMITED)
    assert found.seconds < found.own_seconds, "what is tried here"
    assert found.floor_seconds == found.bound_seconds <= min(item.bound_seconds for item in merged) * ROOM
    assert found.bound_seconds < found.seconds
    assert found.status == "feasible"


def test_a_plan_of_merged_axes_keeps_its_limits_where_it_is_begun_from(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, machine, drafts = small_graph(10), small_machine(10, "2x2x2"), []
    made, begin = finding._draft_merged_plans, rounds.Search.__init__

    def noted(*given: Any, **options: Any) -> Any:
        drafts.append(made(*given, **options))
        return drafts[-1]

    def impatient(self: rounds.Search, *given: Any) -> None:
        begin(self, *given)
        self.tries = 24 * (self.model.space.machine.mesh != machine.mesh)

    monkeypatch.setattr(finding, "COARSE_ENTRIES", 0)
    monkeypatch.setattr(finding, "WHOLE_GAP", 2.0)
    monkeypatch.setattr(finding, "_draft_merged_plans", noted)
    monkeypatch.setattr(rounds.Search, "__init__", impatient)
    found = find_plan(graph, machine, memory_bytes=UNLIMITED)
    assert found.seconds <= drafts[0][1].seconds * ROOM


@pytest.mark.parametrize(("gap", "asked"), [(1.0, 1), (PROOF, 2)])
def test_of_merged_axes_no_more_plans_are_asked_for_than_the_gap_wants(
    gap: float, asked: int, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    graph, machine, real, meshes = small_graph(2), small_machine(2, "2x2x2"), finding._search_mesh, []

    def counted(graph: Graph, machine: Machine, *more: Any) -> SearchResult:
        meshes.append(str(machine.mesh))
        return real(graph, machine, *more)

    monkeypatch.setattr(finding, "COARSE_ENTRIES", 0)
    monkeypatch.setattr(finding, "_search_mesh", counted)
    assert find_plan(graph, machine, memory_bytes=UNLIMITED, gap=gap).bound_seconds > 0
    assert len(meshes) == 1 + asked, meshes


def test_what_nothing_nearby_fits_is_refused_by_the_search_over_all_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finding, "COARSE_ENTRIES", 0)
    with pytest.raises(InfeasibleError, match="least"):
        find_plan(small_graph(1), small_machine(1, "2x2x2"), memory_bytes=1)


def test_over_all_choices_it_goes_only_with_time_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, machine, looked, around = small_graph(1), small_machine(1, "2x2x2"), [], finding.one_axis_neighbourhood
    monkeypatch.setattr(finding, "one_axis_neighbourhood", lambda space, plans: (looked.append(plans), around(space, plans))[1])
    monkeypatch.setattr(finding, "COARSE_ENTRIES", 0)
    monkeypatch.setattr(finding, "WHOLE_GAP", -1.0)
    peak = find_plan(graph, machine, memory_bytes=UNLIMITED).memory.peak
    assert not looked
    find_plan(graph, machine, memory_bytes=int(1.5 * peak))
    assert looked, "the best plan of merged axes holds more than half of the memory"
    looked.clear()
    monkeypatch.setattr(finding, "ENTRIES_PER_WORK", 1)
    find_plan(graph, machine, memory_bytes=UNLIMITED)
    assert looked, "so many choices would take more than the time limit"


def test_blocks_of_a_fused_weight_are_split_by_no_merged_axis(monkeypatch: pytest.MonkeyPatch) -> None:
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
    monkeypatch.setattr(finding, "COARSE_ENTRIES", 0)
    limit = 4 * 8 * 16 + 4 * 8 * 48 + 4 * 3 * 16 * 16 // 2
    find_plan(graph, machine, memory_bytes=limit)  # the weight has to be split
