"""Small models to cut, and steps of theirs to compare."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

import autopar
from autopar import zoo
from autopar.cost_models import Machine, Mesh
from autopar.graph import Graph
from autopar.runtime.steps.simulation import simulate
from autopar.search import find_plan
from benchmarks.models import stressed


class EncoderDecoder(nn.Module):
    """Decoder layers read the encoder's end, and the first of them the encoder's middle: values cross more than one boundary."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.enter = nn.Linear(width, width)
        self.encoder = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.decoder = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = first = self.enter(x)
        for layer in self.encoder:
            x = layer(x).tanh()
        out = first
        for layer in self.decoder:
            out = layer(torch.cat([out, x], -1)).tanh() + first
        return ((out - y) ** 2).mean()


class Masked(nn.Module):
    """A mean over the rows that a mask keeps; positions and the mask are made without parameters."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor, lengths: Tensor, targets: Tensor) -> Tensor:
        kept = (torch.arange(x.shape[1]) < lengths.unsqueeze(1)).to(x.dtype).unsqueeze(-1)
        for layer in self.layers:
            x = x + layer(x).relu() * kept
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten(), ignore_index=-1)


class Undoing(nn.Linear):
    """Undoes what the layer before has done with draws, and does it again behind it."""

    def forward(self, x: Tensor, noise: Tensor, turned: Tensor) -> Tensor:  # type: ignore[override]
        x = super().forward(torch.where(turned, -x, x - noise))
        return torch.where(turned, -x, x + noise)


class Drawn(nn.Module):
    """Draws do not matter where all layers read the same: what they do is undone. They choose rows of a mean, few of rows that are alike.

    Numbers, a mask, an order and a scale that has a gradient are read in several layers.
    """

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.layers = nn.ModuleList(Undoing(width, width, bias=False) for _ in range(4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        noise, turned, scale = torch.randn_like(x), torch.rand_like(x) < 0.5, self.scale + torch.rand((), dtype=x.dtype)
        order, counted = torch.rand(x.shape[:2]).argsort(1), (torch.rand(x.shape[:1]) < 0.15).to(x.dtype)
        x = scale * x.gather(1, order.unsqueeze(-1).expand_as(x))
        x = torch.where(turned, -x, x + noise)
        for layer in self.layers:
            x = layer(x, noise, turned)
        x = torch.where(turned, -x, x - noise) / scale
        x = x.gather(1, order.argsort(1).unsqueeze(-1).expand_as(x))
        return (((x - y) ** 2).mean((1, 2)) * counted).sum() / counted.sum()


class RelativeBias(nn.Module):
    """Layers of attention that share a learned bias by the distance, made of the weight alone."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.enter, self.bias = nn.Linear(width, width), nn.Embedding(32, 2)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.head = nn.Linear(width, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x, place = self.enter(x), torch.arange(x.shape[1])
        bias = self.bias((place[None] - place[:, None]).clamp(-16, 15) + 16).permute(2, 0, 1)[None]
        for layer in self.layers:
            heads = layer(x).view(*x.shape[:2], 2, -1).transpose(1, 2)
            x = x + ((heads @ heads.transpose(-1, -2) + bias).softmax(-1) @ heads).transpose(1, 2).reshape(x.shape)
        return nn.functional.cross_entropy(self.head(x.mean(1)), y)


def _gpt(tied: bool) -> tuple[Any, tuple[Any, ...]]:
    target = zoo.build("gpt2", layers=4, batch=8, seq=8, width=16, heads=4, vocab=32, dtype="float64")
    model = zoo.materialize(target.model)
    if not tied:
        model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    return model, (torch.randint(0, 32, (8, 8)), torch.randint(0, 32, (8, 8)))


def _zoo(name: str, **keys: Any) -> tuple[Any, tuple[Any, ...]]:
    target = zoo.build(name, layers=4, batch=8, seq=8, dtype="float64", vocab=32, **keys)
    return zoo.materialize(target.model), (torch.randint(0, 32, (8, 8)), torch.randint(0, 32, (8, 8)))


def _encoder_decoder() -> tuple[Any, tuple[Any, ...]]:
    return EncoderDecoder().double(), (torch.randn(8, 4, 8).double(), torch.randn(8, 4, 8).double())


def _masked() -> tuple[Any, tuple[Any, ...]]:
    targets = torch.randint(0, 5, (8, 6))
    targets[:3, 2:] = -1
    return Masked().double(), (torch.randn(8, 6, 8).double(), torch.randint(1, 6, (8,)), targets)


def _drawn() -> tuple[Any, tuple[Any, ...]]:
    return Drawn().double(), (torch.randn(1, 4, 8).double().repeat(16, 1, 1), torch.randn(1, 4, 8).double().repeat(16, 1, 1))


def _relative_bias() -> tuple[Any, tuple[Any, ...]]:
    return RelativeBias().double(), (torch.randn(8, 6, 16).double(), torch.randint(0, 4, (8,)))


MODELS: dict[str, Callable[[], tuple[Any, tuple[Any, ...]]]] = {
    "gpt tied": lambda: _gpt(True),
    "gpt untied": lambda: _gpt(False),
    "llama": lambda: _zoo("llama3", width=16, heads=4, kv_heads=2, hidden=32),
    "moe": lambda: _zoo("moe", width=16, heads=4, hidden=16, experts=4),
    "encoder-decoder": _encoder_decoder,
    "masked": _masked,
    "drawn": _drawn,
    "relative bias": _relative_bias,
}


def build(name: str) -> tuple[Any, tuple[Any, ...]]:
    """A model with values, and the arguments of a call of its that returns the loss."""
    torch.manual_seed(0)
    return MODELS[name]()


def capture(name: str, microbatches: int) -> tuple[Any, tuple[Any, ...], Graph]:
    """What ``build`` gives, anew each time, and its graph, which nothing changes."""
    return *build(name), _graph_of(name, microbatches)


@cache
def _graph_of(name: str, microbatches: int) -> Graph:
    model, args = build(name)
    return autopar.capture(model, args, microbatches=microbatches)


def values_of(graph: Graph, model: Any, args: tuple[Any, ...]) -> dict[str, Tensor]:
    """A whole tensor for each graph input, by tensor name."""
    held = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}
    given = dict(zip((item.name for item in graph.of_kind("input")), args, strict=True))
    return {item.tensor: (given if item.kind == "input" else held)[item.name].detach() for item in graph.inputs}


def machine(mesh: str, *, stress: bool = False) -> Machine:
    from autopar.options import resolve_hardware

    return Machine(Mesh.parse(mesh), stressed() if stress else resolve_hardware(None))


def run_on_one(graph: Graph, values: dict[str, Tensor]) -> dict[tuple[str, str], Tensor]:
    """Outputs and gradients of the whole graph on one rank, by kind and name."""
    schedule = find_plan(graph, machine("1"), baselines=False, effort="low").schedule
    found = simulate(schedule, values)
    return {(output.kind, output.name): tensor for (output, _), tensor in zip(schedule.outputs, found.outputs, strict=True)}
