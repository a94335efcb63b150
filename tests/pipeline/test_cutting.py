"""The joint graph cut into stages: each operator in one stage, what crosses, what is copied, tied weights."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.dialect.library import STILL
from autopar.errors import UsageError
from autopar.graph import DIVISOR, Graph
from autopar.pipeline import Boundary, Stages, cut_graph, find_units
from tests.pipeline.models import MODELS, capture

CUTS = {
    "gpt tied": ("layers.1", "layers.3"),
    "gpt untied": ("layers.2", "norm"),
    "llama": ("layers.1", "layers.2"),
    "moe": ("layers.1", "layers.3"),
    "encoder-decoder": ("encoder.1", "decoder.1"),
    "masked": ("layers.1", "head"),
    "drawn": ("layers.1", "layers.3"),
    "relative bias": ("layers.1", "layers.3"),
}

JOINING = {"aten.add.Tensor", "aten.sum.dim_IntList", "aten.squeeze.dim", "aten.permute.default", "autopar.embedding_backward.default"}
"""Operators of backward behind which, or before which, gradients of the bias's weight are summed."""


def whole_and_stages(name: str) -> tuple[Graph, Stages]:
    _, _, graph = capture(name, 4)
    return graph, cut_graph(graph, CUTS[name])


@pytest.mark.parametrize("name", MODELS)
def test_every_operator_that_reads_weights_and_inputs_is_in_one_stage(name: str) -> None:
    graph, stages = whole_and_stages(name)
    count = Counter(op.name for stage in stages.graphs for op in stage.ops)
    weights, given = {item.tensor for item in graph.of_kind("parameter")}, {item.tensor for item in graph.of_kind("input")}
    for op in graph.ops:
        if op.phase == "forward" and not given.isdisjoint(op.inputs):
            given.update(op.outputs)
            assert count[op.name] == 1 or weights.isdisjoint(op.inputs), op
    apart = JOINING if name == "relative bias" else {"aten.add.Tensor"}
    assert all(count[op.name] <= 1 for op in graph.ops if op.phase == "backward" and op.inputs and op.target not in apart)


@pytest.mark.parametrize("name", MODELS)
def test_each_stage_is_closed(name: str) -> None:
    """It reads what it holds, makes or receives; forward stands before backward; what crosses is sent by one stage to the other."""
    _, stages = whole_and_stages(name)
    for number, stage in enumerate(stages.graphs):
        there = {item.tensor for item in stage.inputs}
        for op in stage.ops:
            assert there.issuperset(op.inputs), op
            there.update(op.outputs)
        assert there.issuperset(output.tensor for output in stage.outputs)
        received = {item.tensor for item in stage.inputs if item.is_received}
        sent = {item.tensor for item in stage.outputs if item.is_sent}
        assert received == {one.tensor for one in stages.boundaries if one.target == number}
        assert sent == {one.tensor for one in stages.boundaries if one.source == number}
        assert [op.phase for op in stage.ops] == sorted((op.phase for op in stage.ops), reverse=True)


@pytest.mark.parametrize("name", MODELS)
def test_gradients_leave_where_their_parameters_are(name: str) -> None:
    graph, stages = whole_and_stages(name)
    found = Counter[str]()
    for stage in stages.graphs:
        held = {item.name for item in stage.of_kind("parameter")}
        mine = [output.name for output in stage.outputs if output.kind == "gradient"]
        assert held.issuperset(mine)
        found.update(mine)
    tied = {next(item.name for item in graph.inputs if item.tensor == name): len(at) for name, at in stages.tied.items()}
    assert found == Counter({name: tied.get(name, 1) for name in graph.gradients.values()})


def test_a_chain_crosses_once_each_way() -> None:
    _, stages = whole_and_stages("llama")
    assert [(one.source, one.target, one.half) for one in stages.boundaries] == [
        (0, 1, "forward"), (1, 0, "backward"), (1, 2, "forward"), (2, 1, "backward"),
    ]  # fmt: skip


def test_a_tied_weight_is_in_each_stage_that_reads_it() -> None:
    _, stages = whole_and_stages("gpt tied")
    assert stages.tied == {"tokens.weight": (0, 2)}


def test_skips_go_straight_to_each_reader() -> None:
    _, stages = whole_and_stages("encoder-decoder")
    assert {(one.source, one.target) for one in stages.boundaries} >= {(0, 1), (0, 2), (1, 2), (2, 1), (1, 0)}


def test_masks_and_positions_are_copied() -> None:
    _, stages = whole_and_stages("masked")
    making = [{op.target for op in stage.ops} for stage in stages.graphs]
    assert "aten.arange.default" in making[0] and "aten.arange.default" in making[1]
    assert all(any(output.name == DIVISOR for output in stage.outputs) for stage in stages.graphs)


def test_what_is_drawn_is_made_in_one_stage() -> None:
    """The first that reads it; what is computed from it too."""
    graph, stages = whole_and_stages("drawn")
    count = Counter(op.name for stage in stages.graphs for op in stage.ops)
    draws = {op.name for op in graph.ops if op.target in STILL}
    made = [{op.name for op in stage.ops} & draws for stage in stages.graphs]
    assert len(draws) == 5 and made == [draws, set(), set()]
    found = set(draws)
    for op in graph.ops:
        if op.phase == "forward" and any(graph.producer[name].name in found for name in op.inputs if name in graph.producer):
            found.add(op.name)
            assert count[op.name] == 1, op
    crossing = {one.tensor for one in stages.boundaries if one.half == "forward"}
    assert {"bool", "int64", "float64"} == {graph.tensors[name].dtype for name in crossing}


class Late(nn.Module):
    """Draws once for all layers at the beginning, and each layer reads one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        draws = [2 * torch.rand_like(x) for _ in self.layers]
        for layer, drawn in zip(self.layers, draws, strict=True):
            x = layer(x) * drawn
        return x.sum()


def test_what_one_stage_reads_is_drawn_there() -> None:
    stages = cut_graph(autopar.capture(Late(), (torch.randn(8, 4),), microbatches=2), ["layers.1", "layers.2"])
    assert [sum(op.target in STILL for op in stage.ops) for stage in stages.graphs] == [1, 1, 1]
    assert len([one for one in stages.boundaries if one.half == "forward"]) == 2


class Counting(nn.Module):
    """A mean over the rows that the model itself chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh()
        kept = (x.detach().mean(-1) > 0).to(x.dtype)
        return ((x**2).mean(-1) * kept).sum() / kept.sum()


def test_a_mean_over_what_one_stage_counts_is_refused() -> None:
    """The others do not know what a microbatch weighs."""
    graph = autopar.capture(Counting(), (torch.randn(8, 4),), microbatches=2)
    assert graph.accumulation.divisor
    with pytest.raises(UsageError, match="a mean over a number that the model computes with its parameters"):
        cut_graph(graph, ["layers.1"])


def test_equal_layers_of_a_stage_stay_a_group() -> None:
    _, _, graph = capture("llama", 4)
    assert [len(group) for stage in cut_graph(graph, ["layers.2"]).graphs for group in stage.groups] == [2, 2]


def test_units_are_layers_and_the_modules_outside() -> None:
    _, _, graph = capture("llama", 4)
    assert list(find_units(graph)) == ["tokens", "layers.0", "layers.1", "layers.2", "layers.3", "norm", "head"]


@pytest.mark.parametrize(
    ("cut", "words"),
    [
        (["layers.7"], "cannot begin with layers.7: no operator"),
        (["layers.2", "layers.1"], "layers.1, which does not run after layers.2"),
        (["tokens"], "tokens, which does not run after the model's first operator"),
    ],
)
def test_a_cut_that_the_model_does_not_allow(cut: list[str], words: str) -> None:
    _, _, graph = capture("llama", 4)
    with pytest.raises(UsageError, match=words):
        cut_graph(graph, cut)


class Twice(nn.Module):
    """One weight of two layers, of which the first reads it squared: the gradients meet before the square's own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        square = self.first.weight * self.first.weight
        x = torch.tanh(x @ square)
        return torch.nn.functional.linear(self.second(x), square).sum()


def test_gradients_of_a_tied_weight_that_cannot_be_taken_apart() -> None:
    graph = autopar.capture(Twice(), (torch.randn(8, 4),), microbatches=2)
    with pytest.raises(UsageError, match=r"first\.weight is read in stages \[0, 1\]"):
        cut_graph(graph, ["second"])


def test_a_boundary_knows_its_half() -> None:
    assert (Boundary("x", 0, 2).half, Boundary("x", 2, 0).half) == ("forward", "backward")
