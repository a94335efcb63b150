"""A state that goes from call to call in attributes is refused; what a call only leaves there, or makes again, is not."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import CaptureError


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.state: Tensor | None = None
        self.log: dict[str, Tensor] = {}
        self.seen: list[Tensor] = []


class Before(Layer):
    def forward(self, x: Tensor) -> Tensor:
        before, self.state = self.state, self.layer(x).detach()
        return self.state if before is None else self.layer(x) + before  # here


class Missing(Layer):
    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "mean"):
            self.mean = torch.zeros(8)
        self.mean = self.mean * 0.9 + x.mean(0)  # here
        return self.layer(x) - self.mean


class InDictionary(Layer):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.log.get("hidden", torch.zeros(4, 8))
        self.log["hidden"] = torch.tanh(self.layer(x) + hidden)  # here
        return self.log["hidden"]


class InList(Layer):
    def forward(self, x: Tensor) -> Tensor:
        self.seen = [*self.seen, x][-2:]
        return self.layer(torch.stack(self.seen).mean(0))  # here


class Counted:
    """A loss that keeps a running mean of its own."""

    def __init__(self) -> None:
        self.mean: Tensor | None = None

    def __call__(self, result: Tensor) -> Tensor:
        loss = result.square().mean()
        self.mean = loss.detach() if self.mean is None else self.mean * 0.9 + loss.detach()  # here
        return loss / self.mean


@pytest.mark.parametrize("kind", [Before, Missing, InDictionary, InList])
def test_what_the_next_call_would_read_is_refused(kind: type[Layer]) -> None:
    model = kind()
    with pytest.raises(CaptureError, match=r"that the call before it left in an attribute.*\n.*# here\n.*register it as a buffer"):
        autopar.capture(model, (torch.randn(4, 8),))
    assert model.state is None and not hasattr(model, "mean")


def test_a_state_of_the_loss_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"test_hidden_state.py:\d+: the forward reads a tensor \[\]"):
        autopar.capture(nn.Linear(8, 8), (torch.randn(4, 8),), loss=Counted())


class Kept(Layer):
    """Looked at from outside: a result, a list of them, one by name; statistics are buffers."""

    def forward(self, x: Tensor) -> Tensor:
        self.state = self.norm(self.layer(x))
        self.seen.append(self.state.mean())
        self.log["mean"] = self.seen[-1].detach()
        return self.state * 2


class Table(Layer):
    """Made when it is first needed, of sizes and weights alone, and again where it is too short."""

    def forward(self, x: Tensor) -> Tensor:
        if self.state is None or self.state.shape[0] < x.shape[0]:
            self.state = torch.arange(len(x), dtype=x.dtype)[:, None].cos() * self.layer.bias.detach()
        return self.layer(x) * self.state[: len(x)]


class InPlaceOfNumber(Layer):
    """A term that the whole adds to its loss, where a number stood before."""

    def __init__(self) -> None:
        super().__init__()
        self.term = 0.0

    def forward(self, x: Tensor) -> Tensor:
        result = self.layer(x)
        self.term = result.square().mean()  # type: ignore[assignment]
        return result + self.term


@pytest.mark.parametrize("kind", [Kept, Table, InPlaceOfNumber])
def test_what_is_of_one_call_is_not(kind: type[Layer]) -> None:
    model = kind()
    graph = autopar.capture(model, (torch.randn(4, 8),))
    assert graph.gradients and model.state is None and not model.seen and not model.log
    assert torch.isfinite(copy.deepcopy(model)(torch.randn(4, 8))).all()
