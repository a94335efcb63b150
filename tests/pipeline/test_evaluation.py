"""A pipeline's module on gloo ranks beyond the planned call: evaluation, calls without gradients, other batch sizes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import AutoparError
from autopar.pipeline import Boundary, Stages
from autopar.pipeline_plan import PipelinePlan
from autopar.runtime.pipelines.programs import _groups_of
from benchmarks.models import stressed
from tests.pipeline.models import build
from tests.pipeline.test_training import plan_of, train
from tests.runtime.test_training import on_ranks

pytestmark = pytest.mark.usefixtures("short_search")


class Dropping(nn.Module):
    """Dropout in one stage alone: in evaluation that stage has another graph, and the other has not."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.drop, self.head = nn.Dropout(0.5), nn.Linear(width, 5)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).relu()
        return nn.functional.cross_entropy(self.head(self.drop(x)), targets)


def dropping() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    return Dropping().double(), (torch.randn(8, 8).double(), torch.randint(0, 5, (8,)))


@pytest.mark.parametrize(("name", "mesh", "microbatches"), [("gpt tied", "pp=2,dp=2", 4), ("encoder-decoder", "pp=4", 2)])
def test_evaluation_is_that_of_one_device(name: str, mesh: str, microbatches: int) -> None:
    """Before training, with fewer microbatches than stages, and after a step; on all ranks. Nothing is planned for it."""
    plan, (model, args) = plan_of(name, mesh, microbatches), build(name)
    alone = copy.deepcopy(model)
    wanted = [alone(*args).item()]
    train(alone, args)
    wanted.append(alone(*args).item())

    def run(rank: int) -> Any:
        module = autopar.compile_pipeline(model, plan)
        losses = [_evaluated(module, args)]
        train(module, args)
        losses.append(_evaluated(module, args))
        return losses, len(module._programs.runs), any(parameter.grad is not None for parameter in module.parameters())

    for losses, others, graded in on_ranks(run, 4):
        assert losses == pytest.approx(wanted, rel=1e-9)
        assert others == 0 and not graded


def _evaluated(module: nn.Module, args: tuple[Tensor, ...]) -> float:
    """The loss in evaluation mode without gradients; the same without gradients alone."""
    module.eval()
    with torch.no_grad():
        loss = module(*args)
    module.train()
    assert not loss.requires_grad
    with torch.no_grad():
        assert module(*args).item() == loss.item()
    return float(loss)


def test_evaluation_drops_nothing_and_training_goes_on() -> None:
    """The stage without dropout has the planned graph, the other one has not: both take part in one program."""
    model, args = dropping()
    made = autopar.plan_pipeline(model, args, mesh="pp=2", microbatches=4, hardware=stressed(), effort="low", stages="layers.2")
    plan = PipelinePlan.from_json(made.to_json())
    wanted = copy.deepcopy(model).eval()(*args)
    wanted.backward()

    def run(rank: int) -> tuple[list[float], int, float]:
        module = autopar.compile_pipeline(model, plan)
        module.eval()
        with torch.no_grad():
            losses = [module(*args).item() for _ in range(2)]
        loss = module(*args)
        loss.backward()
        losses.append(loss.item())
        norm = sum(float((parameter.grad.full_tensor() ** 2).sum()) for parameter in module.parameters())
        module.train()
        with torch.no_grad():
            dropped = module(*args).item()
        return losses, len(module._programs.runs), norm if dropped != losses[0] else 0.0

    alone = copy.deepcopy(model).eval()
    alone(*args).backward()
    total = sum(float((parameter.grad**2).sum()) for parameter in alone.parameters() if parameter.grad is not None)
    found = on_ranks(run, 2)
    for losses, others, norm in found:
        assert losses == pytest.approx([wanted.item()] * 3, rel=1e-9)
        assert others == 1 and norm > 0
    assert sum(norm for _, _, norm in found) == pytest.approx(total, rel=1e-9)


@pytest.mark.parametrize("rows", [4, 3])
def test_other_batch_sizes_keep_the_cut(rows: int) -> None:
    """Planned for 8 rows in 4 microbatches: 4 rows are 2 of them, 3 rows are 3 of one row each. In training and evaluation."""
    plan, (model, args) = plan_of("masked", "pp=2,dp=2"), build("masked")
    given = tuple(tensor[:rows] for tensor in args)
    alone = copy.deepcopy(model)
    evaluated = alone(*given).item()
    wanted, norms = train(alone, given)

    def run(rank: int) -> Any:
        module = autopar.compile_pipeline(model, plan)
        loss = _evaluated(module, given)
        found = train(module, given)
        (running,) = module._programs.runs.values()
        return loss, found, running.whole.microbatches, module(*args).item()

    for loss, (losses, clipped), microbatches, after in on_ranks(run, 4):
        assert loss == pytest.approx(evaluated, rel=1e-9)
        assert losses == pytest.approx(wanted, rel=1e-9) and clipped == pytest.approx(norms, rel=1e-9)
        assert microbatches == {4: 2, 3: 3}[rows]
        assert after == pytest.approx(alone(*args).item(), rel=1e-9)


def test_ranks_that_call_differently_are_told() -> None:
    plan, (model, args) = plan_of("masked", "pp=2"), build("masked")

    def run(rank: int) -> str:
        module = autopar.compile_pipeline(model, plan)
        try:
            module(*(tensor[: 4 + 2 * rank] for tensor in args))
        except AutoparError as error:
            return error.message
        return "not refused"

    assert all("other modes or with other shapes" in words for words in on_ranks(run, 2))


def test_stages_whose_tied_weight_has_another_name_have_groups_of_their_own() -> None:
    """Groups of tied weights go by tensor name: under another one their gradients would not be summed."""
    boundaries = (Boundary("x", 0, 1), Boundary("dx", 1, 0))
    one, same, other = (Stages((), boundaries, 2, {name: (0, 1)}) for name in ("weight", "weight", "weight_1"))
    assert _groups_of(one) == _groups_of(same) != _groups_of(other)
