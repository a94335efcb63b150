"""``local_map`` regions and the collectives in them: what they compute on one device, and what is refused at the user's line."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.experimental import local_map
from torch.testing._internal.distributed.fake_pg import FakeStore

import autopar
from autopar.errors import CaptureError, UsageError
from autopar.importer import capture

R, S0, S1 = Replicate(), Shard(0), Shard(1)
TP = autopar.axis_mesh("tp=2")
BOTH = autopar.axis_mesh("dp=2,tp=2")
GROUP = TP.get_group()


class Region(nn.Module):
    """A product, then a function on each rank's part of it."""

    def __init__(self, body: Callable[..., Any], mesh: Any, placed: Any, result: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8, dtype=torch.float64))
        self.run = local_map(body, out_placements=result, in_placements=placed, device_mesh=mesh)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x @ self.weight).pow(2).mean()


def summed(x: Tensor) -> Tensor:
    y = x.sin()
    dist.all_reduce(y, group=GROUP)
    return y


def largest(x: Tensor) -> Tensor:
    y = x * 1
    dist.all_reduce(y, op=dist.ReduceOp.MAX, group=GROUP)
    return y


def seen_by_a_view(x: Tensor) -> Tensor:
    y = x.sin()
    row = y.view(-1)
    dist.all_reduce(y, group=GROUP)
    return row.view(y.shape)


def gathered(x: Tensor) -> Tensor:
    out = torch.empty(x.shape[0] * dist.get_world_size(GROUP), x.shape[1], dtype=x.dtype)
    getattr(dist, "all_gather_single", dist.all_gather_into_tensor)(out, x.sin(), group=GROUP)
    return out


def scattered(x: Tensor) -> Tensor:
    out = torch.empty(x.shape[0] // TP.size(), x.shape[1], dtype=x.dtype)
    getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)(out, x.sin(), group=GROUP, async_op=True).wait()
    return out * 2


def exchanged(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x.sin(), group=GROUP)
    return out


def gathered_in_a_list(x: Tensor) -> Tensor:
    parts = [torch.empty_like(x) for _ in range(2)]
    dist.all_gather(parts, x.sin(), group=GROUP)
    return parts[0] - 2 * parts[1]


def scattered_from_a_list(x: Tensor) -> Tensor:
    out = torch.empty(4, 8, dtype=x.dtype)
    return differentiable.reduce_scatter(out, list(x.sin().chunk(2)), group=GROUP) + out


def exchanged_in_lists(x: Tensor) -> Tensor:
    parts = list(x.sin().chunk(2))
    return torch.cat(differentiable.all_to_all([torch.empty_like(part) for part in parts], parts, group=GROUP))


def over_two_axes_in_turn(x: Tensor) -> Tensor:
    y = functional.all_reduce(x.sin(), "sum", BOTH["dp"])
    return functional.wait_tensor(getattr(functional, "all_gather_single", functional.all_gather_tensor)(y.cos(), 1, (BOTH, 1)))


def over_all(x: Tensor) -> Tensor:
    y = x.sin()
    dist.all_reduce(y)
    return y


def sum_of_halves(x: Tensor) -> Tensor:
    return sum(half.sin() for half in x.chunk(2))  # type: ignore[return-value]


def blocks_turned(x: Tensor) -> Tensor:
    return x.sin().view(2, 4, 2, 4).permute(0, 2, 1, 3).reshape(16, 4)


CASES: list[tuple[Any, Any, Any, Any, Any]] = [
    (summed, TP, [S0], [R], sum_of_halves),
    (largest, TP, [S0], [R], lambda x: torch.maximum(*x.chunk(2))),
    (seen_by_a_view, TP, [S0], [S0], lambda x: sum_of_halves(x).repeat(2, 1)),
    (gathered, TP, [S0], [R], torch.sin),
    (scattered, TP, [S1], [S0], lambda x: 2 * sum(half.sin() for half in x.chunk(2, 1))),
    (exchanged, TP, [S1], [S0], blocks_turned),
    (gathered_in_a_list, TP, [S0], [R], lambda x: x[:4].sin() - 2 * x[4:].sin()),
    (scattered_from_a_list, TP, [R], [S0], lambda x: 4 * x.sin()),
    (exchanged_in_lists, TP, [S1], [S0], blocks_turned),
    (lambda x: functional.all_reduce(x.sin(), "avg", TP), TP, [S0], [R], lambda x: sum_of_halves(x) / 2),
    (lambda x: functional.reduce_scatter_tensor_autograd(x.sin(), "sum", 1, GROUP), TP, [S0], [S1], sum_of_halves),
    (lambda x: functional.all_gather_tensor_autograd(x.sin(), 1, GROUP), TP, [S1], [R], torch.sin),
    (lambda x: functional.all_to_all_single_autograd(x.sin(), [2, 2], [2, 2], GROUP), TP, [S0], [S0],
     lambda x: x.sin().view(2, 2, 2, 8).transpose(0, 1).reshape(8, 8)),
    (lambda x: differentiable.all_reduce(x.sin(), group=GROUP), TP, [S0], [R], sum_of_halves),
    (over_two_axes_in_turn, BOTH, [S0, S1], [R, R], lambda x: sum_of_halves(x).cos()),
    (over_all, BOTH, [S0, S1], [R, R], lambda x: sum(part.sin() for half in x.chunk(2) for part in half.chunk(2, 1))),
    (lambda x: functional.all_to_all_single(x.sin(), None, None, BOTH), BOTH, [S1, S1], [S0, S0],
     lambda x: x.sin().view(4, 2, 4, 2).permute(0, 2, 1, 3).reshape(32, 2)),
    (torch.sin, TP, [S0], [Partial()], sum_of_halves),
    (lambda x: x * 1, TP, [S0], [Partial("max")], lambda x: torch.maximum(*x.chunk(2))),
    (torch.sin, TP, [R], [S0], lambda x: x.sin().repeat(2, 1)),
    (torch.sin, BOTH, [S1, S1], [S1, S1], torch.sin),
]  # fmt: skip


@pytest.mark.parametrize(("body", "mesh", "placed", "result", "meant"), CASES)
def test_regions_compute_what_ranks_would_and_gradients_are_those_of_the_whole(body, mesh, placed, result, meant) -> None:
    torch.manual_seed(0)
    model, x = Region(body, mesh, (placed,), result), torch.randn(8, 8, dtype=torch.float64)
    weight = model.weight.detach().clone().requires_grad_()
    wanted = meant(x @ weight).pow(2).mean()
    wanted.backward()
    with autopar.on_one_device():
        found = model(x)
    found.backward()
    assert torch.allclose(found, wanted, rtol=0, atol=1e-12) and torch.allclose(model.weight.grad, weight.grad, rtol=0, atol=1e-12)


def test_kept_collectives_are_operators_over_the_axes_of_their_groups() -> None:
    found = capture(Region(over_two_axes_in_turn, BOTH, ([S0, S1],), [R, R]), (torch.randn(8, 8, dtype=torch.float64),))
    kept = [(op.target.split(".")[1], op.args[1]) for op in found.graph.ops if op.target.startswith(("autopar.all", "autopar.reduce"))]
    assert kept == [("all_reduce", "dp=S0"), ("all_gather", "tp=S0")]
    lying = [op.args[1] for op in found.graph.ops if op.target == "autopar.on_axes.default"]
    assert lying == ["dp=S0 tp=S1", "dp=R tp=R"]


@pytest.fixture
def four_ranks() -> Iterator[Any]:
    """A device mesh of four ranks, of which this process is the second."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    try:
        yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    finally:
        dist.destroy_process_group()


def test_groups_are_known_by_their_ranks(four_ranks: Any) -> None:
    """What a mesh of torch's own gives is the same graph as the stand-in's."""
    x = torch.randn(8, 8, dtype=torch.float64)

    def graph_of(group: Any, mesh: Any) -> str:
        def body(x: Tensor) -> Tensor:
            return functional.all_reduce(x.sin(), "sum", group)

        return capture(Region(body, mesh, ([R, S0],), [R, R]), (x,)).graph.sha256

    wanted = graph_of(BOTH["tp"], BOTH)
    own = four_ranks.get_group("tp")
    groups = [four_ranks["tp"], (four_ranks, 1), own, own.group_name, [0, 1], [[0, 1], [2, 3]]]
    assert {graph_of(group, four_ranks) for group in groups} == {wanted}


def sized(x: Tensor) -> Tensor:
    return x * dist.get_world_size(GROUP) * TP.size() * TP.shape[0]


def test_a_region_has_ranks_and_the_rest_of_the_model_has_one() -> None:
    class Asked(Region):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(sized(x))

    x = torch.randn(8, 8, dtype=torch.float64)
    outside, inside = (capture(model, (x,)).graph for model in (Asked(torch.sin, TP, ([S0],), [S0]), Region(sized, TP, ([S0],), [S0])))
    graphs = [[op.args[1] for op in graph.ops if op.target.startswith("aten.mul") and op.phase == "forward"] for graph in (outside, inside)]
    doubled = [numbers.count(2) for numbers in graphs]
    assert doubled == [0, 3]


def broadcast(x: Tensor) -> Tensor:
    dist.broadcast(x, 0, group=GROUP)  # here
    return x


def multiplied(x: Tensor) -> Tensor:
    return functional.all_reduce(x, "product", GROUP)  # here


def differing(x: Tensor) -> Tensor:
    return functional.all_to_all_single(x, [1, 3], [3, 1], GROUP)  # here


def into_another_size(x: Tensor) -> Tensor:
    out = torch.empty(3, dtype=x.dtype)
    getattr(dist, "all_gather_single", dist.all_gather_into_tensor)(out, x, group=GROUP)  # here
    return out


def into_parts(x: Tensor) -> Tensor:
    out = torch.empty(8, 8, dtype=x.dtype)
    dist.all_gather(list(out.chunk(2)), x, group=GROUP)  # here
    return out


def within_another(x: Tensor) -> Tensor:
    return local_map(torch.sin, out_placements=[R], in_placements=([R],), device_mesh=TP)(x)  # here


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return functional.all_reduce(x, "sum", GROUP)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return gradient


class MadeForVmap(Doubled):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return functional.all_reduce(x, "sum", GROUP)

    @staticmethod
    def setup_context(context: Any, inputs: Any, output: Tensor) -> None:
        pass


def by_a_function(x: Tensor) -> Tensor:
    return Doubled.apply(x)  # here


taken_before = MadeForVmap.apply


def by_a_function_for_vmap(x: Tensor) -> Tensor:
    return taken_before(x)  # here


@pytest.mark.parametrize(("body", "placed", "result", "message"), [
    (broadcast, [S0], [R], "a region calls broadcast, which is not kept"),
    (multiplied, [S0], [R], "a collective that reduces by 'product' is not kept"),
    (differing, [S0], [R], r"all_to_all_single with the output_split_sizes \[1, 3\], which differ"),
    (into_another_size, [S0], [R], r"a collective writes float64\[8, 8\] into a tensor float64\[3\]"),
    (into_parts, [S0], [R], "a collective writes into a tensor that shares its memory"),
    (within_another, [S0], [R], "local_map in a region of local_map"),
    (by_a_function, [S0], [R], "a torch.autograd.Function is called under vmap, or in a region of local_map"),
    (by_a_function_for_vmap, [S0], [R], "a region calls a torch.autograd.Function, MadeForVmap"),
])  # fmt: skip
def test_what_a_region_cannot_keep_is_refused_at_its_line(body, placed, result, message) -> None:
    with pytest.raises(CaptureError, match=message) as caught:
        capture(Region(body, TP, (placed,), result), (torch.randn(8, 8, dtype=torch.float64),))
    assert "# here" in str(caught.value) and "hint: " in str(caught.value)


@pytest.mark.parametrize(("placed", "result", "mesh", "message"), [
    (([S0],), [R], TP, "result 0 of a region differs by rank along 'tp', its out_placements say Replicate"),
    (([Partial()],), [R], TP, "local_map with the in_placements P"),
    (([S0, R],), [R], TP, "one for each of the axes tp is wanted"),
    (([S0], [S0]), [S0], TP, "local_map with 2 in_placements for 1 arguments"),
    (([S0],), ([S0], [S0]), TP, "local_map with 2 out_placements for 1 results"),
    (([S0],), [S0], autopar.axis_mesh("tp=3"), r"dim 0 of a tensor \[8, 8\] goes into a region in 3 parts, which are not equal"),
    (([S0],), [S0], None, "local_map without device_mesh"),
    (None, [S0], TP, "local_map without in_placements"),
    (([S0],), [S0], "tp", "a str in place of a device mesh"),
])  # fmt: skip
def test_placements_that_parts_cannot_have_are_refused(placed, result, mesh, message) -> None:
    with pytest.raises(CaptureError, match=message) as caught:
        capture(Region(torch.sin, mesh, placed, result), (torch.randn(8, 8, dtype=torch.float64),))
    assert "test_regions.py" in str(caught.value) and "hint: " in str(caught.value)


def test_groups_that_are_no_part_of_the_mesh_are_refused(four_ranks: Any) -> None:
    own = dist.new_group([1, 2])

    def message_of(group: Any, mesh: Any = four_ranks) -> str:
        def body(x: Tensor) -> Tensor:
            return functional.all_reduce(x, "sum", group)  # here

        with pytest.raises(CaptureError) as caught:
            capture(Region(body, mesh, ([R] * mesh.ndim,), [R] * mesh.ndim), (torch.randn(8, 8, dtype=torch.float64),))
        assert "# here" in str(caught.value) and "hint: " in str(caught.value)
        return str(caught.value)

    assert "a collective over the ranks 1, 2, which do not lie along axes of the region's mesh dp=2,tp=2" in message_of(own)
    assert "a collective over the ranks 0, 1 and 2, which do not" in message_of([[0, 1], [2]]), "another group on other ranks"
    assert "a collective over the axis 'cp' in a region over dp=2,tp=2" in message_of(autopar.axis_mesh("cp=2"))
    assert "a collective over the axis 'dp' in a region over tp=2" in message_of(four_ranks["dp"], four_ranks["tp"])
    assert "a collective over the ranks 1, 2 in a region over tp=2, whose axes have no ranks" in message_of(own, TP)
    assert "a float in place of a process group" in message_of(1.5)


def test_local_map_is_known_before_the_model_runs() -> None:
    """Imported by the model's own code, it would run on whole tensors."""
    script = """
import sys, torch, autopar
with autopar.on_one_device():
    assert "torch.distributed.tensor" not in sys.modules, "planning starts without DTensor"
try:
    with autopar.on_one_device():
        import torch.distributed.tensor.experimental
except autopar.AutoparError as error:
    print(error)
"""
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout.startswith("the model imports local_map while it runs\nhint: import it at the top of the file"), found.stderr


def test_collectives_outside_of_regions_are_refused() -> None:
    class Outside(Region):
        def forward(self, x: Tensor) -> Tensor:
            return functional.all_reduce(x @ self.weight, "sum", GROUP).sum()  # here

    with pytest.raises(CaptureError, match=r"the model calls a collective of torch.distributed itself") as caught:
        capture(Outside(torch.sin, TP, None, None), (torch.randn(8, 8, dtype=torch.float64),))
    assert "# here" in str(caught.value) and "local_map" in str(caught.value)


def test_meshes_without_the_axes_of_a_region_are_refused_with_the_line() -> None:
    model, x = Region(summed, TP, ([S0],), [R]), torch.randn(8, 8, dtype=torch.float64)
    for mesh, reason in (("dp=4", "the mesh dp=4 has no axis 'tp'"), ("tp=4", "the model has 2 ranks along tp, the mesh is tp=4")):
        with pytest.raises(UsageError, match=rf"test_regions.py:\d+: .* does not fit the mesh: {reason}(.*\n)+hint: "):
            autopar.plan(model, (x,), mesh=mesh, hardware="cpu-cluster")
    with pytest.raises(UsageError, match="no axis 'cp' among dp, tp"):
        BOTH["cp"]
    with pytest.raises(UsageError, match="a group of a mesh of 2 axes"):
        BOTH.get_group()
