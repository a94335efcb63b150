"""Whether two tensors lie alike: yes only where that is certain. Values that a model says itself how to split."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, init_device_mesh

import autopar
from autopar.errors import UsageError
from autopar.sharding import ShardingSpec
from autopar.verify import verify


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


class Told(nn.Module):
    """An MLP that says how its hidden values and its result are split."""

    def __init__(self, hidden: str, result: str) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.hidden, self.result = hidden, result

    def forward(self, x: Tensor) -> Tensor:
        hidden = autopar.shard(torch.relu(self.up(x)), self.hidden)
        return autopar.shard(self.down(hidden), self.result).square().mean()


@pytest.mark.parametrize(("hidden", "result"), [("R S1", "S0 R"), ("S(tp,dp) R", "R R"), ("R R", "R S01")])
def test_a_value_is_split_as_the_model_says(hidden: str, result: str) -> None:
    torch.manual_seed(0)
    model, x = Told(hidden, result), torch.randn(8, 16)
    assert torch.equal(model(x), Told.forward(model, x)) and autopar.shard(x, "S0 R") is x
    plan = autopar.plan(model, (x,), mesh="dp=2,tp=2", hardware="cpu-cluster")
    wanted = [str(ShardingSpec.parse(text, ("dp", "tp"))) for text in (hidden, result)]
    for name, spec in zip(("shard", "shard_1"), wanted, strict=True):
        (made,) = (item.spec for op in plan.ops for item in op.outputs if item.tensor == name)
        shared = {row.value: row.to_spec for row in plan.reshards}.get(f"{name}@forward", made)
        assert shared == spec, "of that a reader may take a part"
    assert not autopar.check(plan)
    found = verify(plan, (model, (x,)), backend="simulate", steps=2)
    assert found.passed, found.problems


def test_a_spec_in_the_model_that_does_not_fit_is_refused_at_its_line() -> None:
    x = torch.randn(6, 16)
    for spec, reason in (("S10 R", "dim 0 of size 6"), ("S5 R", "uses axis 5"), ("S0", "has 1 dims"), ("S(pp) R", "no mesh axis 'pp'"),
                         ("R R +P0", "cannot be partial"), ("X", "X")):  # fmt: skip
        with pytest.raises(UsageError, match=reason) as caught:
            autopar.plan(Told(spec, "R R"), (x,), mesh="dp=2,tp=2", hardware="cpu-cluster")
        assert "test_placements.py:" in str(caught.value) and "hint:" in str(caught.value)
    with pytest.raises(UsageError, match="two pins disagree"):
        autopar.plan(Told("R R", "R R"), (x,), mesh="dp=2,tp=2", hardware="cpu-cluster", constraints={"op:*": "S0 R"})
    with pytest.raises(UsageError, match="a spec such as 'S0 R'"):
        autopar.shard(x, 0)  # type: ignore[arg-type]
