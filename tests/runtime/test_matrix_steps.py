"""Muon on DTensors: each matrix is made orthogonal whole, by one of the ranks that hold its parts."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from autopar.cost_models import Mesh
from autopar.runtime import to_placements
from autopar.runtime.optimizers.matrix_steps import make_each_orthogonal, share_out
from autopar.runtime.ranks.placement import local_part, to_dtensor
from autopar.sharding import ShardingSpec
from autopar.torch_compat import step_whole_matrices, teach_dtensors
from autopar.verify.launch import run_ranks

MESH = Mesh.parse("dp=2,tp=2")
SPECS = ("S0 S1", "S0 R", "R S0", "S10 R", "S01 R", "S0/3 R", "R S1", "R R", "S1 S0", "S0/3 S1")
SHAPES = ((8, 12), (7, 4), (4, 5), (12, 4), (7, 12), (12, 4), (4, 9), (6, 4), (5, 3), (12, 6))
"""Of a matrix for each spec; some fall into unequal parts, one of them into an empty one."""


def laid(whole: Tensor, text: str, rank: int, device_mesh: Any) -> DTensor:
    spec = ShardingSpec.parse(text)
    return to_dtensor(local_part(whole, spec, MESH, rank).clone().contiguous(), spec, whole.shape, device_mesh)


def wholes(dtype: torch.dtype, turn: int = 0) -> list[Tensor]:
    """A matrix for each spec, then one for a plain parameter."""
    generator = torch.Generator().manual_seed(turn)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in (*SHAPES, (3, 4))]


def steps(rank: int, dtype: torch.dtype, options: dict[str, Any], gradients_as: str | None = None) -> list[float]:
    """How far three steps of DTensors end from those of plain parameters, for each parameter."""
    teach_dtensors()
    step_whole_matrices(make_each_orthogonal)
    device_mesh = init_device_mesh("cpu", MESH.sizes, mesh_dim_names=MESH.names)

    def placed(tensors: list[Tensor], specs: Any = SPECS) -> list[Any]:
        found: list[Any] = [laid(tensor, text, rank, device_mesh) for tensor, text in zip(tensors, specs, strict=False)]
        return [*found, tensors[-1].clone()]

    plain = [nn.Parameter(tensor) for tensor in wholes(dtype)]
    ours = [nn.Parameter(tensor) for tensor in placed(wholes(dtype))]
    optimizers = [torch.optim.Muon(parameters, lr=0.1, **options) for parameters in (plain, ours)]
    for turn in range(1, 4):
        gradients = wholes(dtype, turn)
        specs = SPECS if gradients_as is None else [gradients_as] * len(SPECS)
        for parameter, gradient in zip(plain, gradients, strict=True):
            parameter.grad = gradient
        for parameter, gradient in zip(ours, placed(gradients, specs), strict=True):
            parameter.grad = gradient
        versions = [parameter._version for parameter in ours]
        for optimizer in optimizers:
            optimizer.step()
        assert all(parameter._version > version for parameter, version in zip(ours, versions, strict=True))
    found = [parameter.full_tensor() if isinstance(parameter, DTensor) else parameter for parameter in ours]
    states = [optimizers[1].state[parameter]["momentum_buffer"] for parameter in ours[:-1]]
    assert all(isinstance(state, DTensor) and state.to_local().dtype == dtype for state in states)
    return [(mine - other).abs().max().item() for mine, other in zip(found, plain, strict=True)]


OTHER = {"nesterov": False, "weight_decay": 0.0, "adjust_lr_fn": "match_rms_adamw", "ns_steps": 3}


@pytest.mark.parametrize("options", [{}, OTHER], ids=["usual", "other"])
def test_split_matrices_are_stepped_as_on_one_device(options: dict[str, Any]) -> None:
    assert run_ranks(lambda rank: max(steps(rank, torch.float64, options)), 4) == [0.0] * 4


def test_half_precision_is_that_of_one_device() -> None:
    """But for a last bit of weights around 2: torch rounds the end of a row of half precision otherwise than its middle."""
    assert max(run_ranks(lambda rank: max(steps(rank, torch.bfloat16, {})), 4)) <= 2**-6


@pytest.mark.parametrize("spec", ["R R", "R R+P0"])
def test_a_gradient_that_lies_otherwise_is_laid_as_the_parameter(spec: str) -> None:
    """Whole, and still a sum over ranks."""
    assert max(max(item) for item in run_ranks(lambda rank: steps(rank, torch.float64, {}, spec), 4)) < 1e-12


def test_a_matrix_is_computed_once_in_its_group() -> None:
    """Four matrices over two ranks: each rank makes two, by two calls a turn; what is whole is made by all."""

    def rank_main(rank: int) -> tuple[int, Counter[str]]:
        device_mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        likes = [to_dtensor(torch.ones(2, 4), ShardingSpec.parse("S0 R"), (4, 4), device_mesh) for _ in range(4)]
        likes.append(to_dtensor(torch.ones(4, 4), ShardingSpec.parse("R R"), (4, 4), device_mesh))
        made, calls = [], Counter[str]()
        usual = dist.all_to_all_single

        def noted(*args: Any, **kwargs: Any) -> Any:
            calls["all_to_all"] += 1
            return usual(*args, **kwargs)

        def make(whole: Tensor) -> Tensor:
            made.append(whole.shape)
            return 2 * whole

        dist.all_to_all_single = noted
        parts = make_each_orthogonal([like.to_local() * number for number, like in enumerate(likes)], likes, make)
        assert [part.unique().tolist() for part in parts] == [[2.0 * number] for number in range(5)]
        assert [tuple(part.shape) for part in parts] == [(2, 4)] * 4 + [(4, 4)]
        assert set(made) == {(4, 4)}
        return len(made), calls

    assert run_ranks(rank_main, 2) == [(3, Counter(all_to_all=4))] * 2


def test_matrices_are_shared_out_by_what_they_take() -> None:
    assert share_out([(2, 2), (8, 8), (4, 4), (4, 4), (2, 2)], 2) == [[1], [2, 3, 0, 4]]
    assert share_out([(4, 4)], 3) == [[0], [], []]


def test_placements_say_what_they_are_given() -> None:
    assert to_placements(ShardingSpec.parse("R R+P0"), MESH.sizes) == (Partial(), Replicate())
    assert to_placements(ShardingSpec.parse("S0 S1"), MESH.sizes) == (Shard(0), Shard(1))
