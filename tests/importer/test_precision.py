"""Parameters that compute in another dtype: where they are converted, and their gradients back."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autopar import zoo
from autopar.errors import CaptureError
from autopar.graph import CONVERSION, Graph
from autopar.importer import capture_graph, capturing
from autopar.search.baselines.checkpointing import full_policy
from autopar.search.folding.fold import fold_layers

DEPTH = 7


def captured(compute_dtype: str | None = "bfloat16") -> Graph:
    made = zoo.build("gpt2", layers=DEPTH, width=32, heads=2, batch=4, seq=16, vocab=64, device="meta")
    return capture_graph(made.model, made.args, made.kwargs, loss=made.loss, loss_args=made.loss_args, compute_dtype=compute_dtype)


@pytest.fixture(scope="module")
def graph() -> Graph:
    return captured()


def test_parameters_are_converted_before_all_else_in_the_order_of_their_readers(graph: Graph) -> None:
    names = {item.tensor: item.name for item in graph.of_kind("parameter")}
    leading = graph.ops[: len(names)]
    assert {op.name for op in leading} == graph.prepared and {op.inputs[0] for op in leading} == set(names)
    assert all(op.module == names[op.inputs[0]].rpartition(".")[0] for op in leading)
    read = [graph.consumers[op.outputs[0]][0][0] for op in leading]
    assert read == sorted(read)


def test_gradients_are_converted_as_soon_as_they_are_made(graph: Graph) -> None:
    leaving = {output.tensor: owner for output, owner in graph.owners.items() if output.kind == "gradient"}
    names = {item.tensor: item.name for item in graph.of_kind("parameter")}
    widened = [(index, op) for index, op in enumerate(graph.ops) if op.target == CONVERSION and op.outputs[0] in leaving]
    assert len(widened) == len(leaving)
    for index, op in widened:
        assert op.module == names[leaving[op.outputs[0]]].rpartition(".")[0]
        maker = graph.producer[op.inputs[0]]
        between = graph.ops[graph.ops.index(maker) + 1 : index]
        assert all(other.target == CONVERSION for other in between), "others of what the same operator makes at most"


def test_layers_are_alike_with_their_conversions(graph: Graph) -> None:
    folding, whole = fold_layers(graph), fold_layers(captured(None))
    assert folding is not None and whole is not None
    assert [len(folding.group.repeats), len(folding.group.repeats[1])] == [DEPTH, len(whole.group.repeats[1]) + 2 * 16]


def test_what_is_made_of_parameters_is_not_made_again_with_its_layer(graph: Graph) -> None:
    parameters = {item.tensor for item in graph.of_kind("parameter")}
    again = full_policy(graph)
    assert again and not any(graph.op[name].inputs and parameters.issuperset(graph.op[name].inputs) for name in again)


def test_the_short_trace_converts_where_the_full_one_does(graph: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capturing, "_chains", lambda *given: ())
    whole = captured()
    assert graph == whole and list(graph.tensors) == list(whole.tensors)


class Narrowing(nn.Module):
    """It converts its parameters itself, where it uses them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.other = nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        found = (x @ x).bfloat16() @ self.weight.bfloat16()
        return (found.relu() @ self.other.bfloat16()).float().sum()


@pytest.mark.parametrize(("mode", "moved"), [("train", 2), ("inference", 0)])
def test_what_a_model_converts_itself_is_moved_where_backward_needs_it_anyhow(mode: str, moved: int) -> None:
    graph = capture_graph(Narrowing(), (torch.ones(4, 4),), mode=mode)
    assert len(graph.prepared) == moved
    assert sum(op.target == CONVERSION and op.module == "" and op.phase == "forward" for op in graph.ops) == 4


class Averaging(nn.Module):
    """Keeps a mean of its activations, in whatever dtype they are made."""

    def __init__(self, narrows: torch.dtype | None = None) -> None:
        super().__init__()
        self.narrows, self.linear = narrows, nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.mean = y.detach().mean(0).to(self.narrows or y.dtype)
        return (y - self.mean).square().mean()


@pytest.mark.parametrize("compute_dtype", ["bfloat16", "autocast-bfloat16"])
def test_what_becomes_a_buffer_is_converted_from_the_dtype_that_the_plan_computes_in(compute_dtype: str) -> None:
    graph = capture_graph(Averaging(), (torch.randn(8, 4),), compute_dtype=compute_dtype)
    (new,) = [output.tensor for output in graph.outputs if output.kind == "buffer"]
    read = [graph.tensors[name].dtype for name in graph.producer[new].inputs]
    assert (graph.producer[new].target, read, graph.tensors[new].dtype) == ("aten.copy.default", ["float32", "bfloat16"], "float32")


@pytest.mark.parametrize("compute_dtype", [None, "bfloat16", "autocast-bfloat16"])
def test_what_a_model_itself_narrows_becomes_no_buffer(compute_dtype: str | None) -> None:
    with pytest.raises(CaptureError, match="the buffer mean another dtype: float32 becomes float16"):
        capture_graph(Averaging(torch.float16), (torch.randn(8, 4),), compute_dtype=compute_dtype)
