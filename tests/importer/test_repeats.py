"""Layers passed over in the trace and put back, against the full trace, which is the oracle: the graphs are equal, names included."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from autopar.cli.target import load_target
from autopar.graph import Graph
from autopar.importer import capture_graph, capturing
from autopar.importer.repeats import Chain

DEPTH = 7


@pytest.fixture
def chains(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Chain | None]]:
    """The chains that captures look for: None where there is none."""
    seen: list[Chain | None] = []
    find = capturing._chain
    monkeypatch.setattr(capturing, "_chain", lambda *given: (seen.append(find(*given)), seen[-1])[1])
    yield seen


def full(monkeypatch: pytest.MonkeyPatch, *args: object, **kwargs: object) -> Graph:
    with monkeypatch.context() as patch:
        patch.setattr(capturing, "_chain", lambda *given: None)
        return capture_graph(*args, **kwargs)  # type: ignore[arg-type]


def same(one: Graph, other: Graph) -> bool:
    return one == other and list(one.tensors) == list(other.tensors) and one.sha256 == other.sha256


@pytest.mark.parametrize(
    ("target", "mode"),
    [
        (f"zoo:gpt2,layers={DEPTH},width=32,heads=2,batch=4,seq=16,vocab=64", "train"),
        (f"zoo:llama3,layers={DEPTH}", "train"),
        (f"zoo:llama3,layers={DEPTH}", "inference"),
        (f"zoo:moe,layers={DEPTH}", "train"),
    ],
)
def test_the_graph_is_that_of_a_full_trace(monkeypatch, chains: list[Chain | None], target: str, mode: str) -> None:
    made = load_target(target, mode, device="meta")
    call = {"mode": mode, "loss": made.loss, "loss_args": made.loss_args}
    short = capture_graph(made.model, made.args, made.kwargs, **call)
    assert chains[0] is not None
    assert len(chains[0].modules) == DEPTH
    assert same(short, full(monkeypatch, made.model, made.args, made.kwargs, **call))
    assert not any("forward" in vars(part) for part in made.model.modules()), "the model is as it was"


class Layer(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.scale = 1.0

    def forward(self, x: Tensor, other: Tensor | float = 1.0) -> Tensor:
        return x + self.down(torch.relu(self.up(x))) * self.scale * other


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class Between(Net):
    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x)
            if index == 3:
                x = torch.tanh(x)
        return x.square().mean()


class Skips(Net):
    def forward(self, x: Tensor) -> Tensor:
        early = x
        for index, layer in enumerate(self.layers):
            x = layer(early if index == 4 else x)
            early = x if index == 1 else early
        return x.square().mean()


class Numbered(Net):
    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x, float(index))
        return x.square().mean()


class Twice(Net):
    def forward(self, x: Tensor) -> Tensor:
        for layer in (*self.layers, self.layers[3]):
            x = layer(x)
        return x.square().mean()


class Collects(Net):
    """Results of all layers add up in the end: nothing lies between the layers, and yet they are read."""

    def forward(self, x: Tensor) -> Tensor:
        found = []
        for layer in self.layers:
            x = layer(x)
            found.append(x)
        return torch.stack(found).square().mean()


class Tied(Net):
    def __init__(self) -> None:
        super().__init__()
        self.layers[3].up.weight = self.layers[2].up.weight


class Uneven(Net):
    def __init__(self) -> None:
        super().__init__()
        self.layers[3].scale = 0.5


class Frozen(Net):
    def __init__(self) -> None:
        super().__init__()
        self.layers[3].up.weight.requires_grad_(False)


class Dropping(Net):
    """Every dropout has a seed of its own."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.up = nn.Sequential(layer.up, nn.Dropout(0.1))


class Keeping(Net):
    """A table is made in the first call and kept: it is made in the trace all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.table = torch.arange(8.0).cos() if self.table is None else self.table
        x = x * self.table
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class Hooked(Net):
    """The gradient of one weight goes through a function."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[3].up.weight.register_hook(lambda gradient: 2 * gradient)


class Regularised(Net):
    """A weight of a layer between is read beside it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.layers[3].up.weight.square().sum()


class Counting(Net):
    """What modules hold is counted without a tensor being read."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * len(list(self.parameters())) / len(list(self.modules()))


KINDS = [Net, Between, Skips, Numbered, Twice, Collects, Tied, Uneven, Frozen, Dropping, Keeping, Hooked, Regularised, Counting]
PASSED_OVER = (Net, Collects, Regularised, Counting)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_forward_that_treats_layers_apart_is_traced_in_full(monkeypatch, chains: list[Chain | None], kind: type[Net]) -> None:
    x = torch.ones(4, 8)
    short = capture_graph(kind(), (x,), {}, mode="train")
    assert same(short, full(monkeypatch, kind(), (x,), {}, mode="train"))
    assert (chains[0] is not None) == (kind in PASSED_OVER), "what else reads layers is seen only when it is traced"


def test_a_loss_that_reads_a_weight_of_a_layer_is_traced_in_full(monkeypatch, chains: list[Chain | None]) -> None:
    model, x = Net(), torch.ones(4, 8)

    def loss(result: Tensor) -> Tensor:
        return result + model.layers[3].up.weight.square().sum()

    short = capture_graph(model, (x,), {}, mode="train", loss=loss)
    assert chains[0] is not None
    assert same(short, full(monkeypatch, model, (x,), {}, mode="train", loss=loss))
    assert all(len(list(layer.parameters())) == 4 for layer in model.layers), "the model is as it was"


def test_torch_sees_the_weights_of_the_layers_that_are_traced_alone(monkeypatch) -> None:
    seen: list[int] = []
    made = capturing.export
    monkeypatch.setattr(capturing, "export", lambda *a, **k: (found := made(*a, **k), seen.append(len(found.values)))[0])
    capture_graph(Net(), (torch.ones(4, 8),), {}, mode="train")
    assert seen == [4 * 4 + 1], "four layers of four weights, and the input"
