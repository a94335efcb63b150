"""Parts and whole tensors, ShardingSpec and DTensor placements, each the other's inverse; DTensor reads our parts as we do."""

from __future__ import annotations

import itertools
import math
import sys

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _MaskPartial

from autopar.cost_models import Mesh
from autopar.errors import MismatchError
from autopar.runtime.ranks.placement import from_placements, gather, local_part, replica_difference, scatter, to_dtensor, to_placements
from autopar.sharding import ShardingSpec, splits
from autopar.verify.launch import run_ranks

SHAPE = (24, 12)


def every_spec(mesh: Mesh) -> list[ShardingSpec]:
    """Every spec of a tensor of two dims, with each kind of partial value."""
    found = []
    for count in range(len(mesh.sizes) + 1):
        for partial in itertools.combinations(range(len(mesh.sizes)), count):
            rest = [axis for axis in range(len(mesh.sizes)) if axis not in partial]
            for spec in splits(SHAPE, [size if axis in rest else 1 for axis, size in enumerate(mesh.sizes)]):
                words = ("sum", "max", "min") if partial else ("sum",)
                found += [ShardingSpec(spec.dims, tuple((axis, word) for axis in partial)) for word in words]
    return found


@pytest.mark.parametrize("text", ["2", "6", "2x3", "4x2", "2x2x2"])
def test_parts_and_placements_come_back(text: str) -> None:
    mesh = Mesh.parse(text)
    whole = torch.randn(SHAPE)
    for spec in every_spec(mesh):
        parts = scatter(whole, spec, mesh)
        assert {tuple(part.shape) for part in parts} == {spec.local_shape(SHAPE, mesh.sizes)}
        assert gather(parts, spec, mesh).equal(whole), str(spec)
        assert replica_difference(parts, spec, mesh) == 0
        assert from_placements(to_placements(spec, mesh.sizes), 2, mesh.sizes) == spec


def test_s10_is_cut_by_the_second_axis_first() -> None:
    mesh, rows = Mesh.parse("2x4"), torch.arange(8)
    first = [local_part(rows, ShardingSpec.parse("S01"), mesh, rank).item() for rank in range(8)]
    second = [local_part(rows, ShardingSpec.parse("S10"), mesh, rank).item() for rank in range(8)]
    assert first == [0, 1, 2, 3, 4, 5, 6, 7]
    assert second == [0, 2, 4, 6, 1, 3, 5, 7]


def test_replicas_that_differ_are_noticed() -> None:
    mesh, spec = Mesh.parse("2x2"), ShardingSpec.parse("S0 R")
    parts = scatter(torch.zeros(SHAPE), spec, mesh)
    parts[3] += 0.5
    assert replica_difference(parts, spec, mesh) == 0.5
    parts[1][0] = math.nan
    assert replica_difference(parts, spec, mesh) == sys.float_info.max
    parts[0][0] = math.nan
    assert replica_difference(parts, spec, mesh) == 0.5, "not a number on both"


def test_axes_of_size_one_are_dropped() -> None:
    assert from_placements((Shard(0), Shard(1)), 2, (1, 4)) == ShardingSpec.parse("R S1")
    assert to_placements(ShardingSpec.parse("R S1"), (1, 4)) == (Replicate(), Shard(1))


@pytest.mark.parametrize("placement", [Partial("avg"), _MaskPartial(offset_shape=torch.Size([2]), offset_dim=0)])
def test_a_placement_without_a_spec_is_refused(placement: Partial) -> None:
    with pytest.raises(MismatchError, match="hint: use"):
        from_placements((placement,), 2, (2,))


@pytest.mark.parametrize("text", ["2x2", pytest.param("2x4", marks=pytest.mark.slow), pytest.param("2x2x2", marks=pytest.mark.slow)])
def test_dtensor_puts_our_parts_together_as_we_do(text: str) -> None:
    mesh = Mesh.parse(text)
    whole = torch.arange(24 * 12, dtype=torch.float64).reshape(SHAPE)

    def rank_main(rank: int) -> list[str]:
        from torch.distributed.device_mesh import init_device_mesh

        device_mesh = init_device_mesh("cpu", mesh.sizes, mesh_dim_names=mesh.names)
        wrong = []
        for spec in (*every_spec(mesh), *(ShardingSpec.parse(text) for text in ("S0/3 R", "S0/2 S1", "S1/2 S0", "S1 S0/6"))):
            made = to_dtensor(local_part(whole, spec, mesh, rank).contiguous(), spec, SHAPE, device_mesh)
            assert isinstance(made, DTensor)
            if not made.full_tensor().equal(whole):
                wrong.append(str(spec))
        return wrong

    assert run_ranks(rank_main, mesh.ranks) == [[]] * mesh.ranks


@pytest.mark.parametrize(("text", "spec"), [("4", "S0/3 R"), ("2x2", "R S1/2"), ("2x2", "S0/2 S1"), ("2x2", "S1/2 S0"), ("2x3", "S0/4 R")])
def test_parts_of_blocks_are_as_dtensor_has_them(text: str, spec: str) -> None:
    mesh, whole = Mesh.parse(text), torch.arange(24.0 * 12).view(SHAPE)
    wanted = ShardingSpec.parse(spec)
    parts = scatter(whole, wanted, mesh)
    assert {tuple(part.shape) for part in parts} == {wanted.local_shape(SHAPE, mesh.sizes)}
    assert gather(parts, wanted, mesh).equal(whole)
    placements = to_placements(wanted, mesh.sizes)
    assert from_placements(placements, 2, mesh.sizes) == wanted
    (dim, count), axes = wanted.blocks[0], wanted.dims[wanted.blocks[0][0]]
    first = torch.cat([block.chunk(mesh.sizes[axes[0]], dim)[0] for block in whole.chunk(count, dim)], dim)
    assert local_part(whole, ShardingSpec(tuple(axes if d == dim else () for d in range(2)), (), wanted.blocks), mesh, 0).equal(first)
