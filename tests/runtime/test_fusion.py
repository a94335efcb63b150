"""What runs as one kernel: the rules one by one, and that a step's values and peak memory allow it and what is written over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.graph import Op, Ref
from autopar.importer import capture
from autopar.rules import find_product, find_rule, strategies
from autopar.runtime.execution.binding import bind
from autopar.runtime.instructions.fusion import Line, Local, Pair, find_fusion
from autopar.runtime.instructions.kernels import bind_kernel
from autopar.runtime.instructions.operators import find_operator
from autopar.runtime.ranks.backends import LockstepRanks
from autopar.runtime.steps.simulation import simulate
from autopar.schedule import Assignment, Schedule, make_schedule, memory
from autopar.sharding import ShardingSpec
from autopar.verify.live_memory import LiveMemory
from tests.graphs import machine

B, N, K = 6, 4, 8


def contraction(equation: str, reads: tuple[str, str], result: str, phase: Any = "forward") -> Line:
    op = Op(result, "autopar.contract.default", reads, (result,), (Ref(0), Ref(1), equation))
    return Line(op, reads, (result,), phase)


def pointwise(target: str, reads: tuple[str, ...], result: str, phase: Any = "forward") -> Line:
    op = Op(result, target, reads, (result,), tuple(map(Ref, range(len(reads)))))
    return Line(op, reads, (result,), phase)


def move(read: str, result: str) -> Line:
    return Line(None, (read,), (result,), "forward")


SHAPES: Mapping[str, tuple[int, ...]] = {"x": (B, K), "w": (N, K), "bias": (N,), "column": (B, 1), "one": (1,), "n": (N, N), "m": (N, N)}


def even(shape: tuple[int, ...], dtype: str = "float32") -> Local:
    """As large on every rank."""
    return Local(shape, shape, dtype)


def fused(*items: Line, outputs: tuple[str, ...] = ("out",), views: Mapping[str, str] | None = None, **dtypes: str) -> Mapping[int, Pair]:
    """What is found; values are ``[B, N]`` float32 but for ``SHAPES``, and their own memory but for ``views``."""
    names = {name for item in items for name in (*item.reads, *item.writes)}
    root = {name: (views or {}).get(name, name) for name in names}
    return find_fusion(items, root, outputs, lambda name: even(SHAPES.get(name, (B, N)), dtypes.get(name, "float32")))


LINEAR = contraction("b k, n k -> b n", ("x", "w"), "y")


@pytest.mark.parametrize("other", ["bias", "whole"])
@pytest.mark.parametrize("first", [True, False])
def test_a_contraction_takes_the_addition_that_reads_it(other: str, first: bool) -> None:
    found = fused(LINEAR, pointwise("aten.add.Tensor", ("y", other) if first else (other, "y"), "out"))
    assert [(pair.contraction, pair.addition, pair.addend) for pair in found.values()] == [(0, 1, int(first))]


ADD = pointwise("aten.add.Tensor", ("y", "bias"), "out")


@pytest.mark.parametrize(
    "items",
    [
        pytest.param((LINEAR, ADD, pointwise("aten.mul.Tensor", ("y", "out"), "z")), id="another reader"),
        pytest.param((LINEAR, pointwise("aten.add.Tensor", ("y", "column"), "out")), id="a column is no row"),
        pytest.param((LINEAR, pointwise("aten.add.Tensor", ("y", "one"), "out")), id="nor is a single entry"),
        pytest.param((LINEAR, pointwise("aten.add.Tensor", ("y", "y"), "out")), id="added to itself"),
        pytest.param((LINEAR, pointwise("aten.sub.Tensor", ("y", "bias"), "out")), id="no addition"),
        pytest.param((LINEAR, move("whole", "late"), pointwise("aten.add.Tensor", ("y", "late"), "out")), id="not there yet"),
        pytest.param((LINEAR, pointwise("aten.add.Tensor", ("y", "bias"), "out", "backward")), id="in the other phase"),
        pytest.param((contraction("g b k, g n k -> g b n", ("a", "c"), "y"), ADD), id="batched"),
    ],
)
def test_what_is_no_pair(items: tuple[Line, ...]) -> None:
    shapes = {"a": (2, B, K), "c": (2, N, K)}
    root = {name: name for item in items for name in (*item.reads, *item.writes)}
    found = find_fusion(items, root, ["out"], lambda name: even({**SHAPES, **shapes}.get(name, (B, N))))
    assert not found


def test_a_product_that_leaves_and_one_of_another_dtype_are_no_pair() -> None:
    assert not fused(LINEAR, ADD, outputs=("y", "out"))
    assert not fused(LINEAR, ADD, bias="float64")
    assert not fused(LINEAR, ADD, y="bfloat16")


def test_a_row_that_is_as_long_as_the_largest_part_alone_is_no_pair() -> None:
    """Three columns on 4 ranks are 1, 1, 1 and none; a row of one entry is there on every rank."""
    rows = {"x": even((B, K)), "w": Local((1, K), ((3, (0,)), K), "float32"), "y": Local((B, 1), (B, (3, (0,))), "float32")}
    root = {name: name for name in ("x", "w", "y", "bias", "out")}
    for lengths, number in (((1,), 0), (((3, (0,)),), 1)):
        local = {**rows, "out": rows["y"], "bias": Local((1,), lengths, "float32")}
        assert len(find_fusion((LINEAR, ADD), root, ["out"], local.__getitem__)) == number


MAKE = pointwise("aten.mul.Tensor", ("a", "b"), "t")


def test_a_sum_of_gradients_is_added_where_it_lies() -> None:
    add = replace(pointwise("aten.add.Tensor", ("y", "t"), "out"), over="t")
    (pair,) = fused(MAKE, LINEAR, add).values()
    assert pair.in_place
    (pair,) = fused(MAKE, LINEAR, pointwise("aten.mul.Tensor", ("t", "b"), "z"), add).values()
    assert not pair.in_place, "the pair runs where the contraction stood, before the other reader"


EQUATIONS = [
    ("b s k, n k -> b s n", True), ("b s n, b s k -> n k", True), ("b s n, n k -> b s k", True), ("n k, b k -> b n", True),
    ("k, n k -> n", True), ("b k, k -> b", True), ("b s h d, h d n -> b s n", True), ("b s n, b s h d -> h d n", True),
    ("b h s d, h d n -> b s n", False), ("g m k, g k n -> g m n", False), ("m k, k n -> n m", True), ("k, k -> ()", True),
    ("m, n -> m n", False), ("b s k, s n k -> b s n", False), ("b k n, k b -> n", False),
]  # fmt: skip


@pytest.mark.parametrize(("equation", "plain"), EQUATIONS)
def test_contractions_as_products_of_matrices(equation: str, plain: bool) -> None:
    size = dict(zip("bskndhgm", (2, 3, 5, 4, 6, 7, 3, 5), strict=True))
    terms = equation.replace("()", "").replace(" -> ", ", ").split(", ")
    a, b = (torch.randn([size[factor] for factor in term.split()], dtype=torch.float64) for term in terms[:2])
    op = Op("y", "autopar.contract.default", ("a", "b"), ("y",), (Ref(0), Ref(1), equation))
    shapes = [tuple(a.shape), tuple(b.shape)]
    assert (find_product(op, shapes) is not None) == plain
    wanted = torch.einsum(equation.replace("()", "").replace(" ", ""), a, b)
    for first in (a, a.mT.contiguous().mT if a.dim() > 1 else a):
        (found,) = bind_kernel(op, find_operator(op.target), op.args, {}, shapes)([first, b])
        assert found.shape == wanted.shape and found.is_contiguous()
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


class Deep(nn.Module):
    """Linears with biases, a residual and a value with two uses, so that every rule has work."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(16, 16, dtype=torch.float64) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first(x)
        return (self.second(x) + nn.functional.gelu(self.third(x)) + x).square().sum()


def deep_schedule() -> tuple[Schedule, dict[str, Tensor]]:
    """Rows over the first axis; the values that enter."""
    torch.manual_seed(0)
    model, x = Deep(), torch.randn(8, 16, dtype=torch.float64)
    graph, where = capture(model, (x,), mode="train").graph, machine("1")
    chosen = {}
    for op in graph.ops:
        of_op = [graph.tensors[name] for name in (*op.inputs, *op.outputs)]
        chosen[op.name] = strategies(find_rule(op, graph.tensors), of_op, where.mesh.sizes)[0]
    whole = {item.tensor: ShardingSpec.replicated(len(graph.tensors[item.tensor].shape)) for item in graph.inputs}
    held = {**dict(model.named_parameters()), "x": x}
    return make_schedule(graph, Assignment(whole, chosen), where), {item.tensor: held[item.name].detach() for item in graph.inputs}


def test_a_step_is_the_same_with_less_memory_and_fewer_passes() -> None:
    schedule, values = deep_schedule()
    peaks, found = {}, {}
    for in_place in (False, True):
        executable = bind(schedule, LockstepRanks(schedule.machine.mesh), torch.device("cpu"), in_place=in_place)
        current = {name: tensor.clone() for name, tensor in values.items()}
        with torch.no_grad(), LiveMemory(list(current.values())) as live:
            executable.forward([current])
            executable.backward([current])
        peaks[in_place] = live.peak
        found[in_place] = [current[value] for _, value in schedule.outputs]
        assert all(current[name].equal(tensor) for name, tensor in values.items()), "inputs are never written"
    torch.testing.assert_close(found[True], found[False], rtol=1e-12, atol=1e-12)
    assert peaks[True] <= memory(schedule, "none").peak <= peaks[False]


def test_backward_may_run_twice_on_what_forward_left() -> None:
    schedule, values = deep_schedule()
    executable = bind(schedule, LockstepRanks(schedule.machine.mesh), torch.device("cpu"))
    current = dict(values)
    executable.forward([current])
    gradients = [value for output, value in schedule.outputs if output.kind == "gradient"]
    twice = []
    for _ in range(2):
        after = dict(current)
        executable.backward([after])
        twice.append([after[value].clone() for value in gradients])
    torch.testing.assert_close(twice[0], twice[1], rtol=0, atol=0)
    torch.testing.assert_close(simulate(schedule, values).outputs[1:], tuple(twice[0]), rtol=1e-12, atol=1e-12)
