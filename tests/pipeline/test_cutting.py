"""The joint graph cut into stages: each operator in one stage, what crosses, what is copied, tied weights."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

import autopar
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
}


def whole_and_stages(name: str) -> tuple[Graph, Stages]:
    _, _, graph = capture(name, 4)
    return graph, cut_graph(graph, CUTS[name])


@pytest.mark.parametrize("name", MODELS)
def test_every_operator_that_reads_weights_and_inputs_is_in_one_stage(name: str) -> None:
    graph, stages = whole_and_stages(name)
    count = Counter(op.name for stage in stages.graphs for op in stage.ops)
    weights = {item.tensor for item in graph.of_kind("parameter")}
    for op in graph.ops:
        reads = weights.intersection(op.inputs)
        if op.phase == "forward" and reads and not weights.issuperset(op.inputs):
            assert count[op.name] == 1, op
    assert all(count[op.name] <= 1 for op in graph.ops if op.phase == "backward" and op.inputs and op.target != "aten.add.Tensor")


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
