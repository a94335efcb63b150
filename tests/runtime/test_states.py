"""Roads by which torch loads, saves and wraps what a plan hands out: weights in blocks, unequal parts, a mesh with a flattened one."""

from __future__ import annotations

import itertools
import pickle
from functools import lru_cache
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import autopar
from autopar.cost_models import CostModelError, Mesh
from autopar.errors import InfeasibleError, UsageError
from autopar.plan import Plan
from autopar.runtime.ranks.placement import local_part, to_dtensor, to_placements
from autopar.runtime.weights.checkpoints import part_of
from autopar.sharding import ShardingSpec
from autopar.torch_compat import lay_by_parts, teach_dtensors
from tests import fused
from tests.runtime.test_training import gradients, on_ranks, same, whole

FULL = StateDictOptions(full_state_dict=True)
FROM_FIRST = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def layer(seed: int = 0) -> fused.Layer:
    torch.manual_seed(seed)
    return fused.Layer()


@lru_cache
def rows() -> Tensor:
    torch.manual_seed(1)
    return fused.x()


@lru_cache
def in_blocks() -> Plan:
    pins = {"input:x": "R R R", "qkv.0.weight": "S0/3 R", "qkv.0.bias": "S0/3", "gate_up.0.weight": "S0/2 R"}
    return autopar.plan(layer(), (rows(),), loss=fused.loss, mesh={"tp": 2}, hardware="cpu-cluster", constraints=pins)


def is_state_of(found: dict[str, Any], model: nn.Module) -> bool:
    wanted = dict(model.state_dict())
    return set(found) == set(wanted) and all(torch.equal(whole(found[name]), wanted[name]) for name in wanted)


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    values = []
    for _ in range(steps):
        optimizer.zero_grad()
        value = model(rows())
        value = value if value.dim() == 0 else fused.loss(value)
        value.backward()
        optimizer.step()
        values.append(value.item())
    return values


def test_a_full_state_of_the_first_rank_goes_into_weights_in_blocks() -> None:
    model = layer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    trained(model, optimizer, 1)
    weights, states = get_state_dict(model, optimizer)
    in_blocks()

    def run(rank: int) -> list[bool]:
        module = autopar.compile(layer(seed=3), in_blocks())
        own = torch.optim.AdamW(module.parameters(), lr=1e-2)
        set_model_state_dict(module, weights if rank == 0 else {}, options=FROM_FIRST)
        set_optimizer_state_dict(module, own, states if rank == 0 else {}, options=FROM_FIRST)
        moments = [
            torch.equal(whole(own.state[parameter]["exp_avg"]), states["state"][name]["exp_avg"])
            for name, parameter in module.named_parameters()
        ]
        return [is_state_of(module.state_dict(), model), all(moments)]

    assert on_ranks(run, 2) == [[True, True]] * 2


def test_fully_shard_goes_around_weights_in_blocks(tmp_path: Any) -> None:
    """Each replica takes the whole batch here, so that gradients are one device's."""
    reference = layer()
    wanted = trained(reference, torch.optim.SGD(reference.parameters(), lr=1.0), 3)
    in_blocks()

    def run(rank: int) -> tuple[list[bool], list[float]]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        module = fully_shard(autopar.compile(layer(), in_blocks(), mesh=mesh["tp"]), mesh=mesh["dp"])
        right = [is_state_of(get_model_state_dict(module, options=FULL), layer())]
        optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
        losses = trained(module, optimizer, 3)
        whole_state = get_model_state_dict(module, options=FULL)
        right.append(all(torch.allclose(whole_state[name], value, atol=1e-5) for name, value in reference.state_dict().items()))
        dcp.save({"model": get_model_state_dict(module)}, checkpoint_id=tmp_path)
        module.load_state_dict(layer(seed=5).state_dict())
        right.append(is_state_of(get_model_state_dict(module, options=FULL), layer(seed=5)))
        set_model_state_dict(module, layer(seed=6).state_dict() if rank == 0 else {}, options=FROM_FIRST)
        right.append(is_state_of(get_model_state_dict(module, options=FULL), layer(seed=6)))
        state = get_model_state_dict(module)
        dcp.load({"model": state}, checkpoint_id=tmp_path)
        right.append(all(torch.equal(whole(value), whole_state[name]) for name, value in state.items()))
        with torch.no_grad():
            set_model_state_dict(module, state)
            right.append(bool(torch.isfinite(whole(module.eval()(rows()))).all()))
        return right, losses

    for right, losses in on_ranks(run, 4):
        assert right == [True] * 6
        assert losses == pytest.approx(wanted, rel=1e-4)


def test_unequal_parts_over_two_axes_on_a_mesh_with_a_flattened_one() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(8, 13), torch.randn(6, 8)
    model(x).square().mean().backward()
    wanted = gradients(model)

    def plan(weight: str, output: str, entering: str) -> Plan:
        pins = {"weight": weight, "output:0": output, "input:input": entering}
        return autopar.plan(model, (x,), mesh={"dp": 2, "tp": 2}, hardware="cpu-cluster", constraints=pins)

    split, other = plan("S01 R", "S01 R", "S01 R"), plan("R S1", "R R", "R R")

    def run(rank: int) -> list[bool]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        mesh["dp", "tp"]._flatten("dp_tp")
        module = autopar.compile(model, split, mesh=mesh)
        output = module(x)
        output.square().mean().backward()
        again = autopar.compile(nn.Linear(8, 13), other, mesh=mesh)
        again.load_state_dict(module.state_dict())
        return [
            is_state_of(get_model_state_dict(module, options=FULL), model), torch.allclose(whole(output), model(x), atol=1e-6),
            same(gradients(module), wanted), is_state_of(again.state_dict(), model),
            torch.allclose(whole(again(output.detach()[:, :8])), model(model(x)[:, :8]), atol=1e-6),
        ]  # fmt: skip

    assert on_ranks(run, 4) == [[True] * 5] * 4


LAYOUTS = ["R R", "S0 R", "R S1", "S01 R", "S10 R", "S0 S1", "S0/3 R", "R S1/3", "R S10", "S1 S0"]


@pytest.mark.parametrize("shape", [(12, 12), (7, 10), (5, 13)])
@pytest.mark.parametrize("flattens", [False, True])
def test_every_layout_is_redistributed_into_every_other(shape: tuple[int, int], flattens: bool) -> None:
    equal = shape == (12, 12)
    specs = [ShardingSpec.parse(text) for text in LAYOUTS if equal or not ("/" in text or "10" in text)]
    specs.append(ShardingSpec(((), ()), ((0, "sum"), (1, "sum"))))
    made = torch.arange(shape[0] * shape[1]).reshape(shape).double()

    def run(rank: int) -> list[str]:
        teach_dtensors()
        lay_by_parts(part_of)
        mesh, planned = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), Mesh.parse("dp=2,tp=2")
        if flattens:
            mesh["dp", "tp"]._flatten("dp_tp")
        wrong = []
        for before, after in itertools.product(specs, specs[:-1]):
            held = to_dtensor(local_part(made, before, planned, rank).clone(), before, shape, mesh)
            moved = held.redistribute(placements=to_placements(after, (2, 2)))
            if not torch.equal(moved.to_local(), local_part(made, after, planned, rank)):
                wrong.append(f"{before} -> {after}")
        return wrong

    assert on_ranks(run, 4) == [[]] * 4


@pytest.mark.parametrize("error", [UsageError("what", "how"), InfeasibleError("none fits", "take more"), CostModelError("what", "how")])
def test_errors_travel_between_ranks(error: Any) -> None:
    error.least = 3
    sent = pickle.loads(pickle.dumps(error))
    assert (type(sent), str(sent), sent.message, sent.hint, sent.least) == (type(error), str(error), error.message, error.hint, 3)
