"""Whether two tensors lie alike: yes only where that is certain."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, init_device_mesh

import autopar
from autopar.errors import UsageError
from autopar.sharding import ShardingSpec


def test_same_sharding_is_conservative() -> None:
    same = autopar.same_sharding
    assert same("S0 R", "S0 R") and same("S0 R", ShardingSpec.parse("S0 R")) and same("", "")
    assert same("S01 R +P2max", "S01 R +P2max") and not same("S01 R +P2max", "S01 R +P2")
    for a, b in (("S01 R", "S10 R"), ("S0 R", "R S0"), ("S0 R", "S0"), ("R +P0", "R"), ("S0 R", "S1 R"), ("S0 S1", "S1 S0")):
        assert not same(a, b) and not same(b, a) and not same(a, b, mesh="dp=2,tp=2")
    assert not same("S0 R", "R R") and same("S0 R", "R R", mesh="dp=1,tp=4") and not same("S0 R", "R R", mesh={"dp": 2, "tp": 1})
    assert same("S01 R", "S0 R", mesh="2x1") and not same("S5 R", "R R", mesh="2x1") and not same("S5", "S5", mesh="2")
    with pytest.raises(UsageError, match="a list has no sharding"):
        same([1], "R")


def test_same_sharding_of_dtensors() -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        mesh, other = init_device_mesh("cpu", (2, 2)), init_device_mesh("cpu", (4, 1))

        def placed(*placements: Any, on: Any = mesh, rows: int = 2) -> DTensor:
            return DTensor.from_local(torch.zeros(rows, 4), on, placements, run_check=False)

        split = placed(Shard(0), Replicate())
        assert autopar.same_sharding(split, placed(Shard(0), Replicate())) and autopar.same_sharding(split, "S0 R")
        assert not autopar.same_sharding(split, placed(Replicate(), Shard(0))) and not autopar.same_sharding(split, "S1 R")
        assert not autopar.same_sharding(split, placed(Shard(0), Replicate(), rows=4)), "another shape"
        assert not autopar.same_sharding(split, placed(Shard(0), Replicate(), on=other, rows=1)), "another mesh"
        assert not autopar.same_sharding(split, placed(Shard(0), Partial()))
        assert autopar.same_sharding(placed(Shard(0), Replicate(), on=other), placed(Shard(0), Shard(1), on=other))
        with pytest.raises(UsageError, match="a Tensor has no sharding"):
            autopar.same_sharding(split, torch.zeros(4, 4))
    finally:
        dist.destroy_process_group()
