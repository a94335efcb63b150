"""Means in one call: where they are found, and that a step has the values of plain torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import autopar
from autopar.importer import capture
from autopar.runtime.instructions.means import find_means
from autopar.runtime.steps.simulation import simulate
from autopar.schedule import Schedule
from autopar.search import find_plan
from autopar.target import Target
from autopar.verify import verify
from benchmarks.host import counted_kernels
from tests.graphs import machine

ROWS = {"input:x": "S0 R", "input:target": "S0 R"}
"""Rows of the batch on two ranks."""
Loss = Callable[[Tensor, Tensor], Tensor]


def count(kernels: Mapping[str, int], name: str) -> int:
    """Kernels of an operator, in whichever form."""
    return sum(number for operator, number in kernels.items() if operator.startswith(f"{name}."))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 5, generator=torch.Generator().manual_seed(1)))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.t()


def rows(seed: int, width: int) -> Tensor:
    return torch.randn(4, width, generator=torch.Generator().manual_seed(seed))


def schedule(loss: Loss, pins: Mapping[str, str] | None = None) -> Schedule:
    """The schedule of a training step, on two ranks where there are specs."""
    graph = capture(Layer(), (rows(0, 5),), mode="train", loss=loss, loss_args=(rows(2, 6),)).graph
    return find_plan(graph, machine("2" if pins else "1"), memory_bytes=1 << 40, constraints=pins or {}, effort="low").schedule


def found(loss: Loss, pins: Mapping[str, str] | None = None) -> list[str]:
    """The operators that run in place of several, without their namespace."""
    return [mean.target.removeprefix("aten.") for mean in find_means(schedule(loss, pins)).values()]


def mean_of_rows(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().mean(1).sum()


def sum_and_mean(y: Tensor, target: Tensor) -> Tensor:
    total = (y - target).square().sum()
    return total + total / y.numel()


def halved_sum(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().sum() / 2


LOSSES: Mapping[str, Loss] = {
    "mse_loss": functional.mse_loss, "smooth_l1_loss": functional.smooth_l1_loss, "huber_loss": functional.huber_loss,
    "mean": mean_of_rows,
}  # fmt: skip


@pytest.mark.parametrize("name", LOSSES)
def test_a_mean_that_no_rank_splits_is_one_kernel(name: str) -> None:
    wanted = ["mean.dim"] if name == "mean" else ["mean.dim", f"{name}_backward.default"]
    assert found(LOSSES[name]) == wanted


def test_a_sum_that_others_read_or_that_something_else_divides_stays() -> None:
    assert found(sum_and_mean) == found(halved_sum) == []


def test_parts_of_a_mean_are_summed() -> None:
    assert found(functional.mse_loss, {**ROWS, "op:mse_loss": "S0 R", "op:div_1": "S0 R"}) == []
    assert found(mean_of_rows, ROWS) == ["mean.dim"], "each rank has its rows whole"


def test_a_part_of_the_step_that_is_run_by_itself_ends_a_mean() -> None:
    made = schedule(functional.mse_loss)
    _, backward = find_means(made).values()
    assert len(find_means(made, parts=[backward.places[-1]])) == 1


@pytest.mark.parametrize("name", LOSSES)
def test_ranks_have_the_gradients_of_plain_torch(name: str) -> None:
    model, x, target = Layer(), rows(0, 5), rows(2, 6)
    made = schedule(LOSSES[name], ROWS if name == "mean" else None)
    held = {"weight": model.weight, "x": x, "target": target}
    loss, gradient = simulate(made, {item.tensor: held[item.name].detach() for item in made.graph.inputs}).outputs
    own = LOSSES[name](model(x), target)
    own.backward()
    torch.testing.assert_close(loss, own.detach())
    torch.testing.assert_close(gradient, model.weight.grad)


def test_memory_that_a_mean_does_not_take_is_predicted() -> None:
    model, x, target = Layer(), torch.randn(64, 5), torch.randn(64, 6)
    options: dict[str, Any] = {"loss": functional.mse_loss, "loss_args": (target,)}
    plan = autopar.plan(model, (x,), mesh={"dp": 1}, hardware="cpu-cluster", effort="low", **options)
    verified = verify(plan, Target(model, (x,), **options), backend="simulate", steps=2)
    assert verified.passed, verified.problems
    assert verified.measured_bytes == verified.predicted_bytes - (target.nbytes - 4), "one number in place of each entry's gradient"


@pytest.mark.parametrize("form", ["eager", "graph"])
@pytest.mark.parametrize("name", LOSSES)
def test_a_step_runs_the_kernels_of_plain_torch(name: str, form: Any, one_rank: None) -> None:
    model, x, target = Layer(), rows(0, 5), rows(2, 6)
    plan = autopar.plan(model, (x,), mesh={"dp": 1}, hardware="cpu-cluster", effort="low", loss=LOSSES[name], loss_args=(target,))
    module = autopar.compile(model, plan, loss=LOSSES[name], execute=form)
    with counted_kernels() as ours:
        loss = module(x, target)
        loss.backward()
    with counted_kernels() as its:
        own = LOSSES[name](model(x), target)
        own.backward()
    apart = name != "mean"  # torch's own loss takes the mean, and keeps the memory of all entries
    assert count(ours, "mean") == count(its, "mean") + apart
    for one in ("sum", "div", name, f"{name}_backward"):
        assert count(ours, one) == count(its, one), one
    assert loss.equal(own)
    assert module.weight.grad.full_tensor().equal(model.weight.grad)
