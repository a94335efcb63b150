"""Losses and reductions with split operands: no plan receives more than the sum written by hand over the count."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.cost_models import Hardware, Link, load_hardware
from tests.runtime.models import example
from tests.runtime.test_execution import check

ROWS, COLUMNS = 512, 64
SHAPES: Mapping[str, tuple[tuple[int, ...], torch.dtype]] = {
    "table": ((ROWS, COLUMNS), torch.float32), "row": ((ROWS,), torch.float32),
    "classes": ((ROWS,), torch.int64), "labels": ((ROWS, COLUMNS), torch.int64),
}  # fmt: skip

LOSSES: Mapping[str, str] = {
    "mse_loss": "table", "l1_loss": "table", "smooth_l1_loss": "table", "huber_loss": "table", "binary_cross_entropy": "table",
    "binary_cross_entropy_with_logits": "table", "poisson_nll_loss": "table", "soft_margin_loss": "table", "hinge_embedding_loss": "table",
    "cosine_embedding_loss": "table row", "margin_ranking_loss": "table table", "triplet_margin_loss": "table table",
    "triplet_margin_with_distance_loss": "table table", "multilabel_soft_margin_loss": "table", "multilabel_margin_loss": "labels",
    "multi_margin_loss": "classes", "nll_loss": "classes", "cross_entropy": "classes", "kl_div": "table",
}  # fmt: skip
"""What each takes after its input, a table."""


def cheap_latency() -> Hardware:
    """Hardware on which bytes alone count."""
    return replace(load_hardware("h100-sxm"), axes=(("dp", Link(1e-12, 1e9)),))


class Scaled(nn.Module):
    """A function of a scaled table, so that there is a weight to train."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.empty(COLUMNS, device="meta"))

    def forward(self, *tables: Tensor) -> Tensor:
        return self.function(torch.sigmoid(tables[0] * self.weight), *tables[1:])


def received(function: Callable[..., Tensor], operands: str, spec: str) -> int:
    """Bytes a rank receives in the cheapest plan whose inputs are pinned to be split."""
    tables = [torch.empty(SHAPES[name][0], dtype=SHAPES[name][1], device="meta") for name in f"table {operands}".split()]
    pins = {f"input:tables.{index}": " ".join(spec.split()[: table.dim()]) for index, table in enumerate(tables)}
    plan = autopar.plan(
        Scaled(function), tuple(tables), mesh={"dp": 4}, cost_model="communication", hardware=cheap_latency(), constraints=pins,
    )  # fmt: skip
    return plan.predicted.received_bytes_per_rank


@pytest.mark.filterwarnings("ignore:reduction")  # kl_div tells of another mean
@pytest.mark.parametrize("name", LOSSES)
def test_a_mean_loss_receives_no_more_than_the_sum_over_the_count(name: str) -> None:
    loss = getattr(F, name)
    by_hand = received(lambda *tables: loss(*tables, reduction="none").sum() / 7.0, LOSSES[name], "S0 R")
    counts = 3 * 8 if name in ("nll_loss", "cross_entropy") else 0  # targets to ignore are counted at run time
    for reduction in ("mean", "sum"):
        assert received(lambda *tables, how=reduction: loss(*tables, reduction=how), LOSSES[name], "S0 R") <= by_hand + counts


REDUCTIONS: Mapping[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "mean": (lambda x: x.mean(0), 1), "mean of all": (lambda x: x.mean(), 1), "var": (lambda x: x.var(0), 3),
    "std": (lambda x: x.std(0), 3),
    "var of all": (lambda x: x.var(), 3), "norm": (lambda x: torch.linalg.vector_norm(x, dim=0), 1), "norm of all": (lambda x: x.norm(), 1),
    "norm of order 3": (lambda x: x.norm(p=3, dim=0), 1), "largest": (lambda x: x.norm(p=float("inf"), dim=0), 3),
    "logsumexp": (lambda x: x.logsumexp(0), 2), "normalize": (lambda x: F.normalize(x, dim=0), 2), "amax": (lambda x: x.amax(0), 3),
    "max": (lambda x: x.max(0).values, 2), "picked": (lambda x: x.sum(0) * x.argmin(0), 3),
    "product": (lambda x: x.prod(0), 4), "product of all": (lambda x: x.prod(), 1),
}  # fmt: skip
"""Functions over the split rows, and how many sums of one row's size they and their gradients take, the weight's apart."""


@pytest.mark.parametrize("name", REDUCTIONS)
def test_a_reduction_over_a_split_dim_receives_sums_alone(name: str) -> None:
    function, sums = REDUCTIONS[name]
    row = COLUMNS * 4 * 2 * 3 // 4  # an all-reduce of a row on four ranks
    assert received(lambda x: function(x).square().sum(), "", "S0 R") <= row * (sums + 1) + 64


def test_probabilities_of_nothing_and_of_all_have_a_gradient() -> None:
    """A sigmoid that is saturated gives 0 or 1; the logarithm's own gradient would be no number there."""
    torch.manual_seed(0)
    x, target = torch.rand(8, 4, dtype=torch.float64), torch.rand(8, 4, dtype=torch.float64)
    x[0], x[1], target[:2] = 0.0, 1.0, torch.tensor([0.0, 1.0, 0.5, 1.0])

    class Model(nn.Module):
        def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
            return F.binary_cross_entropy(x, target), F.binary_cross_entropy(x, target, weight=target + 1, reduction="none")

    found = example(Model(), (x.requires_grad_(), target), "train")
    assert found.single.gradients["x"].isfinite().all()
    for seed in range(3):
        check(found, "2x2", seed)
