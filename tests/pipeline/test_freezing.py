"""Pipelines with ranks all of whose parameters are frozen, before the model is planned or after it was compiled."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.pipeline_plan import PipelinePlan
from autopar.runtime import export_program
from benchmarks.models import stressed
from tests.pipeline.models import build
from tests.pipeline.test_evaluation import dropping
from tests.pipeline.test_training import plan_of, train
from tests.runtime.test_training import gradients, on_ranks

pytestmark = pytest.mark.usefixtures("short_search")

HALVES = [("layers.0.", "layers.1."), ("layers.2.", "layers.3.", "head.")]


def freeze(model: nn.Module, begins: tuple[str, ...]) -> nn.Module:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(begins))
    return model


def step(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients by name. The parameters keep no gradients."""
    module.zero_grad()
    loss = module(*args)
    loss.backward()
    found = gradients(module)
    module.zero_grad()
    return loss.item(), found


def check_steps(everyone: list[tuple[float, dict[str, Tensor]]], wanted: tuple[float, dict[str, Tensor]]) -> None:
    """Ranks have the loss and, together, the gradients of one device."""
    for loss, _ in everyone:
        assert loss == pytest.approx(wanted[0], rel=1e-9)
    found = {name: gradient for _, mine in everyone for name, gradient in mine.items()}
    assert found.keys() == wanted[1].keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, wanted[1][name], rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("frozen", HALVES)
def test_a_rank_frozen_after_compile_takes_part(frozen: tuple[str, ...]) -> None:
    """Until it is unfrozen, in steps, in the norm to clip by and in what counts calls."""
    plan, (model, args) = plan_of("masked", "pp=2", stages="layers.2"), build("masked")
    alone = freeze(copy.deepcopy(model), frozen)
    wanted = train(alone, args), train(freeze(alone, ("none",)), args)

    def run(rank: int) -> Any:
        module = freeze(autopar.compile(model, plan), frozen)
        found = train(module, args), train(freeze(module, ("none",)), args)
        return found, (module.dropout_step, module.other_calls)

    for found, counted in on_ranks(run, 2):
        for (losses, norms), (alone_losses, alone_norms) in zip(found, wanted, strict=True):
            assert losses == pytest.approx(alone_losses, rel=1e-9)
            assert norms == pytest.approx(alone_norms, rel=1e-9)
        assert counted == (6, 0)


@pytest.mark.parametrize("frozen", HALVES)
def test_a_rank_frozen_after_compile_takes_part_in_other_calls(frozen: tuple[str, ...]) -> None:
    """Ranks capture another batch size alike, though each sees what is frozen of its own alone."""
    model, args = dropping()
    made = autopar.plan_pipeline(model, args, mesh="pp=2", microbatches=4, hardware=stressed(), effort="low", stages="layers.2")
    plan, half = PipelinePlan.from_json(made.to_json()), tuple(tensor[:4] for tensor in args)
    alone = copy.deepcopy(model).eval()
    wanted = [step(freeze(alone, begins), half) for begins in (frozen, ("none",))]

    def run(rank: int) -> Any:
        module = autopar.compile(model, plan).eval()
        return [step(freeze(module, begins), half) for begins in (frozen, ("none",))]

    for found, one in zip(zip(*on_ranks(run, 2), strict=True), wanted, strict=True):
        check_steps(list(found), one)


@pytest.mark.parametrize(
    ("mesh", "stages", "order", "frozen"),
    [
        ("pp=2", "layers.3", "auto", ("layers.0.", "layers.1.", "layers.2.")),
        ("pp=2", "head", "gpipe", ("head.",)),
        ("pp=3", "layers.1,layers.3", "1f1b", ("layers.1.", "layers.2.")),
        ("pp=4", "layers.1,layers.2,layers.3", "zero-bubble", ("layers.0.", "layers.2.")),
        ("pp=2", "layers.1,layers.2,layers.3", "interleaved:2", ("layers.0.", "layers.2.")),
    ],
)
def test_a_model_frozen_in_a_stage_is_planned_and_trained(mesh: str, stages: str, order: str, frozen: tuple[str, ...]) -> None:
    model, args = build("masked")
    freeze(model, frozen)
    made = autopar.plan_pipeline(model, args, mesh=mesh, microbatches=4, hardware=stressed(), effort="low", stages=stages, order=order)
    plan = PipelinePlan.from_json(made.to_json())
    wanted = step(copy.deepcopy(model), args)
    check_steps(on_ranks(lambda rank: step(autopar.compile(model, plan), args), plan.positions), wanted)


def test_a_folder_in_which_a_rank_trains_nothing_runs(tmp_path: Path) -> None:
    model, args = build("masked")
    freeze(model, HALVES[0])
    plan = autopar.plan_pipeline(model, args, mesh="pp=2", microbatches=4, hardware=stressed(), effort="low", stages="layers.2")
    export_program(plan, model, tmp_path / "program")
    wanted = train(copy.deepcopy(model), args)
    for losses, norms in on_ranks(lambda rank: train(autopar.load_program(tmp_path / "program"), args), 2):
        assert losses == pytest.approx(wanted[0], rel=1e-9)
        assert norms == pytest.approx(wanted[1], rel=1e-9)


def test_a_loss_that_trains_nothing_asks_for_no_gradient(tmp_path: Path) -> None:
    """As with torch alone, of compiled and of loaded pipelines."""
    model, args = dropping()
    model.requires_grad_(False)
    plan = autopar.plan_pipeline(model, args, mesh="pp=2", microbatches=4, hardware=stressed(), effort="low", stages="layers.2")
    export_program(plan, model, tmp_path / "program")

    def run(rank: int) -> list[Any]:
        found = list[Any]()
        for module in (autopar.compile(model, plan), autopar.load_program(tmp_path / "program")):
            losses = [module(*args) for _ in range(2)]
            found += [*(loss.requires_grad for loss in losses), losses[0].equal(losses[1]), module.dropout_step, module.other_calls]
        return found

    assert on_ranks(run, 2) == [[False, False, False, 0, 2] * 2] * 2
