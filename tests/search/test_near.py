"""Meshes of three axes searched from plans of merged axes, near the best so far, against the search over all choices."""

import pytest

from autopar.errors import InfeasibleError
from autopar.search import find_plan, finding
from autopar.search.merging import mergings
from autopar.search.pins import Pins
from autopar.search.tuning import Sample, best_schedule
from autopar.sharding import ShardingSpec
from cost_models import Machine, Mesh, load_hardware
from tests.search.small_graphs import small_graph, small_machine

SEEDS = [*range(4), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 16))]
UNLIMITED = 2**62
ROOM = 1 + 1e-9


@pytest.fixture(scope="module")
def four_axes() -> Machine:
    return Machine(Mesh.parse("a=2,b=1,c=3,d=2,e=4"), load_hardware("h100-sxm"))


def test_neighbouring_axes_are_merged_in_every_way(four_axes: Machine) -> None:
    found = [(str(item.machine.mesh), item.words) for item in mergings(four_axes, 2)]
    assert found == [("a=2,c_d_e=24", ((0,), (2, 3, 4))), ("a_c=6,d_e=8", ((0, 2), (3, 4))), ("a_c_d=12,e=4", ((0, 2, 3), (4,)))]


def test_a_spec_of_merged_axes_and_back(four_axes: Machine) -> None:
    merging = list(mergings(four_axes, 2))[1]
    assert str(merging.spec(ShardingSpec.parse("S1 R +P0max"))) == "S34 R +P0max +P2max"
    assert str(merging.spec(ShardingSpec.parse("R S10"))) == "R S3402"
    pins = merging.pins(Pins({"x": ShardingSpec.parse("S34 S02")}, {"output:0": ShardingSpec.parse("R S3402")}))
    assert pins is not None and str(pins.inputs["x"]) == "S1 S0" and str(pins.outputs["output:0"]) == "R S10"
    assert merging.pins(Pins({"x": ShardingSpec.parse("S3 R")})) is None, "a part of a merged axis"


@pytest.mark.parametrize("seed", SEEDS)
def test_a_plan_of_merged_axes_is_as_good_on_the_mesh_itself(seed: int) -> None:
    graph, machine = small_graph(seed), small_machine(seed, "2x2x2")
    for merging in mergings(machine, 2):
        found = find_plan(graph, merging.machine, memory_bytes=UNLIMITED, baselines=False)
        assert found.timed is not None
        assignment = merging.assignment(found.timed.assignment)
        samples = (Sample(1.0, graph, assignment),)
        start = found.schedule.limits
        here = best_schedule(graph, assignment, machine, found.optimizer, UNLIMITED, start=start, tries=24, samples=samples)
        assert here.seconds * graph.microbatches <= found.seconds * ROOM, merging.machine.mesh


@pytest.mark.parametrize("seed", SEEDS)
def test_plans_found_nearby_keep_their_bound(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound holds for the best over all choices; no plan costs more than those of merged axes. (It may cost less than the bound of the
    search over all choices says, which knows one order of the axes on a dim alone: see ``sharding.ALL_ORDERS``.)"""
    graph, machine = small_graph(seed), small_machine(seed, "2x2x2")
    whole = find_plan(graph, machine, memory_bytes=UNLIMITED)
    merged = [find_plan(graph, merging.machine, memory_bytes=UNLIMITED) for merging in mergings(machine, 2)]
    monkeypatch.setattr(finding, "MANY", 0)
    found = find_plan(graph, machine, memory_bytes=UNLIMITED)
    assert found.bound_seconds <= whole.seconds * ROOM, "a bound on every plan"
    assert found.bound_seconds <= found.seconds
    assert found.seconds <= min(item.seconds for item in merged) * ROOM
    assert set(found.baselines) == set(whole.baselines)


def test_what_nothing_nearby_fits_is_refused_by_the_search_over_all_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finding, "MANY", 0)
    with pytest.raises(InfeasibleError, match="least"):
        find_plan(small_graph(1), small_machine(1, "2x2x2"), memory_bytes=1)
