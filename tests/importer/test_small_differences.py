"""Operators whose replacement once computed something a little else than torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.verify import verify


class Grid(nn.Module):
    def forward(self, theta: Tensor) -> Tensor:
        return nn.functional.affine_grid(theta, [2, 1, 1, 4], align_corners=True)


def far_norm(dtype: torch.dtype) -> nn.Module:
    norm = nn.BatchNorm1d(8)
    norm.running_mean.fill_(3.3)
    norm.running_var.fill_(0.01)
    return norm.to(dtype)


CASES: dict[str, tuple[nn.Module, Tensor]] = {
    "a grid of one row": (Grid(), torch.randn(2, 2, 3)),
    "a norm of bfloat16 without eps": (nn.RMSNorm(8).bfloat16(), (1e-2 * torch.randn(16, 8)).bfloat16()),
    "a batch norm of bfloat16 by its statistics": (far_norm(torch.bfloat16), (3.3 + 0.1 * torch.randn(16, 8)).bfloat16()),
    "a batch norm of float16 by its statistics": (far_norm(torch.float16), (3.3 + 0.1 * torch.randn(16, 8)).half()),
}


@pytest.mark.filterwarnings("ignore:Since version 1.3.0, affine_grid")
@pytest.mark.parametrize("name", CASES)
def test_the_graph_computes_what_the_model_does(name: str) -> None:
    model, x = CASES[name]
    plan = autopar.plan(model, (x,), mesh={"dp": 1}, hardware="cpu-cluster", mode="inference", time_limit=300)
    assert verify(plan, (model, (x,)), backend="simulate").passed
