"""Mixtures of experts whose tokens are sorted and grouped: the experts lie where the plan puts them, with the values of one device."""

from __future__ import annotations

import pytest
import torch

import autopar
from autopar import zoo
from autopar.dialect.grouped import grouped_without_waiting
from autopar.verify import verify


@pytest.mark.parametrize("spec", ["S0 R R", "S01 R R"])
def test_split_experts(spec):
    target = zoo.build("moe", layers=1, batch=4, width=32, heads=4, dispatch="grouped")
    pins = {f"layers.0.experts.{name}": spec for name in ("up", "down")}
    made = autopar.plan(autopar.capture(target.model, target.args), mesh="2x2", constraints=pins)
    assert made.parameters["layers.0.experts.up"].spec == spec
    result = verify(made, target, backend="simulate", steps=2)
    assert result.passed, result.problems


def test_the_kernel_that_does_not_wait():
    x, w, ends = torch.randn(8, 4), torch.randn(4, 4, 8), torch.tensor([2, 2, 5, 8])
    for first_row, rows, first, experts in ((0, 8, 0, 4), (0, 8, 2, 2), (4, 4, 0, 4), (4, 4, 1, 2)):
        part, own = x[first_row : first_row + rows], w[first : first + experts]
        expected = torch.ops.autopar.grouped_mm.default(part, own, ends, first_row, first)
        before = ends[first - 1] if first else torch.tensor(0)
        bounds = (torch.cat([before.reshape(1), ends[first : first + experts]]) - first_row).clamp(0, rows)
        torch.testing.assert_close(grouped_without_waiting(part, own, bounds), expected)
