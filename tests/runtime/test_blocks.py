"""Weights in blocks where people train them: whole values, optimizers, clipping, checkpoints, programs in folders, pins of one's own."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import autopar
from autopar.plan import Plan
from autopar.runtime import export_program, load_safetensors
from autopar.runtime.ranks.placement import from_placements
from autopar.target import Target
from autopar.verify import verify
from tests import fused
from tests.runtime.test_training import gradients, on_ranks, same, whole

IN_BLOCKS = {"qkv.0.weight": "S1/3 S0", "qkv.0.bias": "S1/3", "gate_up.0.weight": "S0/2 S1"}


def model(seed: int = 0) -> fused.Layer:
    torch.manual_seed(seed)
    return fused.Layer()


@lru_cache
def x() -> Tensor:
    torch.manual_seed(1)
    return fused.x()


@lru_cache
def plan_of(mesh: str = "2x2", pins: bool = True) -> Plan:
    constraints = {"input:x": "S0 R R", **(IN_BLOCKS if pins else {})}
    return autopar.plan(model(), (x(),), loss=fused.loss, mesh=mesh, hardware="cpu-cluster", constraints=constraints)


def quick_plan(layer: nn.Module) -> Plan:
    """For each rank of a test to make, which asks what became of tensors that are pins: under the model that is searched fastest."""
    return autopar.plan(layer, (x(),), loss=fused.loss, mesh="2x2", hardware="cpu-cluster", cost_model="communication")


def specs(plan: Plan) -> dict[str, str]:
    return {name: row.spec for name, row in plan.parameters.items() if row.blocks is not None}


@pytest.mark.parametrize("name", fused.MODELS)
def test_each_kind_of_model_is_what_one_device_computes(name: str) -> None:
    torch.manual_seed(0)
    made = Target(fused.MODELS[name](), (x(),), loss=fused.loss)
    for mesh in ("tp=4", "dp=2,tp=2"):
        pins = {"input:x": "R R R" if mesh == "tp=4" else "S0 R R"}
        graph = autopar.capture(made.model, made.args, loss=fused.loss)
        axis = len(mesh.split(",")) - 1
        pins |= {
            item.name: " ".join(f"S{axis}/{item.blocks.count}" if dim == item.blocks.dim else "R" for dim in range(rank))
            for item in graph.of_kind("parameter") if item.blocks for rank in [len(graph.tensors[item.tensor].shape) - 1]
        }  # fmt: skip
        plan = autopar.plan(graph, mesh=mesh, hardware="cpu-cluster", cost_model="communication", constraints=pins)
        plan.remember_loss(fused.loss)
        assert all("/" in spec for spec in specs(plan).values())
        assert not list(autopar.check(plan))
        found = verify(plan, made, backend="simulate", steps=3)
        assert found.passed, found.problems


def train(module: nn.Module, steps: int, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        value = module(x())
        value = value if value.dim() == 0 else fused.loss(value)
        value.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 0.01)
        optimizer.step()
        losses.append(value.item())
    return losses


def test_it_trains_saves_and_loads_on_another_mesh(tmp_path: Path) -> None:
    wanted_model = model()
    wanted = train(wanted_model, 4, torch.optim.AdamW(wanted_model.parameters(), lr=1e-2))
    first = model()
    fused.loss(first(x())).backward()
    whole_weights = {name: parameter.detach() for name, parameter in first.named_parameters()}
    wanted_gradients = gradients(first)

    plan_of()  # made here once, not on every rank
    plan_of("4", pins=False)
    def run(rank: int) -> tuple[Any, ...]:
        module = autopar.compile(model(), plan_of())
        held = {name: from_placements(p.placements, p.dim(), (2, 2)) for name, p in module.named_parameters()}
        as_planned = {name: str(held[name]) for name in IN_BLOCKS}
        right = all(torch.equal(whole(p), whole_weights[name]) for name, p in module.named_parameters())
        module(x()).backward()
        right = right and same(gradients(module), wanted_gradients)
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        losses = train(module, 2, optimizer)
        weights, states = get_state_dict(module, optimizer)
        dcp.save({"model": weights, "optimizer": states}, checkpoint_id=tmp_path / "checkpoint")
        other = autopar.compile(model(seed=5), plan_of("4", pins=False))
        another = torch.optim.AdamW(other.parameters(), lr=1e-2)
        weights, states = get_state_dict(other, another)
        dcp.load({"model": weights, "optimizer": states}, checkpoint_id=tmp_path / "checkpoint")
        set_state_dict(other, another, model_state_dict=weights, optim_state_dict=states)
        losses += train(other, 2, another)
        back = autopar.compile(model(seed=6), plan_of())
        weights, _ = get_state_dict(back, torch.optim.SGD(back.parameters()))
        dcp.load({"model": weights}, checkpoint_id=tmp_path / "checkpoint")
        back.load_state_dict(weights)
        right = right and all(torch.equal(whole(a), whole(b)) for a, b in zip(back.parameters(), module.parameters(), strict=True))
        with torch.no_grad():
            shorter = back.eval()(x()[:2])
            reference = model()
            reference.load_state_dict({name: whole(p) for name, p in module.named_parameters()})
            right = right and torch.allclose(whole(shorter), fused.loss(reference(x()[:2])), atol=1e-6)
        return as_planned, right, losses

    for as_planned, right, losses in on_ranks(run, 4):
        assert as_planned == IN_BLOCKS
        assert right
        assert losses == pytest.approx(wanted, rel=1e-4)


def test_folders_and_files_hold_parts_of_blocks(tmp_path: Path) -> None:
    export_program(plan_of(), model(), tmp_path / "program", loss=fused.loss)
    save_file(dict(model(seed=3).named_parameters()), tmp_path / "other.safetensors")
    first = model()
    wanted = fused.loss(first(x()))
    wanted.backward()
    wanted_gradients, other = gradients(first), fused.loss(model(seed=3)(x())).item()

    def run(rank: int) -> tuple[bool, float, float]:
        module = autopar.load_program(tmp_path / "program")
        value = module(x())
        value.backward()
        right = same(gradients(module), wanted_gradients)
        assert load_safetensors(module, [tmp_path / "other.safetensors"]) == []
        return right, value.item(), module(x()).item()

    for right, value, after in on_ranks(run, 4):
        assert right
        assert (value, after) == pytest.approx((wanted.item(), other), rel=1e-5)


def test_pins_that_split_the_weight_as_a_whole_are_kept() -> None:
    first = model()
    fused.loss(first(x())).backward()
    wanted_gradients = gradients(first)
    pins = {"qkv.0.weight": "S0 R", "module:gate_up.0": "S0 R S1"}
    plan = autopar.plan(model(), (x(),), loss=fused.loss, mesh="2x2", hardware="cpu-cluster", constraints=pins)
    assert plan.parameters["qkv.0.weight"].spec == "S0 R"
    assert not specs(plan), "the bias is added to what comes whole; the module's result is the one that was pinned"

    def run(rank: int) -> tuple[bool, str]:
        module = autopar.compile(model(), plan)
        module(x()).backward()
        tensors = model()
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "y"))
        weight = nn.Parameter(distribute_tensor(tensors.qkv[0].weight.detach(), mesh, [Shard(0), Shard(1)]))
        tensors.qkv[0].weight = weight
        placed = quick_plan(tensors)
        return same(gradients(module), wanted_gradients), placed.parameters["qkv.0.weight"].spec

    for right, placed in on_ranks(run, 4):
        assert right
        assert placed == "S0 S1"


def test_dtensors_in_blocks_are_pins() -> None:
    plan_of()  # made here once, not on every rank
    def run(rank: int) -> str:
        module = autopar.compile(model(), plan_of())
        tensors = model()
        tensors.qkv[0].weight = module.get_parameter("qkv.0.weight")
        assert isinstance(tensors.qkv[0].weight, DTensor)
        plan = quick_plan(tensors)
        return plan.parameters["qkv.0.weight"].spec

    assert set(on_ranks(run, 4)) == {IN_BLOCKS["qkv.0.weight"]}


