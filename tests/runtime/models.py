"""Small models for the runtime's tests: the zoo in float64, and a few that hold what the zoo does not."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from autopar import zoo
from autopar.importer import Capture, capture
from autopar.verify.trials import Case, Trial, run_single

SIZES: dict[str, dict[str, str]] = {
    "mlp": {},
    "gpt2": {"dropout": "0.1", "width": "32", "layers": "1"},
    "llama3": {"width": "64", "hidden": "64", "layers": "1"},
    "resnet": {"image": "16", "blocks": "1-1"},
    "moe": {"width": "32", "layers": "1"},
}


@dataclass(frozen=True)
class Example:
    """A captured model with values, and what it gives on one device."""

    model: nn.Module
    captured: Capture
    case: Case
    single: Trial


@lru_cache
def zoo_example(name: str, mode: str) -> Example:
    """A zoo model in float64; sizes that axes of 2, 4 and 8 divide."""
    torch.manual_seed(0)
    target = zoo.build(name, mode=mode, dtype="float64", **SIZES[name])
    return example(target.model, target.args, mode)


def example(model: nn.Module, args: tuple[Any, ...], mode: str, loss: Any = None, loss_args: tuple[Any, ...] = ()) -> Example:
    """A model captured, and run once on one device."""
    import copy

    captured = capture(model, args, mode=mode, loss=loss, loss_args=loss_args)
    generator = torch.Generator().manual_seed(1)
    tangents = {
        item.name: torch.randn(captured.graph.tensors[item.tensor].shape, generator=generator, dtype=torch.float64)
        for item in captured.graph.of_kind("tangent")
    }
    case = Case(captured.graph, model, args, {}, loss, loss_args, tangents, 1)
    return Example(model, captured, case, run_single(Case(**{**vars(case), "model": copy.deepcopy(model)})))


class Sixes(nn.Module):
    """Dims that axes of 2, 3 and 6 divide, two outputs and no loss, a buffer that mutates, a constant, an input with gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(12, 24, dtype=torch.float64)
        self.norm = nn.BatchNorm1d(24, dtype=torch.float64)
        self.down = nn.Linear(24, 6, dtype=torch.float64)
        self.scale = torch.arange(1, 7, dtype=torch.float64)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        self.calls += 1
        hidden = torch.relu(self.norm(self.up(x)))
        return {"hidden": hidden.cumsum(0), "out": torch.softmax(self.down(hidden), -1) * self.scale}


@lru_cache
def sixes() -> Example:
    """See ``Sixes``; batch 12."""
    torch.manual_seed(0)
    return example(Sixes(), (torch.randn(12, 12, dtype=torch.float64, requires_grad=True),), "train")


class Odds(nn.Module):
    """Dims that no axis divides: a vocabulary of 63 that is read and predicted with one weight, 9 wide, 7 rows; cross entropy, a norm
    without a weight, variance, maxima, a buffer, an average."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(63, 9, dtype=torch.float64)
        self.up = nn.Linear(9, 15, dtype=torch.float64)
        self.down = nn.Linear(15, 9, dtype=torch.float64)
        self.norm = nn.BatchNorm1d(9, dtype=torch.float64)
        self.register_buffer("seen", torch.zeros(63, dtype=torch.float64))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens)
        x = x + self.down(nn.functional.gelu(self.up(x)))
        x = self.norm(x.transpose(1, 2)).transpose(1, 2) * x.var(-1, keepdim=True)
        self.seen += 0.5
        logits = x @ self.tokens.weight.t() + self.seen
        loss = nn.functional.cross_entropy(logits.transpose(1, 2), targets)
        return loss + x.mean() + x.amax(1).sum() + nn.functional.mse_loss(x[..., 1:], x[..., :-1])


@lru_cache
def odds() -> Example:
    """See ``Odds``; 7 rows of 5."""
    torch.manual_seed(0)
    args = torch.randint(63, (7, 5)), torch.randint(63, (7, 5))
    return example(Odds(), args, "train")
