"""Attention computes what torch's does: rows that see no key, dims that broadcast, heads that are shared."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import autopar
from autopar.importer import capture
from autopar.verify import verify
from tests.importer.test_capture import run, targets

NOTHING_DROPPED = 1e-12
"""A chance of dropout for which attention is taken apart, and nothing is ever dropped."""
B, H, S, D = 2, 4, 6, 8
VISIBLE = (torch.arange(B * S * S).view(B, 1, S, S) % 5 != 0).index_fill(2, torch.tensor([1, 3]), value=False)
"""Two queries see no key."""


class Attend(nn.Module):
    """Attention by a mask: a parameter, ``-inf`` where it hides, or an input."""

    def __init__(self, mask: Tensor | None = None, **options: Any) -> None:
        super().__init__()
        self.options = options
        self.bias = nn.Parameter(torch.randn(S, S, dtype=torch.float64)) if mask is not None else None
        self.weight = nn.Parameter(torch.randn(D, D, dtype=torch.float64))
        if mask is not None:
            self.register_buffer("hidden", ~mask)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q = x @ self.weight
        mask = mask if self.bias is None else self.bias.masked_fill(self.hidden, float("-inf"))
        return scaled_dot_product_attention(q, q.flip(2), q * 2, mask, **self.options).square().sum()


def same_as_torch(model: nn.Module, *inputs: Tensor) -> None:
    """Forward and backward."""
    captured = capture(model, inputs)
    found = run(captured, model, dict(zip(("x", "mask"), inputs, strict=False)))
    loss = model(*inputs)
    loss.backward()
    assert loss.isfinite()
    torch.testing.assert_close(found["output", "loss"], loss.detach())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found["gradient", name], parameter.grad)


X = torch.randn(B, H, S, D, dtype=torch.float64)


def test_queries_that_see_no_key_have_zeros_where_probabilities_are_dropped() -> None:
    same_as_torch(Attend(dropout_p=NOTHING_DROPPED), X, VISIBLE)
    added = torch.randn(B, 1, S, S, dtype=torch.float64).masked_fill(~VISIBLE, float("-inf"))
    same_as_torch(Attend(dropout_p=NOTHING_DROPPED), X, added)


@pytest.mark.parametrize("dropout", [0.0, NOTHING_DROPPED])
def test_queries_that_see_no_key_have_zeros_where_the_mask_is_trained(dropout: float) -> None:
    same_as_torch(Attend(VISIBLE, dropout_p=dropout), X)


@pytest.mark.parametrize("pin", ["S0 R R R", "R S0 R R", "R R S0 R"])
def test_queries_that_see_no_key_have_zeros_on_several_ranks(pin: str) -> None:
    made = Attend(dropout_p=0.5), (X, VISIBLE)
    plan = autopar.plan(*made, mesh="dp=2", hardware="cpu-cluster", constraints={"input:x": pin})
    found = verify(plan, made, backend="simulate", steps=2)
    assert found.passed, found.problems


class Given(nn.Module):
    """Attention of what it is given."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        return scaled_dot_product_attention(q, k, v, mask, **self.options)


SHARED = [
    ((8, 3, 4), (2, 5, 4), (2, 5, 4), (8, 3, 5)),
    ((8, 3, 4), (1, 5, 4), (2, 5, 6), (3, 5)),
    ((2, 8, 3, 4), (2, 2, 5, 4), (2, 4, 5, 4), (2, 1, 3, 5)),
    ((2, 8, 3, 4), (2, 5, 4), (1, 2, 5, 4), (8, 3, 5)),
    ((3, 2, 8, 3, 4), (1, 2, 2, 5, 4), (3, 1, 2, 5, 4), (2, 8, 3, 5)),
]
BROADCAST = [
    ((1, 3, 4), (4, 5, 4), (4, 5, 6), (4, 3, 5)),
    ((2, 2, 3, 4), (2, 5, 4), (2, 5, 4), (2, 2, 3, 5)),
    ((2, 3, 4), (2, 2, 5, 4), (1, 2, 5, 4), (3, 5)),
    ((3, 4), (2, 2, 5, 4), (2, 1, 5, 4), (2, 1, 3, 5)),
    ((2, 1, 3, 4), (1, 5, 5, 4), (2, 5, 5, 4), (1, 5)),
    ((3, 1, 4, 3, 4), (2, 1, 5, 4), (3, 2, 4, 5, 4), (3, 1, 4, 3, 5)),
    ((0, 2, 3, 4), (1, 2, 5, 4), (1, 2, 5, 4), (3, 5)),
]
SHAPES = [(True, shapes) for shapes in SHARED] + [(False, shapes) for shapes in BROADCAST]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dropout", [0.0, NOTHING_DROPPED])
@pytest.mark.parametrize(("shared", "shapes"), SHAPES)
def test_shapes_that_torch_takes(shared: bool, shapes: tuple[tuple[int, ...], ...], dropout: float, masked: bool) -> None:
    """Heads that several of queries share, and dims that broadcast."""
    model = Given(enable_gqa=shared, dropout_p=dropout)
    tensors = [torch.randn(shape, dtype=torch.float64) for shape in shapes[: 3 + masked]]
    captured = capture(model, tuple(tensors), mode="inference")
    assert ("autopar.attention.default" in targets(captured.graph)) is (dropout == 0.0)
    found = run(captured, model, dict(zip(("q", "k", "v", "mask"), tensors, strict=False)))
    torch.testing.assert_close(found["output", "0"], model(*tensors))
