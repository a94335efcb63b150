"""Numbers of microbatches that a pipeline tries of itself: those that cannot be run are passed over, and errors say what helps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import UsageError
from autopar.planning.cautions import MicrobatchWarning

ASKED: Any = {"hardware": "cpu-cluster", "effort": "low"}


class Layers(nn.Module):
    """Two layers and a head, with a loss by name."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        norm = nn.BatchNorm1d(8) if kind == "batch norm" else nn.Identity()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), norm), nn.Linear(8, 8)])
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor, y: Tensor) -> Any:
        for layer in self.layers:
            x = x + layer(x).tanh()
        found = self.head(x)
        match self.kind:
            case "squeezed":
                return nn.functional.binary_cross_entropy_with_logits(found.squeeze(), y)
            case "never":
                return (found.flatten() + torch.zeros(8)).square().mean()
            case "centred":
                return (found - found.mean(0)).square().mean()
            case "no loss":
                return found
        loss = nn.functional.binary_cross_entropy_with_logits(found.flatten(), y)
        return (loss, found) if self.kind == "beside logits" else loss


def example(kind: str) -> tuple[Layers, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    return Layers(kind), (torch.randn(8, 8, requires_grad=kind == "input with gradient"), torch.rand(8))


def refusal(kind: str, **asked: Any) -> UsageError:
    """Why no pipeline is planned."""
    with pytest.raises(UsageError) as caught:
        autopar.plan_pipeline(*example(kind), mesh="pp=2", **ASKED, **asked)
    return caught.value


def test_one_row_that_the_model_does_not_run_in_is_passed_over() -> None:
    """The first number that was tried ended the plan, and the hint named an option that was not given."""
    found = autopar.plan_pipeline(*example("squeezed"), mesh="pp=2", **ASKED)
    assert found.microbatches_tried == (2, 4) and found.microbatches in (2, 4)


def test_a_number_that_was_asked_for_is_refused_with_fewer_as_the_hint() -> None:
    error = refusal("squeezed", microbatches=8)
    assert "cannot be run in 8 microbatches" in error.message
    assert error.hint.endswith("; or take fewer microbatches, or plan without a pipeline")


def test_where_no_number_can_be_run_several_rows_say_why() -> None:
    error = refusal("never")
    assert error.message.startswith("a pipeline runs in microbatches, and none of 2, 4 and 8 can be used: ")
    assert "cannot be run in 4 microbatches: " in error.message and error.hint.endswith("before it; or plan without a pipeline")
    error = refusal("centred")
    assert "do not add up to the batch: rows of the batch meet" in error.message and error.hint.endswith("or plan without a pipeline")


@pytest.mark.parametrize("asked", [{}, {"microbatches": 4}], ids=["auto", "4"])
@pytest.mark.parametrize(
    ("kind", "said", "hint"),
    [
        ("batch norm", "would change the buffer layers.0.1.running_mean", "plan without a pipeline"),
        ("beside logits", "without a scalar loss", "let forward return the loss alone, or plan without a pipeline"),
        ("no loss", "without a scalar loss", "let forward return the loss alone, or plan without a pipeline"),
        ("input with gradient", "the gradient of the input x is of the whole batch", "detach it, or plan without a pipeline"),
    ],
)
def test_what_no_number_helps_has_its_own_reason_and_hint(kind: str, said: str, hint: str, asked: dict[str, Any]) -> None:
    error = refusal(kind, **asked)
    assert said in error.message and error.hint == hint


def test_what_runs_in_no_microbatches_is_planned_without_stages_whatever_number_may_be_tried() -> None:
    model, args = example("beside logits")
    least = autopar.plan(model, args, mesh="dp=2", **ASKED).predicted.peak_memory_bytes_per_rank
    with pytest.warns(MicrobatchWarning, match="2 microbatches and more are not tried: .* without a scalar loss"):
        found = autopar.plan(model, args, mesh="dp=2", microbatches="auto", memory=least, **ASKED)
    assert (found.microbatches, found.microbatches_tried) == (1, (1,))
    with pytest.raises(UsageError, match="hint: let forward return the loss alone, or plan without --microbatches"):
        autopar.plan(model, args, mesh="dp=2", microbatches=2, **ASKED)
