"""Layers passed over in the trace and put back, against the full trace, which is the oracle: the graphs are equal, names included."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from autopar.cli.target import load_target
from autopar.graph import CONVERSION, Graph
from autopar.importer import capture_graph, capturing
from autopar.importer.layers.repeats import Chain

DEPTH = 9


@pytest.fixture
def chains(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Chain | None]]:
    """The chains that captures look for: None where there is none."""
    seen: list[Chain | None] = []
    find = capturing._chains
    monkeypatch.setattr(capturing, "_chains", lambda *given: (found := find(*given), seen.extend(found or (None,)))[0])
    yield seen


def count_calls(monkeypatch: pytest.MonkeyPatch, module: object, name: str) -> list[object]:
    """An entry for each call of a function from now on."""
    seen: list[object] = []
    called = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *args, **kwargs: (seen.append(None), called(*args, **kwargs))[1])
    return seen


def full(monkeypatch: pytest.MonkeyPatch, *args: object, **kwargs: object) -> Graph:
    with monkeypatch.context() as patch:
        patch.setattr(capturing, "_chains", lambda *given: ())
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
    kind, depth = Layer, DEPTH

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.kind() for _ in range(self.depth))

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
    """Every dropout has a seed of its own, counted over the whole trace."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.up = nn.Sequential(layer.up, nn.Dropout(0.1))
        self.before = self.after = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        for layer in self.layers:
            x = layer(x)
        return self.after(x).square().mean()


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


class Indexed(Net):
    """Layers are numbered, and nobody asks for the number."""

    def __init__(self) -> None:
        super().__init__()
        for index, layer in enumerate(self.layers):
            layer.up.layer_idx = index


class EvenOnes(Indexed):
    """Every other layer does something else, as its number says: the traced ones look alike."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, 1.0 if layer.up.layer_idx in (1, DEPTH - 2) else 2.0)
        return x.square().mean()


class OwnNumber(Indexed):
    """A layer itself looks at its number."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.up.register_forward_hook(lambda up, given, result: result * 2 if up.layer_idx == 4 else result)


class Looks(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2.0 if getattr(self, "layer_idx", 0) == 4 else 1.0)


class LooksAtNumber(Net):
    def __init__(self) -> None:
        super().__init__()
        for index, layer in enumerate(self.layers):
            layer.up = Looks(8, 16)
            layer.up.layer_idx = index


class Turns(Net):
    """Two kinds of layers take turns."""

    depth = 2 * DEPTH

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers[1::2]:
            layer.scale = 0.5


class Masks(Net):
    """Equal layers are told one of two masks in turn."""

    depth = 2 * DEPTH

    def forward(self, x: Tensor) -> Tensor:
        masks = x.relu(), x.abs()
        for index, layer in enumerate(self.layers):
            x = layer(x, masks[index % 2])
        return x.square().mean()


class DenseFirst(Net):
    """The first layers are of another kind."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers[:2]:
            layer.scale = 0.5


class Pair(Layer):
    def forward(self, x: Tensor, other: Tensor | float = 1.0) -> tuple[Tensor, Tensor]:
        return super().forward(x, other), x.sum()


class Pairs(Net):
    """Layers return more than what the next is given."""

    kind = Pair

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x, _ = layer(x)
        return x.square().mean()


class Routers(Pairs):
    """What else layers return is asked for, of those that there are."""

    def forward(self, x: Tensor) -> Tensor:
        found = []
        for layer in self.layers:
            x, other = layer(x)
            found.append(other)
        return x.square().mean() + sum(other for other in found if other is not None)


class Handing(Layer):
    def forward(self, x: Tensor, other: Tensor | float = 1.0) -> tuple[Tensor, Tensor | float]:
        return super().forward(x, other), x.abs() if isinstance(other, float) else other


class Handed(Net):
    """The first layer makes what all the others hand on."""

    kind = Handing

    def forward(self, x: Tensor) -> Tensor:
        other: Tensor | float = 1.0
        for layer in self.layers:
            x, other = layer(x, other)
        return x.square().mean()


class Crossing(Layer):
    def forward(self, x: Tensor, other: Tensor | float = 1.0) -> tuple[Tensor, Tensor]:
        return super().forward(x, other), x.abs()


class TwoStreams(Handed):
    """Each layer reads two results of the one before."""

    kind, depth = Crossing, DEPTH + 3


class Biased(Layer):
    def __init__(self, width: int = 8) -> None:
        super().__init__(width)
        self.register_buffer("bias", torch.ones(width))

    def forward(self, x: Tensor, other: Tensor | float = 1.0) -> Tensor:
        return super().forward(x, other) + self.bias.to(x.dtype)


class Buffers(Net):
    kind = Biased


class Counted(Biased):
    def forward(self, x: Tensor, other: Tensor | float = 1.0) -> Tensor:
        self.bias += 1.0
        return super().forward(x, other)


class ChangedBuffers(Net):
    kind = Counted


class Widening(Layer):
    def forward(self, x: Tensor, other: Tensor | float = 1.0) -> Tensor:
        return super().forward(x.to(self.up.weight.dtype), other)


class Widens(Net):
    """The first layer is given half precision and returns float32."""

    kind = Widening

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.half())


class Two(Net):
    """An encoder and a decoder, whose layers read what came of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = nn.ModuleList(Layer() for _ in range(DEPTH - 1))
        for layer in self.decoder:
            layer.up = nn.Sequential(layer.up, nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for layer in self.layers:
            x = layer(x)
        for layer in self.decoder:
            y = layer(y, x)
        return y.square().mean()


KINDS = [
    Net, Between, Skips, Numbered, Twice, Collects, Tied, Uneven, Frozen, Dropping, Keeping, Hooked, Regularised, Counting, Two, Handed,
    TwoStreams, Indexed, EvenOnes, OwnNumber, LooksAtNumber, Turns, Masks, DenseFirst, Pairs, Routers, Buffers, ChangedBuffers, Widens,
]  # fmt: skip
WHOLE = {Collects, Regularised, Routers}
"""What else reads layers is seen only when it is traced."""
PASSED_OVER = dict.fromkeys([Net, Two, Counting, Indexed, Dropping, Pairs, Buffers], (0, 1, 9))
PASSED_OVER |= {Turns: (0, 2, 9), Masks: (0, 2, 9), DenseFirst: (2, 1, 7), Widens: (1, 1, 8), Handed: (1, 1, 8)}
"""First module, modules in a turn, and turns."""


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_forward_that_treats_layers_apart_is_traced_in_full(monkeypatch, chains: list[Chain | None], kind: type[Net]) -> None:
    x, traced = torch.ones(4, 8), count_calls(monkeypatch, capturing, "_traced")
    short = capture_graph(kind(), (x,), {}, mode="train")
    assert len(traced) == 1 + (kind in WHOLE)
    assert len(chains) == 1 + (kind is Two)
    assert same(short, full(monkeypatch, kind(), (x,), {}, mode="train"))
    chain = chains[0]
    if kind in PASSED_OVER or chain is None:
        assert PASSED_OVER.get(kind) == (chain and (chain.first, chain.length, chain.turns))
    else:
        assert kind in WHOLE


@pytest.mark.parametrize("mode", ["train", "inference"])
@pytest.mark.parametrize("kind", [Net, Turns, Buffers])
def test_half_precision_narrows_the_weights_of_all_layers(monkeypatch, chains: list[Chain | None], kind: type[Net], mode: str) -> None:
    x, call = torch.ones(4, 8), {"mode": mode, "compute_dtype": "bfloat16"}
    short = capture_graph(kind(), (x,), {}, **call)
    assert chains[0] is not None
    assert same(short, full(monkeypatch, kind(), (x,), {}, **call))
    assert sum(op.target == CONVERSION and op.name in short.prepared for op in short.ops) >= 4 * len(kind().layers)


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
