"""Captured graphs of the built-in models, run operator by operator, give what the models give: outputs, gradients, buffers."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from autopar import zoo
from autopar.graph import Graph
from autopar.importer import capture
from tests.importer.graph_interpreter import run_graph


def graph_values(graph: Graph, constants, model: nn.Module, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    state = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}
    values = {}
    for item in graph.inputs:
        match item.kind:
            case "input":
                values[item.tensor] = inputs[item.name]
            case "constant":
                values[item.tensor] = constants[item.name]
            case _:
                values[item.tensor] = state[item.name].detach()
    return values


@pytest.mark.parametrize("name", [name for name in zoo.names() if "-" not in name])
def test_training_graph_gives_loss_gradients_and_buffers(name):
    torch.manual_seed(0)
    target = zoo.build(name, dtype="float64")
    captured = capture(target.model, target.args, mode="train")
    model = copy.deepcopy(target.model)
    inputs = dict(zip([i.name for i in captured.graph.of_kind("input")], target.args, strict=True))
    tensors = run_graph(captured.graph, graph_values(captured.graph, captured.constants, model, inputs))
    loss = model(*target.args)
    loss.backward()
    gradients = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers())
    seen = set()
    for output in captured.graph.outputs:
        expected = {"output": loss, "gradient": gradients.get(output.name), "buffer": buffers.get(output.name)}[output.kind]
        expected = expected.grad if output.kind == "gradient" else expected
        torch.testing.assert_close(tensors[output.tensor], expected.detach(), rtol=1e-9, atol=1e-11, msg=lambda m, o=output: f"{o}: {m}")
        seen.add((output.kind, output.name))
    assert {n for k, n in seen if k == "gradient"} == {n for n, _ in model.named_parameters()}
    assert ("output", "loss") in seen


@pytest.mark.parametrize("name", [name for name in zoo.names() if "-" not in name])
def test_inference_graph_gives_outputs(name):
    torch.manual_seed(0)
    target = zoo.build(name, mode="inference", dtype="float64")
    captured = capture(target.model, target.args, mode="inference")
    inputs = dict(zip([i.name for i in captured.graph.of_kind("input")], target.args, strict=True))
    tensors = run_graph(captured.graph, graph_values(captured.graph, captured.constants, target.model, inputs))
    with torch.no_grad():
        expected = target.model.eval()(*target.args)
    (output,) = captured.graph.outputs
    torch.testing.assert_close(tensors[output.tensor], expected, rtol=1e-9, atol=1e-11)
    assert all(op.phase == "forward" for op in captured.graph.ops)
