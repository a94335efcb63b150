"""Models with collectives written by hand: planned, priced, listed, checked, run on ranks, with the gradients of one device."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_gather_tensor, all_reduce, all_to_all_single, reduce_scatter_tensor
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.experimental import local_map

import autopar
from autopar.cost_models import Machine, Mesh, load_hardware
from autopar.sharding import AxisLayout, ShardingSpec, lies_so
from autopar.verify.launch import run_ranks

MESH = autopar.axis_mesh("tp=2")
R, S0, S1 = Replicate(), Shard(0), Shard(1)
WIDTH, HIDDEN, HEADS = 16, 32, 4


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of ``[b, s, h, d]``."""
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


class Plain(nn.Module):
    """A layer of attention and a feed-forward network, without collectives."""

    def __init__(self, width: int = WIDTH, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Parameter(torch.randn(hidden, width) / 4), nn.Parameter(torch.randn(width, hidden) / 4)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v)

    def feed(self, x: Tensor) -> Tensor:
        return F.gelu(x @ self.up.T) @ self.down.T

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.into(x).unflatten(-1, (3, HEADS, -1)).unbind(2)
        x = x + self.out(self.attend(q, k, v).flatten(2))
        return x + self.feed(x)


class Megatron(Plain):
    """Both weights are split, and the parts of the sum are added up."""

    def feed(self, x: Tensor) -> Tensor:
        def run(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
            return all_reduce(F.linear(F.gelu(F.linear(x, up)), down), "sum", MESH)

        return local_map(run, out_placements=[R], in_placements=([R], [S0], [S1]), device_mesh=MESH)(x, self.up, self.down)


class InPlace(Plain):
    """The same, summed in place."""

    def feed(self, x: Tensor) -> Tensor:
        def run(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
            y = F.gelu(x @ up.T) @ down.T
            dist.all_reduce(y, group=MESH.get_group("tp"))
            return y

        return local_map(run, out_placements=[R], in_placements=([R], [S0], [S1]), device_mesh=MESH)(x, self.up, self.down)


class SequenceParallel(Plain):
    """Rows of the sequence are gathered before, and scattered after."""

    def feed(self, x: Tensor) -> Tensor:
        def run(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
            y = F.linear(F.gelu(F.linear(all_gather_tensor(x, 1, MESH), up)), down)
            return reduce_scatter_tensor(y, "sum", 1, MESH)

        return local_map(run, out_placements=[S1], in_placements=([S1], [S0], [S1]), device_mesh=MESH)(x, self.up, self.down)


class Ulysses(SequenceParallel):
    """Attention on a part of the heads, between two exchanges of these with parts of the sequence."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        def to_heads(x: Tensor) -> Tensor:
            b, s, h, d = x.shape
            x = x.view(b, s, MESH.size(), h // MESH.size(), d).permute(2, 1, 0, 3, 4).contiguous()
            return all_to_all_single(x, None, None, MESH).flatten(0, 1).transpose(0, 1)

        def to_rows(x: Tensor) -> Tensor:
            x = all_to_all_single(x.transpose(0, 1).contiguous(), None, None, MESH)
            return x.unflatten(0, (MESH.size(), -1)).permute(2, 1, 0, 3, 4).flatten(2, 3)

        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return to_rows(attention(to_heads(q), to_heads(k), to_heads(v)))

        return local_map(run, out_placements=[S1], in_placements=([S1], [S1], [S1]), device_mesh=MESH)(q, k, v)


class Stack(nn.Module):
    """Layers of a kind, and their loss."""

    def __init__(self, layer: Callable[[], nn.Module], layers: int = 1) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def test_how_a_tensor_lies_over_named_axes() -> None:
    layout, mesh = AxisLayout.parse("a=S0 c=S0 b=R"), {"c": 2, "b": 3, "a": 4}
    assert str(layout) == "a=S0 c=S0 b=R" and layout.problem((8, 5), mesh) is None
    assert layout.problem((8, 5), {"a": 4, "b": 3}) == "the mesh a=4,b=3 has no axis 'c'"
    assert layout.problem((4, 5), mesh) == "the model has 4 ranks along a,c, the mesh is c=2,b=3,a=4"
    asked = layout.on(tuple(mesh), tuple(mesh.values()))
    assert asked == ((2, 0), (0, 0), (1, None)) and layout.on(("c", "b", "a"), (1, 3, 4)) == ((2, 0), (1, None))
    fits = {text: lies_so(ShardingSpec.parse(text), asked) for text in ("S20 R", "S02 R", "S2 R", "S20 S1", "S20 R +P1", "R S20", "S20 S3")}
    assert [text for text, fit in fits.items() if fit] == ["S20 R", "S20 S3"]


KEPT = {
    Megatron: ["all_reduce"],
    InPlace: ["all_reduce"],
    SequenceParallel: ["all_gather", "reduce_scatter"],
    Ulysses: [*["all_to_all"] * 4, "all_gather", "reduce_scatter"],
}
"""The collectives that stand in the feed-forward networks and attentions, in order."""


def made(layer: type[Plain], layers: int = 1, batch: int = 4) -> tuple[Stack, Stack, Tensor]:
    """A model, the same without collectives, and an input."""
    torch.manual_seed(0)
    model, plain = Stack(layer, layers).double(), Stack(Plain, layers).double()
    plain.load_state_dict(model.state_dict())
    return model, plain, torch.randn(batch, 8, WIDTH, dtype=torch.float64)


def kept(plan: Any) -> list[Any]:
    """The collectives of operators that are collectives."""
    names = {op.inputs[0].tensor for op in plan.ops if op.op.startswith(("autopar.all", "autopar.reduce"))}
    return [row for row in plan.collectives if row.tensor in names and row.phase == "forward"]


@pytest.mark.parametrize("layer", KEPT)
def test_written_collectives_are_planned_listed_checked_and_verified(layer: type[Plain]) -> None:
    model, plain, x = made(layer)
    plan = autopar.plan(model, (x,), mesh="dp=2,tp=2", hardware="h100-sxm", effort="low")
    found = kept(plan)
    assert [row.kind for row in found] == KEPT[layer] and {row.axes for row in found} == {("tp",)}
    machine = Machine(Mesh.parse("dp=2,tp=2"), load_hardware("h100-sxm"))
    for row in found:
        assert row.seconds == pytest.approx(machine.collective_seconds(row.kind, row.bytes, (machine.mesh.whole(1),)))
    assert autopar.check(plan) == ()
    result = autopar.verify(plan, (model, (x,)), backend="simulate", steps=2)
    assert result.passed, result
    wanted = plain(x)
    wanted.backward()
    with autopar.on_one_device():
        loss = model(x)
    loss.backward()
    assert abs(loss.item() - wanted.item()) < 1e-12
    for name, parameter in model.named_parameters():
        assert (parameter.grad - plain.get_parameter(name).grad).abs().max() < 1e-9, name


def test_on_gloo_ranks_gradients_are_those_of_the_model_without_collectives() -> None:
    model, plain, x = made(Ulysses, layers=2)
    plan = autopar.plan(model, (x,), mesh="dp=2,tp=2", hardware="h100-sxm", effort="low")
    assert [row.kind for row in kept(plan)] == KEPT[Ulysses] * 2

    def rank_main(rank: int) -> list[tuple[float, dict[str, Tensor]]]:
        found = []
        for execute in ("eager", "graph"):
            module = autopar.compile(model, plan, device="cpu", execute=execute)
            loss = module(x)
            loss.backward()
            found.append((loss.item(), {name: parameter.grad.full_tensor() for name, parameter in module.named_parameters()}))
        return found

    found = [one for several in run_ranks(rank_main, 4) for one in several]
    wanted = plain(x)
    wanted.backward()
    for loss, gradients in found:
        assert abs(loss - wanted.item()) < 1e-9 and set(gradients) == {name for name, _ in plain.named_parameters()}
        for name, gradient in gradients.items():
            assert (gradient - plain.get_parameter(name).grad).abs().max() < 1e-9, name


def test_a_gathered_sequence_is_scattered_in_backward_where_sizes_count() -> None:
    with torch.device("meta"):
        model = Stack(lambda: SequenceParallel(1024, 8192)).bfloat16()
        x = torch.empty(8, 2048, 1024, dtype=torch.bfloat16)
    plan = autopar.plan(model, (x,), mesh="dp=2,tp=2", hardware="h100-sxm", effort="low")
    assert [row.kind for row in kept(plan)] == KEPT[SequenceParallel]
    gathered = next(op for op in plan.ops if op.op == "autopar.all_gather.default")
    rows = gathered.outputs[0].shape
    scattered = [row for row in plan.collectives if row.kind == "reduce_scatter" and row.phase == "backward" and row.axes == ("tp",)]
    assert max(row.bytes for row in scattered) >= 2 * math.prod(rows) // 2, "of all rows of a rank's batch"


def test_check_finds_a_kept_collective_over_another_axis() -> None:
    model, _, x = made(Megatron)
    plan = autopar.plan(model, (x,), mesh="dp=2,tp=2", hardware="h100-sxm", effort="low")
    names = [op.name for op in plan.ops if op.op in ("autopar.on_axes.default", "autopar.all_reduce.default")]
    assert len(names) == 5
    text = plan.to_json() if hasattr(plan, "to_json") else plan.model_dump_json()
    moved = type(plan).model_validate_json(text.replace('"tp=S0', '"dp=S0'))
    found = [str(difference) for difference in autopar.check(moved)]
    assert any("the model asks for dp=S0" in difference for difference in found), found
