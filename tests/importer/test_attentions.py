"""Attention computes what torch's does, also of queries that see no key."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import autopar
from autopar.importer import capture
from autopar.verify import verify
from tests.importer.test_capture import run

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
