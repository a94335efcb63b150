"""Weights that are cut into blocks are captured in blocks, all others as they are; what is computed stays the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autopar.importer import capture
from tests import fused
from tests.importer.test_capture import run

BLOCKS = {
    "layer": {"qkv.0.weight": (0, 3), "qkv.0.bias": (0, 3), "gate_up.0.weight": (0, 2)},
    "vision": {"qkv.weight": (0, 3), "qkv.bias": (0, 3)},
    "rows": {"weight": (1, 3), "bias": (0, 3)},
    "cell": {"given.weight": (0, 4), "given.bias": (0, 4), "held.weight": (0, 4), "held.bias": (0, 4)},
    "attention": {"attention.in_proj_weight": (0, 3), "attention.in_proj_bias": (0, 3)},
    "cross": {"attention.in_proj_weight": (0, 3), "attention.in_proj_bias": (0, 3)},
}


@pytest.mark.parametrize("name", fused.MODELS)
def test_fused_weights_are_in_blocks_and_compute_the_same(name: str) -> None:
    torch.manual_seed(0)
    model, x = fused.MODELS[name](), fused.x()
    captured = capture(model, (x,), loss=fused.loss)
    graph = captured.graph
    found = {item.name: (item.blocks.dim, item.blocks.count) for item in graph.inputs if item.blocks is not None}
    assert found == BLOCKS[name]
    for item in graph.of_kind("parameter"):
        assert item.own_shape(graph.tensors[item.tensor].shape) == tuple(model.get_parameter(item.name).shape)
    fused.loss(model(x)).backward()
    results = run(captured, model, {"x": x})
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(results["gradient", name], parameter.grad)


def test_mixed_precision_and_inference_have_blocks_too() -> None:
    model, x = fused.Layer(), fused.x()
    for graph in (
        capture(model, (x,), loss=fused.loss, compute_dtype="bfloat16").graph,
        capture(model, (x,), mode="inference").graph,
    ):  # fmt: skip
        assert {item.name for item in graph.inputs if item.blocks} == set(BLOCKS["layer"])


def test_layers_passed_over_have_the_blocks_of_the_others() -> None:
    model = nn.Sequential(nn.Sequential(*(fused.Layer() for _ in range(7))))
    graph = capture(model, (fused.x(),), loss=fused.loss).graph
    assert sum(item.blocks is not None for item in graph.inputs) == 7 * len(BLOCKS["layer"])
    plain = {"0.3.qkv.0.weight": frozenset({0})}
    graph = capture(model, (fused.x(),), loss=fused.loss, plain=plain).graph
    assert sum(item.blocks is not None for item in graph.inputs) == 7 * len(BLOCKS["layer"]) - 2, "nor its bias, which is added to that"


class Fn(nn.Module):
    def __init__(self, cut: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.cut = nn.Linear(32, 96, bias=False), cut

    def forward(self, x: Tensor) -> Tensor:
        return self.cut(self.up(x))


def _read_whole(y: Tensor) -> Tensor:
    a, b, c = y.chunk(3, -1)
    return a * b + c + torch.softmax(y, -1)[..., :32]


def _unequal(y: Tensor) -> Tensor:
    a, b = y.split([64, 32], -1)
    return a[..., :32] * b


def _within_heads(y: Tensor) -> Tensor:
    a, b, c = y.view(4, 8, 8, 12).chunk(3, -1)
    return a * b + c


def _one_part(y: Tensor) -> Tensor:
    return y[..., :32]


def _in_place(y: Tensor) -> Tensor:
    a, b, c = torch.relu_(y).chunk(3, -1)
    return a * b + c


def _normalised(y: Tensor) -> Tensor:
    a, b, c = nn.functional.layer_norm(y, (96,)).chunk(3, -1)
    return a * b + c


@pytest.mark.parametrize("cut", [_read_whole, _unequal, _within_heads, _one_part, _in_place, _normalised])
def test_what_is_not_cut_into_blocks_alone_stays_as_it_is(cut: Callable[[Tensor], Tensor]) -> None:
    model, x = Fn(cut), fused.x()
    captured = capture(model, (x,), loss=fused.loss)
    assert not any(item.blocks for item in captured.graph.inputs)
    fused.loss(model(x)).backward()
    torch.testing.assert_close(run(captured, model, {"x": x})["gradient", "up.weight"], model.up.weight.grad)


def test_a_weight_that_two_cut_otherwise_stays_as_it_is() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(32, 96, bias=False), nn.Linear(32, 96, bias=False)
            self.two.weight = self.one.weight

        def forward(self, x: Tensor) -> Tensor:
            a, b, c = self.one(x).chunk(3, -1)
            d, e = self.two(x).chunk(2, -1)
            return (a * b + c).sum(-1) + (d * e).sum(-1)

    assert not any(item.blocks for item in capture(Tied(), (fused.x(),), loss=fused.loss).graph.inputs)


def test_hooks_and_names_keep_a_weight_as_it_is() -> None:
    model = fused.Layer()
    model.qkv[0].weight.register_hook(lambda gradient: gradient * 2)
    graph = capture(model, (fused.x(),), loss=fused.loss, plain={"gate_up.0.weight": frozenset({0})}).graph
    assert not any(item.blocks for item in graph.inputs)
    graph = capture(fused.Layer(), (fused.x(),), loss=fused.loss, plain={"gate_up.0.weight": frozenset({1})}).graph
    assert {item.name for item in graph.inputs if item.blocks} == set(BLOCKS["layer"])
