"""What is drawn comes of torch's seed, and of the number of the step."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import autopar
from autopar.errors import UsageError
from autopar.runtime import ShardedModule
from autopar.runtime.module.sharded_module import LaterSeedWarning
from tests.runtime.test_training import on_ranks, whole

X = torch.ones(8, 64)


class Dropping(nn.Module):
    """A mask of the rows, split, and one that all ranks hold."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(64))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, 0.5) * nn.functional.dropout(self.scale, 0.5)


PLAN = autopar.plan(Dropping(), (X,), mesh="2", hardware="cpu-cluster", constraints={"input:x": "S0 R", "scale": "R"})


def drawn(module: ShardedModule, count: int = 2) -> list[tuple[float, ...]]:
    return [tuple(whole(module(X)).flatten().tolist()) for _ in range(count)]


def of_seed(seed: int) -> list[tuple[float, ...]]:
    module = autopar.compile(Dropping(), PLAN)
    torch.manual_seed(seed)  # the first call is what it has to come before
    return drawn(module)


def test_draws_come_of_torchs_seed() -> None:
    """That of the first rank where ranks have others, and where nobody gave one."""

    def run(rank: int) -> list[list[tuple[float, ...]]]:
        found = [of_seed(0), of_seed(1), of_seed(0), of_seed(7 + rank)]
        torch.seed()
        return [*found, drawn(autopar.compile(Dropping(), PLAN))]

    first, second = on_ranks(run, 2)
    assert first == second
    assert first[0] == first[2] and len({step for found in first for step in found}) == 8


def test_a_resumed_run_draws_on() -> None:
    def run(rank: int) -> list[list[tuple[float, ...]]]:
        torch.manual_seed(3)
        module = autopar.compile(Dropping(), PLAN)
        begun = drawn(module, 1)
        seed, step = module.dropout_seed, module.dropout_step
        copied, going_on = copy.deepcopy(module), drawn(module, 2)
        torch.manual_seed(4)
        resumed = autopar.compile(Dropping(), PLAN)
        resumed.dropout_seed, resumed.dropout_step = seed, step
        return [begun, going_on, drawn(copied, 2), drawn(resumed, 2)]

    for begun, *others in on_ranks(run, 2):
        assert others[0] == others[1] == others[2] and begun[0] not in others[0]


def test_a_later_seed_is_told_of(one_rank: None) -> None:
    """Once for each, and not where nothing is drawn."""

    def told(module: Any) -> list[str]:
        found = []
        for seed in (0, 1, 1):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                torch.manual_seed(seed)
                module(X)
            found.append(" ".join(f"{one.filename} {one.message}" for one in caught if one.category is LaterSeedWarning))
        return found

    def compiled(model: nn.Module) -> ShardedModule:
        return autopar.compile(model, autopar.plan(model, (X,), mesh="1", hardware="cpu-cluster"))

    first, second, third = told(compiled(Dropping()))
    assert not first and not third and second.startswith(f"{__file__} torch.manual_seed was called after the first call")
    assert told(compiled(nn.Linear(64, 64))) == ["", "", ""]


def test_planning_and_compiling_leave_torchs_generator_alone(one_rank: None) -> None:
    torch.manual_seed(5)
    state = torch.get_rng_state()
    module = autopar.compile(Dropping(), autopar.plan(Dropping(), (X,), mesh="1", hardware="cpu-cluster"))
    module(X).sum().backward()
    assert torch.initial_seed() == module.dropout_seed == 5 and torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(("reentrant", "calls"), [(True, 1), (True, 2), (False, 1), (False, 2)])
def test_within_a_checkpoint_a_call_draws_again_what_it_drew_or_is_refused(reentrant: bool, calls: int, one_rank: None) -> None:
    """The one call of a reentrant checkpoint is the next step's; others would draw something else when they are computed again."""
    x = X.clone().requires_grad_(True)
    plan = autopar.plan(Dropping(), (x,), mesh="1", hardware="cpu-cluster")
    torch.manual_seed(0)

    def squared(module: ShardedModule, x: Tensor) -> Tensor:
        return module(x).square().sum()

    def gradient(within: bool) -> Tensor:
        x.grad = None
        module = autopar.compile(Dropping(), plan)
        run = partial(checkpoint, squared, use_reentrant=reentrant) if within else squared
        sum(run(module, x) for _ in range(calls)).backward()
        return x.grad

    if (reentrant, calls) == (True, 1):
        assert torch.equal(gradient(True), gradient(False))
        return
    with pytest.raises(UsageError, match=r"computed again within backward, as by torch\.utils\.checkpoint: it would draw other"):
        gradient(True)


def test_a_reentrant_checkpoint_draws_again_after_evaluations_that_draw_nothing(one_rank: None) -> None:
    x = X.clone().requires_grad_(True)
    plan = autopar.plan(Training(), (x,), mesh="1", hardware="cpu-cluster")
    torch.manual_seed(0)

    def gradient(within: bool) -> Tensor:
        x.grad, module = None, autopar.compile(Training(), plan)
        for _ in range(2):
            evaluate(module, x)
            made = checkpoint(module, x, use_reentrant=True) if within else module(x)
            evaluate(module, x)
            made.square().sum().backward()
        return x.grad

    assert torch.equal(gradient(True), gradient(False))


@pytest.mark.parametrize("reentrant", [None, True, False])
def test_a_hook_within_backward_may_call_what_draws(reentrant: bool | None, one_rank: None) -> None:
    """Within a checkpoint's own backward too, and itself within a checkpoint. What it draws is the next step's."""
    x = X.clone().requires_grad_(True)
    module = autopar.compile(Dropping(), autopar.plan(Dropping(), (x,), mesh="1", hardware="cpu-cluster"))
    found: list[Tensor] = []

    def call(gradient: Tensor) -> None:
        with torch.enable_grad():
            found.append(module(x.detach().requires_grad_(True)))

    def hooked(x: Tensor) -> Tensor:
        made = x * 2
        if made.requires_grad:
            made.register_hook(call)
        return made * made

    torch.manual_seed(0)
    before = module(x)
    (hooked(x) if reentrant is None else checkpoint(hooked, x, use_reentrant=reentrant)).sum().backward()
    assert len(found) == 1 and not torch.equal(whole(found[0]), whole(before)) and module.dropout_step == 2


class Computing(torch.autograd.Function):
    """A checkpoint of one's own."""

    @staticmethod
    def forward(ctx: Any, run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        ctx.run = run
        ctx.save_for_backward(x)
        return run(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_(True)
        with torch.enable_grad():
            ctx.run(x).backward(gradient)
        return None, x.grad


def test_a_checkpoint_of_ones_own_that_would_draw_others_is_refused(one_rank: None) -> None:
    x = X.clone().requires_grad_(True)
    module = autopar.compile(Dropping(), autopar.plan(Dropping(), (x,), mesh="1", hardware="cpu-cluster"))
    with pytest.raises(UsageError, match="computed again within backward"):
        (Computing.apply(module, x) + Computing.apply(module, x)).sum().backward()


class Training(Dropping):
    """Evaluation draws nothing."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.training else x * self.scale


def evaluate(module: ShardedModule, x: Tensor) -> None:
    module.eval()
    with torch.no_grad():
        module(x)
    module.train()


def test_what_draws_nothing_may_be_checkpointed(one_rank: None) -> None:
    model, x = nn.Linear(64, 64), X.clone().requires_grad_(True)
    module = autopar.compile(copy.deepcopy(model), autopar.plan(model, (x,), mesh="1", hardware="cpu-cluster"))
    found = []
    for one in (model, module):
        x.grad = None
        sum(checkpoint(lambda x, one=one: one(x).square().sum(), x, use_reentrant=False) for _ in range(2)).backward()
        found.append(x.grad)
    torch.testing.assert_close(*found)
