"""What a person would expect of the roofline model on an H100: data parallel, sharded weights, Megatron columns and rows."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

from autopar.cost_models import Machine, Mesh, load_hardware
from autopar.errors import InfeasibleError, UsageError
from autopar.graph import Graph
from autopar.importer import capture_graph
from autopar.schedule import Schedule
from autopar.schedule.collectives import Part
from autopar.search import SearchResult, find_plan


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, width: int, depth: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def graph_of(width: int, batch: int) -> Graph:
    with torch.device("meta"):
        model, x = Net(width).to(torch.bfloat16), torch.empty(batch, width, dtype=torch.bfloat16)
    return capture_graph(model, (x,), {}, mode="train", loss=None, loss_args=())


def machine() -> Machine:
    return Machine(Mesh.parse("x=8"), load_hardware("h100-sxm"), "roofline")


def weights(found: SearchResult) -> dict[str, str]:
    graph = found.schedule.graph
    return {i.name: str(found.schedule.specs[i.tensor]) for i in graph.of_kind("parameter") if len(graph.tensors[i.tensor].shape) == 2}


def parts(schedule: Schedule) -> list[Part]:
    """What collectives do, value by value: how many share a call is not a matter of the plan."""
    return [part for call in schedule.calls for part in call.parts]


def test_small_weights_and_many_tokens_are_data_parallel() -> None:
    """Tokens stay where they are: only weights (kept split where their gathers hide), their gradients and the loss are communicated."""
    found = find_plan(graph_of(256, 65536), machine())
    graph = found.schedule.graph
    first = next(item for item in found.schedule.operations.values() if "x" in item.op.inputs)
    assert str(first.strategy.inputs[0]) == "S0 R"
    weight = {item.tensor for item in graph.of_kind("parameter")}
    gradient = {output.tensor for output in graph.outputs if output.kind == "gradient"}
    moved = parts(found.schedule)
    assert gradient <= {part.layout.tensor for part in moved}
    assert all(part.layout.tensor in weight | gradient or part.step.full_bytes == 2 * 2 for part in moved), "and the loss in float32"


def test_little_memory_shards_the_weights() -> None:
    graph = graph_of(256, 1024)
    plenty = find_plan(graph, machine())
    limit = plenty.memory.peak * 35 // 100
    little = find_plan(graph, machine(), memory_bytes=limit)
    assert little.memory.peak <= limit
    assert little.seconds >= plenty.seconds
    assert "R R" not in weights(little).values()


def test_large_weights_and_few_tokens_are_split_by_columns_and_rows() -> None:
    found = find_plan(graph_of(8192, 512), machine())
    assert found.gap < 0.05
    assert weights(found) == {
        "layers.0.up.weight": "S0 R",
        "layers.0.down.weight": "R S0",
        "layers.1.up.weight": "S0 R",
        "layers.1.down.weight": "R S0",
    }
    large = [part.step for part in parts(found.schedule) if part.step.full_bytes > 2**20]
    assert [step.kind for step in large] == ["all_reduce"] * 3, "4L - 1 reductions of two halves a layer, the first gradient is not needed"


def test_axes_of_size_one_change_nothing() -> None:
    graph = graph_of(1024, 4096)
    costs = [
        find_plan(graph, Machine(Mesh.parse(mesh), load_hardware("h100-sxm"), "roofline")).seconds for mesh in ("x=4", "x=1,y=4", "x=4,y=1")
    ]
    assert costs == pytest.approx([costs[0]] * 3, rel=1e-9)


def test_nothing_fits_says_what_would() -> None:
    with pytest.raises(InfeasibleError, match=r"least known to do is .*biggest at its peak"):
        find_plan(graph_of(1024, 4096), machine(), memory_bytes=2**20)


@pytest.mark.parametrize(
    ("pins", "words"),
    [
        ({"layers.9.up.weight": "R R"}, "names no parameter"),
        ({"layers.0.up.weight": "S0"}, "has 1 dims"),
        ({"layers.0.up.weight": "S3 R"}, "axis 3"),
        ({"input:y": "S0 R"}, "names no input"),
        ({"output:loss": "S0"}, "illegal"),
        ({"layers.0.up.weight": "R R +P0"}, "cannot be partial"),
        ({"layers.*.up.weight": "S0 R", "layers.0.up.weight": "R R"}, "disagree"),
    ],
)
def test_bad_pins(pins: dict[str, str], words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        find_plan(graph_of(256, 1024), machine(), constraints=pins)
    assert "\nhint: " in str(caught.value)


def test_pins_are_kept() -> None:
    graph = graph_of(1024, 4096)
    pins = {"layers.*.up.weight": "R S0", "input:x": "R S0", "module:layers.0": "S0 R"}
    found = find_plan(graph, machine(), constraints=pins)
    assert weights(found)["layers.0.up.weight"] == weights(found)["layers.1.up.weight"] == "R S0"
    assert str(found.schedule.specs["x"]) == "R S0"
    reads = [str(item.strategy.inputs[0]) for item in found.schedule.operations.values() if item.op.module == "layers.1.norm"]
    assert reads[0] == "S0 R"
    assert found.seconds >= find_plan(graph, machine()).seconds


def test_baselines_are_the_textbook_ones() -> None:
    """ddp reduces each gradient; fsdp gathers each weight twice and scatters its gradient; megatron reduces once a block and phase."""
    found = find_plan(graph_of(1024, 4096), machine())

    def counts(name: str) -> dict[tuple[str, str], int]:
        large = [part for part in parts(found.baselines[name].schedule) if part.step.full_bytes > 2**16]
        return dict(Counter((part.step.kind, part.layout.phase) for part in large))

    assert counts("ddp") == {("all_reduce", "backward"): 4}
    assert counts("zero2") == {("all_gather", "forward"): 4, ("reduce_scatter", "backward"): 4}
    assert counts("fsdp") == {("all_gather", "forward"): 4, ("all_gather", "backward"): 4, ("reduce_scatter", "backward"): 4}
    assert counts("megatron") == {("all_reduce", "forward"): 2, ("all_reduce", "backward"): 1}, "the first input needs no gradient"
