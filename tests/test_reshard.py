"""Every reshard is right in value, and none is dearer than it need be."""

from __future__ import annotations

import importlib
import itertools
import json
import math
import random
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import autopar
from autopar.cost_models import Figures, Link, Machine, Mesh, SubAxis, load_hardware
from autopar.errors import FileError, SpecError, UsageError
from autopar.reshard import Reshard, find_reshard, has_way
from autopar.sharding import ShardingSpec, splits
from tests.reshard_cases import CASES, Case, all_specs, box, exhaustive, gather_then_slice, machine, scatter, simulate
from tests.strategies import specs

MESHES = ("2", "4", "6", "2x2", "2x4", "4x2", "2x3")


def spec(text: str) -> ShardingSpec:
    return ShardingSpec.parse(text)


def check_pair(shape: tuple[int, ...], source: ShardingSpec, target: ShardingSpec, on: Machine) -> None:
    """Runs the plan on every rank; compares with the target's blocks, and its price with gather-then-slice."""
    value = np.arange(1, 1 + math.prod(shape)).reshape(shape)
    plan = find_reshard(shape, 8, source, target, on)
    assert plan is not None
    got = simulate(plan, on.mesh, scatter(value, source, on.mesh))
    if target.partial:
        done = find_reshard(shape, 8, target, ShardingSpec(target.dims), on)
        assert done is not None
        got, target = simulate(done, on.mesh, got), ShardingSpec(target.dims)
    for block, expected in zip(got, scatter(value, target, on.mesh), strict=True):
        np.testing.assert_array_equal(block, expected)
    plain = gather_then_slice(shape, 8, plan.source, plan.target, on)
    assert plan.seconds <= plain * (1 + 1e-9)
    assert plan.seconds == pytest.approx(sum(step.seconds for step in plan.steps))


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("latency", [0.0, 20.0, 1e6])
def test_every_pair_on_every_small_mesh(mesh: str, latency: float) -> None:
    on = machine(mesh, latency)
    shape = (24, 24)
    specs = all_specs(shape, on.mesh.sizes)
    for source, target in itertools.product(specs, specs):
        check_pair(shape, source, target, on)


@pytest.mark.parametrize("mesh", ["2x2x2", "2x4x2", "8x2", "3x4"])
def test_sampled_pairs_on_larger_meshes(mesh: str) -> None:
    on = Machine(Mesh.parse(mesh), load_hardware("v100"))
    shape = (16, 48, 8)
    specs = all_specs(shape, on.mesh.sizes)
    sample = random.Random(0)
    for _ in range(60):
        source, target = sample.choice(specs), ShardingSpec(sample.choice(specs).dims)
        check_pair(shape, source, target, on)


def chunks(extent: int, sizes: Sequence[int]) -> np.ndarray:
    """The elements of a dim that is cut by axes of these sizes, -1 where its parts are filled up; shape [parts, of the largest]."""
    parts = [np.arange(extent)]
    for size in sizes:
        parts = [part[place * -(-len(part) // size) :][: -(-len(part) // size)] for part in parts for place in range(size)]
    return np.array([np.pad(part, (0, len(parts[0]) - len(part)), constant_values=-1) for part in parts])


def filled(block: np.ndarray, leg: Reshard) -> np.ndarray:
    """What a rank holds as it travels: dims that are whole with every part where equal ones would be, parts filled up at their end."""
    for dim, extent in enumerate(leg.shapes[0].sent):
        if block.shape[dim] == leg.shape[dim] < extent:
            at = chunks(leg.shape[dim], [leg.mesh.sizes[axis] for axis in leg.target.dims[dim]]).ravel()
            shape = [len(at) if other == dim else 1 for other in range(block.ndim)]
            block = np.where((at >= 0).reshape(shape), np.take(block, at, dim), 0.0)
        block = np.pad(block, [(0, extent - block.shape[dim] if other == dim else 0) for other in range(block.ndim)])
    return block


def cut(block: np.ndarray, leg: Reshard, rank: int) -> np.ndarray:
    """The target, of what came."""
    for dim, extent in enumerate(leg.target.own_shape(leg.shape, leg.mesh.sizes, leg.mesh.coordinates(rank))):
        if block.shape[dim] > extent == leg.shape[dim]:
            at = chunks(extent, [leg.mesh.sizes[axis] for axis in leg.source.dims[dim]]).ravel()
            block = block.take(np.flatnonzero(at >= 0), dim)
        block = block.take(range(extent), dim)
    return block


@pytest.mark.parametrize("mesh", ["2", "3", "4", "2x2", "2x3", "3x2", "2x4", "2x2x2"])
@pytest.mark.parametrize("shape", [(7, 6), (5, 4, 3)])
def test_unequal_parts_travel_as_large_as_the_largest(shape: tuple[int, ...], mesh: str) -> None:
    on = machine(mesh, 1.0)
    sizes, draw = on.mesh.sizes, random.Random(0)
    specs = all_specs(shape, sizes, uneven=True)
    pairs = [(source, ShardingSpec(target.dims)) for source in specs for target in specs if not target.partial]
    for source, target in draw.sample(pairs, min(len(pairs), 300)):
        plan = find_reshard(shape, 4, source, target, on)
        assert plan is not None
        value = np.arange(math.prod(shape), dtype=float).reshape(shape)
        blocks = scatter(value, source, on.mesh)
        assert blocks[0].shape == max(block.shape for block in blocks) == source.local_shape(shape, sizes)
        for leg in plan.legs or (plan,):
            if leg.padded != shape:
                blocks = [filled(block, leg) for block in blocks]
            blocks = [cut(block, leg, rank) for rank, block in enumerate(simulate(leg, on.mesh, blocks))]
        for rank, block in enumerate(blocks):
            np.testing.assert_allclose(block, value[box(target, shape, on.mesh, rank)], err_msg=f"{source} -> {target} on {mesh}")
        assert sum(step.received_bytes_per_rank for step in plan.steps) == pytest.approx(plan.received_bytes_per_rank)


def test_what_is_not_moved_is_not_filled_up() -> None:
    reduced = find_reshard((7, 6), 4, spec("S0 R +P1"), spec("S0 R"), machine("2x2"))
    assert reduced is not None and [step.kind for step in reduced.steps] == ["all_reduce"]
    assert reduced.padded == (7, 6) and reduced.shapes[0].sent == (4, 6) and reduced.steps[0].full_bytes == 4 * 6 * 4
    gathered = find_reshard((7, 6), 4, spec("S0 R"), spec("R R"), machine("2x2"))
    assert gathered is not None and gathered.padded == (8, 6) and gathered.steps[0].full_bytes == 8 * 6 * 4
    assert (gathered.shapes[0].came, gathered.shapes[0].target) == ((8, 6), (7, 6))


def test_axes_alike_stand_for_each_other() -> None:
    on = Machine(Mesh.parse("2x2x2"), load_hardware("v100"))
    for one, other in (("S0 R S12", "S1 S0 R"), ("R S2 +P0 +P1", "S0 S2"), ("S201 R R", "R S1 R"), ("R R +P1", "S1 R")):
        source, target = spec(one), spec(other)
        shape = (16, 48, 8)[: len(source.dims)]
        first = find_reshard(shape, 8, source, target, on)
        assert first is not None
        for names in itertools.permutations(range(3)):
            check_pair(shape, source.renamed(names), target.renamed(names), on)
            again = find_reshard(shape, 8, source.renamed(names), target.renamed(names), on)
            assert again is not None
            assert sorted((step.kind, step.seconds) for step in again.steps) == sorted((step.kind, step.seconds) for step in first.steps)


@pytest.mark.parametrize("reduction", ["max", "min"])
def test_other_reductions(reduction: str) -> None:
    on = machine("2x2", 1.0)
    for source in all_specs((8, 8), (2, 2), reduction):
        for target in splits((8, 8), (2, 2)):
            check_pair((8, 8), source, target, on)


@pytest.mark.parametrize(
    ("source", "target", "way"),
    [
        ("R +P0", "S0", True), ("S1 +P0", "S1 +P0", True), ("R +P0max", "R", True), ("R", "R +P1", True), ("R +P0", "R +P0 +P1", True),
        ("R", "R +P1max", False), ("R +P0max", "R +P0", False), ("R +P0 +P1max", "R", False), ("R +P0 +P1max", "R +P0", False),
        ("R +P0 +P1max", "R +P0 +P1max", True),
    ],
)  # fmt: skip
def test_whether_there_is_a_way(source: str, target: str, way: bool) -> None:
    """As planning it finds, but for the planning."""
    assert has_way(spec(source), spec(target)) is way
    assert (find_reshard((8,), 4, spec(source), spec(target), machine("2x2")) is not None) is way


def test_reductions_that_do_not_commute_are_not_mixed() -> None:
    on = machine("2x2")
    assert find_reshard((8,), 4, spec("R +P0 +P1max"), spec("R"), on) is None
    assert find_reshard((8,), 4, spec("R +P0 +P1max"), spec("R +P0"), on) is None
    same = find_reshard((8,), 4, spec("R +P0 +P1max"), spec("R +P0 +P1max"), on)
    assert same is not None and same.steps == ()


def test_a_whole_value_is_made_partial_for_nothing() -> None:
    plan = find_reshard((8,), 4, spec("R"), spec("R +P1"), machine("2x2"))
    assert plan is not None and plan.seconds == 0 and [step.kind for step in plan.steps] == ["mask"]
    assert find_reshard((8,), 4, spec("R"), spec("R +P1max"), machine("2x2")) is None


def test_a_scalar_is_reduced() -> None:
    plan = find_reshard((), 4, spec("+P0"), spec(""), machine("2x2"))
    assert plan is not None and [step.kind for step in plan.steps] == ["all_reduce"]


def test_slicing_is_free() -> None:
    plan = find_reshard((8, 8), 4, spec("S0 R"), spec("S0 S1"), machine("2x4", 5.0))
    assert plan is not None and plan.seconds == 0.0 and [step.kind for step in plan.steps] == ["slice"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.mesh}: {case.source} -> {case.target}")
def test_bytes_of_published_pairs(case: Case) -> None:
    source, target = spec(case.source), spec(case.target)
    shape = (256,) * len(source.dims)
    plan = find_reshard(shape, 4, source, target, machine(case.mesh), fine=True)
    assert plan is not None
    assert plan.received_bytes_per_rank / (math.prod(shape) * 4) <= case.best + 5e-5  # published with four digits


@pytest.mark.parametrize("latency", [0.0, 40.0, 300.0])
@pytest.mark.parametrize("mesh", ["4", "2x2", "2x3"])
def test_equals_exhaustive_search(mesh: str, latency: float) -> None:
    on = machine(mesh, latency, x=Link(2 * latency, 0.25))
    shape = (12, 12)
    specs = all_specs(shape, on.mesh.sizes)
    for source, target in itertools.product(specs, specs):
        plan = find_reshard(shape, 4, source, target, on)
        if plan is not None:
            assert plan.seconds == pytest.approx(exhaustive(shape, 4, source, target, on), rel=1e-9), (str(source), str(target))


GROWING = Link(
    5.0,
    1.0,
    "ring",
    3.0,
    (("all_gather", Figures(30.0, 2.0, "tree", 20.0)), ("permute", Figures(60.0, 0.5)), ("all_to_all", Figures(2.0, 0.7, "ring", 40.0))),
)
"""A link on which every kind has a price of its own, and one all-gather of two axes may cost more than two."""


@pytest.mark.parametrize("mesh", ["4", "2x2", "2x3"])
@pytest.mark.parametrize("other", [GROWING, Link(9.0, 0.3, "tree"), Link(1.0, 0.1)], ids=["alike", "slow", "slow but near"])
def test_equals_exhaustive_search_by_kind_and_size(mesh: str, other: Link) -> None:
    on, shape = machine(mesh, x=other, y=GROWING), (12, 12)
    specs = all_specs(shape, on.mesh.sizes)
    for source, target in itertools.product(specs, specs):
        plan = find_reshard(shape, 4, source, target, on)
        if plan is not None:
            assert plan.seconds == pytest.approx(exhaustive(shape, 4, source, target, on), rel=1e-9), (str(source), str(target))


@pytest.mark.parametrize(
    ("mesh", "hardware"), [("2x8", "h100-sxm"), ("4x4", "h100-sxm"), ("2x8", "v100"), ("4x8", "h100-sxm"), ("2x2x8", "h100-sxm")]
)
def test_coarse_cuts_lose_nothing_against_prime_ones(mesh: str, hardware: str, monkeypatch: pytest.MonkeyPatch) -> None:
    planning, cuts = (importlib.import_module(f"autopar.reshard.{name}") for name in ("planning", "cuts"))
    on, shape = Machine(Mesh.parse(mesh), load_hardware(hardware)), (64, 256)
    specs = all_specs(shape, on.mesh.sizes)
    sample = random.Random(1)
    pairs = [(sample.choice(specs), ShardingSpec(sample.choice(specs).dims)) for _ in range(12)]
    found = [planning.find_reshard.__wrapped__(shape, 2, *pair, on, fine=True).seconds for pair in pairs]
    monkeypatch.setattr(planning, "cuts", lambda machine, unused, fine: (cuts.prime_cut(machine),))
    exact = [planning.find_reshard.__wrapped__(shape, 2, *pair, on, fine=True).seconds for pair in pairs]
    assert found == pytest.approx(exact, rel=1e-9)


THREE = specs((16, 8), (2, 4))


@settings(max_examples=300)
@given(THREE, THREE, THREE, st.sampled_from([0.0, 10.0, 100.0, 1e4]))
def test_a_detour_is_never_cheaper(one: ShardingSpec, two: ShardingSpec, three: ShardingSpec, latency: float) -> None:
    on = machine("2x4", latency, x=Link(3 * latency, 0.1))
    first, second, direct = (find_reshard((16, 8), 4, *pair, on) for pair in ((one, two), (two, three), (one, three)))
    reduced_and_made_partial_again = set(one.partial) & set(three.partial) - set(two.partial)  # not looked for: it serves nothing
    if first is not None and second is not None and not reduced_and_made_partial_again:
        assert direct is not None
        assert direct.seconds <= (first.seconds + second.seconds) * (1 + 1e-9)


def test_small_tensors_take_fewer_collectives() -> None:
    """A swap of a tiny tensor is one gather more than it is bytes: with high latency one collective must do."""
    fast = find_reshard((64, 64), 4, spec("S0 S1"), spec("S1 S0"), machine("4x2", 0.0))
    slow = find_reshard((64, 64), 4, spec("S01 R"), spec("S1 R"), machine("2x4", 1e6))
    assert fast is not None and len(fast.steps) == 2
    assert slow is not None and [step.kind for step in slow.steps] == ["all_gather", "slice"]


def test_permute_stays_in_the_group_it_is_priced_for() -> None:
    on = machine("2x2x2")
    plan = find_reshard((8, 8), 4, spec("S1 S2"), spec("S2 S1"), on)
    assert plan is not None
    [step] = plan.steps
    assert step.axes == (SubAxis(1, 1, 2), SubAxis(2, 1, 2))
    assert all(on.mesh.coordinates(rank)[0] == on.mesh.coordinates(source)[0] for rank, source in enumerate(step.sources))


def test_communication_model_is_the_bare_formula() -> None:
    on = machine("4", 1.0, 1.0)
    full = 64 * 4
    expected = {("S0", "R"): 1 + 3 / 4 * full, ("R +P0", "R"): 1 + 2 * 3 / 4 * full, ("R +P0", "S0"): 1 + 3 / 4 * full}
    for (source, target), seconds in expected.items():
        plan = find_reshard((64,), 4, spec(source), spec(target), on)
        assert plan is not None and plan.seconds == seconds
    moved = find_reshard((8, 8), 4, spec("S0 R"), spec("R S0"), on)
    assert moved is not None and moved.seconds == 1 + 3 / 4 * full / 4


def test_table_reads_well() -> None:
    plan = autopar.reshard((64, 64), "float32", {"dp": 2, "tp": 8}, "S0 S1", "S1 S0", "h100-sxm")
    text = str(plan)
    assert text.splitlines()[0] == "S0 S1 -> S1 S0  (64x64, 4 bytes each, mesh dp=2,tp=8)"
    assert "total" in text.splitlines()[-1]


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"dtype": "float31"}, UsageError, "float31"),
        ({"mesh": "dp"}, UsageError, "'dp'"),
        ({"hardware": "abacus"}, UsageError, "abacus"),
        ({"source": "S0"}, SpecError, "1 dims"),
        ({"source": "S7 R"}, SpecError, "axis 7"),
        ({"shape": (1, 4)}, SpecError, "size 1"),
        ({"shape": (-2, 4)}, UsageError, "-2"),
        ({"target": "R R +P1max"}, SpecError, "partial"),
        ({"source": "Q R"}, SpecError, "'Q'"),
    ],
)
def test_mistakes_are_named_and_hinted(change: dict[str, object], error: type[Exception], words: str) -> None:
    good = {"shape": (8, 8), "dtype": "float32", "mesh": "dp=2,tp=4", "source": "S0 R", "target": "R R", "hardware": "h100-sxm"}
    with pytest.raises(error) as caught:
        autopar.reshard(**{**good, **change})
    assert words in str(caught.value) and "\nhint: " in str(caught.value)


def test_broken_hardware_file_is_a_file_error(tmp_path) -> None:
    (tmp_path / "broken.toml").write_text("name = 'x'\n")
    with pytest.raises(FileError, match="memory_bytes"):
        autopar.reshard((8,), "float32", "2", "S0", "R", tmp_path / "broken.toml")


SHARDY_PART = re.compile(r'"(\w+)"(?::\(\d+\)(\d+))?')


def shardy_bytes(steps: list[str], block: float, sizes: dict[str, int]) -> float:
    """Fraction of the tensor that each rank receives in Shardy's steps, from blocks of this fraction."""
    total = 0.0
    for step in steps:
        parts = math.prod(int(size) if size else sizes[name] for name, size in SHARDY_PART.findall(step))
        if step.startswith("all_slice"):
            block /= parts
        elif step.startswith("all_gather"):
            total += (parts - 1) * block
            block *= parts
        elif step.startswith("all_to_all"):
            total += (parts - 1) / parts * block
        else:
            assert step.startswith("collective_permute"), step
            total += block
    return total


def test_receives_no_more_than_shardy(shared: Path) -> None:
    """Its test cases on one mesh, between specs in whole axes."""
    cases = json.loads((shared / "facts" / "shardy_reshard_cases.json").read_text())["cases"]
    compared = 0
    for case in cases:
        sizes = {name: int(size) for name, size in re.findall(r'"(\w+)"=(\d+)', case["src_mesh"])}
        if case["src_mesh"] != case["dst_mesh"] or not sizes or not case["src"] or ":(" in case["src"] + case["dst"]:
            continue
        number = {name: axis for axis, name in enumerate(sizes)}
        source, target = (
            ShardingSpec(tuple(tuple(number[name] for name in re.findall(r'"(\w+)"', dim)) for dim in re.findall(r"\{([^}]*)\}", side)))
            for side in (case["src"], case["dst"])
        )
        shape = tuple(case["shape"])
        if source.problem(shape, tuple(sizes.values())) or target.problem(shape, tuple(sizes.values())):
            continue  # a dim of one element; Shardy pads it
        if not (source.is_even(shape, tuple(sizes.values())) and target.is_even(shape, tuple(sizes.values()))):
            continue  # other parts than Shardy's
        plan = find_reshard(shape, 1, source, target, machine(",".join(f"{name}={size}" for name, size in sizes.items())), fine=True)
        assert plan is not None
        block = math.prod(source.local_shape(shape, tuple(sizes.values()))) / math.prod(shape)
        theirs = shardy_bytes(case["steps"], block, sizes)
        assert plan.received_bytes_per_rank / math.prod(shape) <= theirs * (1 + 1e-9), case["case"]
        compared += 1
    assert compared >= 30
