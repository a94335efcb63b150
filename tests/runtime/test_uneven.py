"""Weights and batches in unequal parts where people train: whole values, optimizers, clipping, checkpoints, folders, loaders."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils.data import TensorDataset

import autopar
from autopar.cost_models import Machine, Mesh
from autopar.errors import AutoparError
from autopar.plan import Plan
from autopar.reshard import find_reshard
from autopar.runtime import export_program, load_safetensors
from autopar.runtime.instructions.local_steps import CUT
from autopar.runtime.ranks.placement import from_placements, gather, scatter
from autopar.schedule import Layout
from autopar.schedule.collectives import Part
from autopar.sharding import ShardingSpec
from autopar.target import Target
from autopar.verify import verify
from autopar.verify.live_memory import LiveMemory
from benchmarks.models import stressed
from tests.graphs import machine
from tests.runtime.test_training import gradients, on_ranks, same, whole


class Reader(nn.Module):
    """A vocabulary of 63, read and predicted with one weight; a part 33 wide."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(63, 18, dtype=torch.float64)
        self.norm = nn.LayerNorm(18, dtype=torch.float64)
        self.up = nn.Linear(18, 33, dtype=torch.float64)
        self.down = nn.Linear(33, 18, dtype=torch.float64)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens)
        x = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return nn.functional.cross_entropy((x @ self.tokens.weight.t()).transpose(1, 2), targets)


PINS = {
    "2x2": {"tokens.weight": "S0 S1", "up.weight": "S1 R", "up.bias": "S1", "down.weight": "R S1"},
    "a=2,b=2": {"tokens.weight": "S01 R", "up.weight": "R S01", "up.bias": "S01", "down.weight": "R S01", "input:tokens": "S01 R",
                "input:targets": "S01 R"},
    "4": {"tokens.weight": "S0 R", "up.weight": "S0 R", "up.bias": "S0", "down.weight": "R S0", "norm.weight": "S0"},
    "dp=4": {"input:tokens": "S0 R", "input:targets": "S0 R", "up.bias": "S0"},
}
"""18 over 4 is 5, 5, 5, 3; 63 over 4 is 16, 16, 16, 15; 33 over 2 is 17, 16; a batch of 6 over 4 is 2, 2, 2 and none. Over 2 and 2: 18 is
5, 4, 5, 4; 33 is 9, 8, 8, 8; 6 is 2, 1, 2, 1."""


def model(seed: int = 0) -> Reader:
    torch.manual_seed(seed)
    return Reader()


@lru_cache
def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(63, (6, 5), generator=generator), torch.randint(63, (6, 5), generator=generator)


@lru_cache
def plan_of(mesh: str) -> Plan:
    return autopar.plan(model(), batch(), mesh=mesh, hardware="cpu-cluster", constraints=PINS[mesh])


def train(module: nn.Module, steps: int, optimizer: torch.optim.Optimizer, *given: Tensor) -> list[float]:
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        value = module(*(given or batch()))
        value.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 0.1)
        optimizer.step()
        losses.append(value.item())
    return losses


@pytest.mark.parametrize("mesh", PINS)
def test_plans_check_and_run_right(mesh: str) -> None:
    plan = plan_of(mesh)
    assert {name: row.spec for name, row in plan.parameters.items() if name in PINS[mesh]} == {
        name: spec for name, spec in PINS[mesh].items() if ":" not in name
    }
    assert not list(autopar.check(plan))
    found = verify(plan, Target(model(), batch()), backend="simulate", steps=4)
    assert found.passed, found.problems


@pytest.mark.parametrize("mesh", ["dp=2", pytest.param("dp=2,tp=2", marks=pytest.mark.slow), pytest.param("tp=4", marks=pytest.mark.slow)])
def test_the_search_splits_them_where_it_pays_and_ranks_compute_what_one_device_does(mesh: str) -> None:
    plan = autopar.plan(model(), batch(), mesh=mesh, hardware=stressed())
    sizes = tuple(plan.mesh.values())
    uneven = [
        row.name for row in plan.ops for entry in row.outputs
        if not autopar.ShardingSpec.parse(entry.spec).is_even(entry.shape, sizes)
    ]  # fmt: skip
    assert uneven
    assert not list(autopar.check(plan))
    found = verify(plan, Target(model(), batch()), steps=4)
    assert found.passed, found.problems


@pytest.mark.parametrize(("first_mesh", "tokens", "bias"), [
    ("2x2", [(32, 9)] * 2 + [(31, 9)] * 2, [17, 16, 17, 16]),
    ("a=2,b=2", [(16, 18)] * 3 + [(15, 18)], [9, 8, 8, 8]),
])  # fmt: skip
def test_it_trains_saves_and_loads_on_another_mesh(
    first_mesh: str, tokens: list[tuple[int, int]], bias: list[int], tmp_path: Path
) -> None:  # fmt: skip
    wanted_model = model()
    wanted = train(wanted_model, 6, torch.optim.AdamW(wanted_model.parameters(), lr=1e-2))
    first = model()
    first(*batch()).backward()
    wanted_gradients = gradients(first)

    plan_of(first_mesh)  # made here once, not on every rank
    plan_of("4")
    def run(rank: int) -> tuple[Any, ...]:
        module = autopar.compile(model(), plan_of(first_mesh))
        right = same({name: whole(p).detach() for name, p in module.named_parameters()}, dict(model().named_parameters()))
        module(*batch()).backward()
        right = right and same(gradients(module), wanted_gradients)
        held = [tuple(p.to_local().shape) for p in (module.get_parameter("tokens.weight"), module.get_parameter("up.bias"))]
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        losses = train(module, 2, optimizer)
        states = [tuple(state["exp_avg"].to_local().shape) for state in optimizer.state.values()]
        right = right and states == [tuple(p.to_local().shape) for p in module.parameters()]
        saved = get_state_dict(module, optimizer)
        dcp.save({"model": saved[0], "optimizer": saved[1]}, checkpoint_id=tmp_path / "checkpoint")
        other = autopar.compile(model(seed=5), plan_of("4"))
        another = torch.optim.AdamW(other.parameters(), lr=1e-2)
        weights, moments = get_state_dict(other, another)
        dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=tmp_path / "checkpoint")
        set_state_dict(other, another, model_state_dict=weights, optim_state_dict=moments)
        right = right and all(torch.equal(whole(a), whole(b)) for a, b in zip(other.parameters(), module.parameters(), strict=True))
        losses += train(other, 2, another)
        saved = get_state_dict(other, another)
        dcp.save({"model": saved[0], "optimizer": saved[1]}, checkpoint_id=tmp_path / "second")
        alone = model(seed=6)
        plain = torch.optim.AdamW(alone.parameters(), lr=1e-2)
        train(alone, 1, plain)
        weights, moments = get_state_dict(alone, plain)
        dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=tmp_path / "second")
        set_state_dict(alone, plain, model_state_dict=weights, optim_state_dict=moments)
        return held, right, losses + train(alone, 2, plain)

    for rank, (held, right, losses) in enumerate(on_ranks(run, 4)):
        assert held == [tokens[rank], (bias[rank],)]
        assert right
        assert losses == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize(("source", "target"), [("R R R", "S0 S1 R"), ("R R R", "R S01 R"), ("R R R", "R S0 S1")])
def test_slices_of_unequal_parts_take_the_memory_of_their_result(source: str, target: str) -> None:
    """A part that is filled up for the steps after it is memory of its own at once."""
    place, ends = machine("2x2"), tuple(map(ShardingSpec.parse, (source, target)))
    found = find_reshard((6, 7, 16), 4, *ends, place)
    assert found is not None and found.padded != found.shape and {step.kind for step in found.steps} == {"slice"}
    layout, whole, sizes = Layout("x:0", "x", "x", ends[1], "forward", "y"), torch.randn(6, 7, 16), place.mesh.sizes
    parts = [block.clone() for block in scatter(whole, ends[0], place.mesh)]
    for rank in range(4):
        for number, (step, shapes) in enumerate(zip(found.steps, found.shapes, strict=True)):
            part = Part(layout, number, step, "x", "x:0", shapes, 4, "float32", ends[0]).on(sizes, place.mesh.coordinates(rank))
            with torch.no_grad(), LiveMemory([parts[rank]]) as memory:
                made = CUT[step.kind](part, place.mesh.index(rank, step.axes))(parts[rank])
            assert memory.peak == parts[rank].nbytes + made.untyped_storage().nbytes() == parts[rank].nbytes + made.nbytes
            assert made.is_contiguous()
            parts[rank] = made
    assert torch.equal(gather(parts, ends[1], place.mesh), whole)


def test_a_slice_that_begins_with_what_is_filled_up_has_its_rows_behind_that() -> None:
    """Of 7 rows over 2 and 3 ranks the third part is empty: the second slice of the minor axis begins with it."""
    whole, place = torch.randn(7, 4), Machine(Mesh.parse("2x3"), stressed())
    ends = ShardingSpec.parse("R R +P0"), ShardingSpec.parse("S01 R")
    found = find_reshard((7, 4), 4, *ends, place)
    assert found is not None and [step.kind for step in found.steps] == ["slice", "reduce_scatter", "permute"]
    step, shapes, filled = found.steps[0], found.shapes[0], torch.zeros(12, 4)
    for there, here, length in shapes.runs[0]:
        filled[there : there + length] = whole[here : here + length]
    part = Part(Layout("x:0", "x", "x", ends[1], "forward", "y"), 0, step, "x", "x:0", shapes, 4, "float32", ends[0])
    for index in range(3):
        assert torch.equal(CUT["slice"](part, index)(whole), filled[4 * index : 4 * index + 4])


@pytest.mark.parametrize("on", ["4", pytest.param("a=2,b=2", marks=pytest.mark.slow)])
def test_folders_and_files_hold_unequal_parts(on: str, tmp_path: Path) -> None:
    export_program(plan_of(on), model(), tmp_path / "program")
    save_file({name: parameter.detach() for name, parameter in model(seed=3).named_parameters()}, tmp_path / "other.safetensors")
    first = model()
    wanted = first(*batch())
    wanted.backward()
    wanted_gradients, other = gradients(first), model(seed=3)(*batch()).item()

    def run(rank: int) -> tuple[bool, float, float]:
        module = autopar.load_program(tmp_path / "program")
        value = module(*batch())
        value.backward()
        right = same(gradients(module), wanted_gradients)
        assert load_safetensors(module, [tmp_path / "other.safetensors"]) == []
        return right, value.item(), module(*batch()).item()

    for right, value, after in on_ranks(run, 4):
        assert right
        assert (value, after) == pytest.approx((wanted.item(), other), rel=1e-5)


@pytest.mark.parametrize(("on", "placements", "spec"), [("4", [Shard(0)], "S0 R"), ("a=2,b=2", [Shard(0), Shard(0)], "S01 R")])
def test_dtensors_cut_by_torch_are_pins_and_a_graph_runs(on: str, placements: list[Shard], spec: str) -> None:
    first = model()
    first(*batch()).backward()
    wanted_gradients = gradients(first)

    plan_of(on)  # made here once, not on every rank
    def run(rank: int) -> tuple[str, bool, bool]:
        names = ("x",) if on == "4" else ("a", "b")
        mesh = init_device_mesh("cpu", (4,) if on == "4" else (2, 2), mesh_dim_names=names)
        placed = model()
        placed.tokens.weight = nn.Parameter(distribute_tensor(placed.tokens.weight.detach(), mesh, placements))
        plan = autopar.plan(placed, batch(), mesh=on, hardware="cpu-cluster")
        module = autopar.compile(model(), plan_of(on), execute="graph")
        module(*batch()).backward()
        weight = module.get_parameter("tokens.weight")
        assert isinstance(weight, DTensor)
        alike = torch.equal(weight.to_local(), placed.tokens.weight.to_local())
        return plan.parameters["tokens.weight"].spec, alike, same(gradients(module), wanted_gradients)

    assert set(on_ranks(run, 4)) == {(spec, True, True)}


@pytest.mark.parametrize(("on", "rows"), [("dp=4", (2, 2, 2, 0)), ("a=2,b=2", (2, 1, 2, 1))])
def test_batches_in_unequal_parts(on: str, rows: tuple[int, ...]) -> None:
    wanted_model = model()
    wanted = train(wanted_model, 3, torch.optim.AdamW(wanted_model.parameters(), lr=1e-2))
    dataset = TensorDataset(*batch())

    plan_of(on)  # made here once, not on every rank
    def run(rank: int) -> tuple[Any, ...]:
        module = autopar.compile(model(), plan_of(on))
        (loaded,) = list(module.local_batch(dataset))
        held = [tuple(item.to_local().shape) for item in loaded]
        losses = train(module, 3, torch.optim.AdamW(module.parameters(), lr=1e-2), *loaded)
        own = autopar.compile(model(), plan_of(on), inputs="local")
        parts = [part[sum(rows[:rank]) : sum(rows[: rank + 1])] for part in batch()]
        own_losses = train(own, 3, torch.optim.AdamW(own.parameters(), lr=1e-2), *parts)
        with torch.no_grad():
            shorter = module(*(part[:4] for part in batch())).item()
        dist.barrier()
        try:
            own(*(part[:5] for part in batch()))
            words = ""
        except AutoparError as error:
            words = str(error)
        return held, losses, own_losses, shorter, words

    shorter = wanted_model(*(part[:4] for part in batch())).item()
    for rank, (held, losses, own_losses, short, words) in enumerate(on_ranks(run, 4)):
        assert held == [(rows[rank], 5)] * 2
        assert losses == pytest.approx(wanted, rel=1e-4)
        assert own_losses == pytest.approx(wanted, rel=1e-4)
        assert short == pytest.approx(shorter, rel=1e-4)
        assert "part of input tokens is [5, 5] here" in words
        assert "hint: parts of unequal sizes cannot change" in words


def test_microbatches_in_unequal_parts() -> None:
    """Of 12 rows each of two microbatches has 6: 2, 2, 2 and none on the ranks; a DTensor of the batch has 3 on each."""
    both = tuple(torch.cat([part, part.flip(0)]) for part in batch())
    plan = autopar.plan(model(), both, mesh="dp=4", hardware="cpu-cluster", constraints=PINS["dp=4"], microbatches=2)
    assert not list(autopar.check(plan))
    wanted_model = model()
    wanted = train(wanted_model, 2, torch.optim.AdamW(wanted_model.parameters(), lr=1e-2), *both)

    def run(rank: int) -> tuple[Any, ...]:
        losses = []
        own = tuple(part[4 * rank : 4 * rank + 4] for part in both)
        (loaded,) = list(autopar.compile(model(), plan).local_batch(TensorDataset(*both)))
        for inputs, given in (("global", both), ("global", loaded), ("local", own)):
            module = autopar.compile(model(), plan, inputs=inputs)
            losses.append(train(module, 2, torch.optim.AdamW(module.parameters(), lr=1e-2), *given))
        dist.barrier()
        try:
            module(own[0], loaded[1])
            words = ""
        except AutoparError as error:
            words = str(error)
        return losses, words

    for losses, words in on_ranks(run, 4):
        assert losses == [pytest.approx(wanted, rel=1e-4)] * 3
        assert "not split alike" in words


class Weighted(nn.Linear):
    """A loss of rows that count differently."""

    def forward(self, x: Tensor, y: Tensor, counts: Tensor) -> Tensor:
        return ((super().forward(x) - y).square().mean(1) * counts).mean()


def test_microbatches_of_inputs_that_are_split_otherwise() -> None:
    """Each rank takes its rows of all microbatches from what it holds: ``x`` is never whole on one."""
    torch.manual_seed(0)
    target = Target(Weighted(64, 4), (torch.randn(32, 64), torch.randn(32, 4), torch.rand(32)))
    pins = {"input:x": "S01 R", "input:y": "S1 R", "input:counts": "R"}
    plan = autopar.plan(target.model, target.args, mesh="2x2", hardware="cpu-cluster", constraints=pins, microbatches=2)
    assert {name: row.spec for name, row in plan.inputs.items()} == {"x": "S01 R", "y": "S1 R", "counts": "R"}
    found = verify(plan, target, steps=2)
    assert found.passed, found.problems


@pytest.mark.parametrize("on", ["2x2", "a=2,b=2"])
def test_placements_are_those_of_torch(on: str) -> None:
    plan_of(on)  # made here once, not on every rank
    def run(rank: int) -> bool:
        module = autopar.compile(model(), plan_of(on))
        mesh = module.get_parameter("tokens.weight").device_mesh
        right = True
        for name, parameter in module.named_parameters():
            assert isinstance(parameter, DTensor)
            cut = distribute_tensor(model().get_parameter(name).detach(), mesh, parameter.placements)
            right = right and torch.equal(cut.to_local(), parameter.to_local())
            right = right and str(from_placements(parameter.placements, parameter.dim(), (2, 2))) == plan_of(on).parameters[name].spec
        return right

    assert all(on_ranks(run, 4))
