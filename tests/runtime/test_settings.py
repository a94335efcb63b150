"""What a loss computes with is looked at in every call, as the model's own attributes are."""

from __future__ import annotations

import copy
from collections.abc import Callable
from enum import Enum
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.runtime.programs.settings import Settings, held_by
from tests.runtime.test_training import on_ranks

X, Y = torch.randn(8, 16, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 4
SCALE = SimpleNamespace(value=1.0, seen=0)


class Head(nn.Module):
    """A weight and a tensor that is none."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.mask = nn.Linear(16, 4), torch.ones(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.mask


def head() -> Head:
    torch.manual_seed(0)
    return Head()


class Dropped(nn.Module):
    """A loss with a mode of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.inner = nn.Dropout(1.0), nn.CrossEntropyLoss()

    def forward(self, outputs: Tensor, wanted: Tensor) -> Tensor:
        return self.inner(self.drop(outputs), wanted)


class Trainer:
    """No loss, and has one as a method."""

    def __init__(self) -> None:
        self.beta, self.step, self.inner = 1.0, 0, nn.CrossEntropyLoss()

    def loss(self, outputs: Tensor, wanted: Tensor) -> Tensor:
        return self.scaled(outputs, wanted)

    def scaled(self, outputs: Tensor, wanted: Tensor) -> Tensor:
        return self.beta * self.inner(outputs, wanted)


class Called(Trainer):
    """A loss that is no module, and counts."""

    def __call__(self, outputs: Tensor, wanted: Tensor) -> Tensor:
        self.step += 1
        return self.loss(outputs, wanted)


def around() -> tuple[Callable[..., Any], Callable[[], None]]:
    factor = 1.0

    def loss(outputs: Tensor, wanted: Tensor) -> Tensor:
        return factor * nn.functional.cross_entropy(outputs, wanted)

    def change() -> None:
        nonlocal factor
        factor = 2.0

    return loss, change


def kinds() -> dict[str, tuple[Callable[..., Any], Callable[[], Any]]]:
    """By name a loss, and what changes what it computes."""
    torch.manual_seed(0)
    weighted, dropped, trainer, called, (free, change) = nn.CrossEntropyLoss(torch.rand(4) + 0.5), Dropped(), Trainer(), Called(), around()
    smoother = partial(setattr, weighted, "label_smoothing", 0.3)
    weights, scales = torch.rand(4) + 0.5, [1.0]

    def by_default(outputs: Tensor, wanted: Tensor, weights: Tensor = weights, *, scales: list[float] = scales) -> Tensor:
        return scales[0] * nn.functional.cross_entropy(outputs, wanted, weight=weights)

    return {
        "a number": (weighted, smoother),
        "a tensor": (weighted, lambda: weighted.weight.mul_(Y[:4] + 1)),
        "another tensor": (weighted, lambda: setattr(weighted, "weight", torch.rand(4) + 0.5)),
        "no tensor": (weighted, lambda: setattr(weighted, "weight", None)),
        "a tensor at last": (dropped.inner, lambda: setattr(dropped.inner, "weight", torch.rand(4) + 0.5)),
        "a mode": (dropped, dropped.eval),
        "in a function": (lambda outputs, wanted: weighted(outputs, wanted), lambda: setattr(weighted, "label_smoothing", 0.1)),
        "in a partial": (partial(lambda loss, *args: loss(*args), weighted), lambda: setattr(weighted, "label_smoothing", 0.2)),
        "a partial's tensor": (partial(nn.functional.cross_entropy, weight=weights), lambda: weights.mul_(Y[:4] + 1)),
        "a tensor by default": (by_default, lambda: weights.mul_(Y[:4] + 1)),
        "a list by default": (by_default, lambda: scales.__setitem__(0, 3.0)),
        "of an object": (called, lambda: setattr(called, "beta", 2.0)),
        "of a method": (trainer.loss, lambda: setattr(trainer, "beta", 2.0)),
        "of a part": (trainer.loss, lambda: setattr(trainer.inner, "label_smoothing", 0.2)),
        "named": (lambda outputs, wanted: SCALE.value * weighted(outputs, wanted), lambda: setattr(SCALE, "value", 2.0)),
        "around": (free, change),
    }


def test_what_a_loss_computes_with_is_followed(one_rank: None) -> None:
    for name, (loss, change) in kinds().items():
        plan = autopar.plan(head(), (X,), loss=loss, loss_args=(Y,), mesh="1", hardware="cpu-cluster")
        before, module = loss(head()(X), Y).item(), autopar.compile(head(), plan, loss=loss)
        assert module(X, Y).item() == pytest.approx(before, rel=1e-5), name
        change()
        with module._programs.settings.kept():
            wanted = loss(head()(X), Y).item()
        assert abs(wanted - before) > 1e-3, name
        assert module(X, Y).item() == pytest.approx(wanted, rel=1e-5), name
        assert module.eval()(X, Y).item() == pytest.approx(wanted, rel=1e-5), name
        programs = len(module._programs.made)
        module(X, Y)
        assert len(module._programs.made) == programs, name


def test_all_ranks_follow_it() -> None:
    """And the gradients: two ranks have parts of the batch."""
    plan = autopar.plan(
        head(), (X,), loss=nn.CrossEntropyLoss(torch.ones(4)), loss_args=(Y,), mesh="2", hardware="cpu-cluster",
        constraints={"input:x": "S0 R"},
    )  # fmt: skip

    def gradients(loss: nn.CrossEntropyLoss, model: Any, call: Callable[[], Tensor]) -> list[list[float]]:
        found = []
        for change in (lambda: None, lambda: setattr(loss, "label_smoothing", 0.3), lambda: loss.weight.mul_(Y[:4] + 1)):
            change()
            call().backward()
            grad = model.linear.weight.grad
            found.append((grad.full_tensor() if hasattr(grad, "full_tensor") else grad).flatten().tolist())
            model.zero_grad()
        return found

    reference, plain = head(), nn.CrossEntropyLoss(torch.ones(4))
    wanted = gradients(plain, reference, lambda: plain(reference(X), Y))

    def run(rank: int) -> list[list[float]]:
        loss = nn.CrossEntropyLoss(torch.ones(4))
        module = autopar.compile(head(), plan, loss=loss)
        return gradients(loss, module, lambda: module(X, Y))

    for found in on_ranks(run, 2):
        assert all(one == pytest.approx(other, rel=1e-4, abs=1e-6) for one, other in zip(found, wanted, strict=True))


def test_a_tensor_of_the_models_own_may_be_all_that_changes(one_rank: None) -> None:
    """The graph is then as it was, and what it was made with is not."""
    loss = nn.functional.cross_entropy
    module = autopar.compile(head(), autopar.plan(head(), (X,), loss=loss, loss_args=(Y,), mesh="1", hardware="cpu-cluster"), loss=loss)
    reference = head()
    for model in (reference, module):
        model.mask[:2] = 0
    wanted = pytest.approx(loss(reference(X), Y).item(), rel=1e-5)
    assert module(X, Y).item() == wanted and module.eval()(X, Y).item() == wanted


def test_what_a_loss_does_not_read_may_change() -> None:
    """A trainer counts its steps; the model itself is looked at as the copy that is compiled; what is torch's does not change."""
    trainer, model = Trainer(), head()
    for loss in (trainer.loss, lambda outputs, wanted: SCALE.value * outputs.sum()):
        settings = Settings(tuple(model.modules()), held_by(loss, model))
        trainer.step += 1
        SCALE.seen += 1
        assert settings.changes(tuple(model.modules())) == ()
    assert held_by(model.forward, model) == held_by(nn.functional.cross_entropy, model) == held_by(None, model) == ()


class Way(Enum):
    AS_IT_IS, WITHOUT_SIGN = 1, 2


class Configured(nn.Module):
    """What it computes is said by what containers hold; it counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.names, self.history = nn.Linear(16, 4), {"plain"}, list[float]()
        self.config, self.scales, self.counts = {"scale": 1.0, "parts": {"shift": [0.0, 1.0]}}, [1.0], {"calls": 0}
        self.options, self.tables, self.further = SimpleNamespace(power=1.0, seen=0), [torch.ones(4)], [nn.Identity()]
        self.way = Way.AS_IT_IS

    def forward(self, x: Tensor) -> Tensor:
        self.counts["calls"] += 1
        y = self.linear(x) * self.config["scale"] + self.config["parts"]["shift"][1]
        for scale in [2 * each for each in self.scales]:
            y = y * scale
        for part in self.further:
            y = part(y)
        y = y.abs() if self.way is Way.WITHOUT_SIGN else y
        return y * self.options.power * self.tables[0] * (2 if "double" in self.names else 1)


def configured() -> Configured:
    torch.manual_seed(0)
    return Configured()


INSIDE: dict[str, Callable[[Any], Any]] = {
    "an entry": lambda model: model.config.update(scale=3.0),
    "an entry of an entry": lambda model: model.config["parts"]["shift"].__setitem__(1, 0.5),
    "another item": lambda model: model.scales.append(2.0),
    "an attribute": lambda model: setattr(model.options, "power", 4.0),
    "a tensor's values": lambda model: model.tables[0].mul_(2),
    "another tensor": lambda model: model.tables.__setitem__(0, torch.full((4,), 0.1)),
    "a member": lambda model: model.names.add("double"),
    "another layer": lambda model: model.further.append(nn.Tanh()),
    "another container": lambda model: setattr(model, "config", {"scale": 5.0, "parts": {"shift": [1, 0.1]}}),
    "an entry of that": lambda model: model.config.update(scale=1.0),
    "a member of an enumeration": lambda model: setattr(model, "way", Way.WITHOUT_SIGN),
}


def test_what_containers_hold_is_followed(one_rank: None) -> None:
    plan = autopar.plan(configured(), (X,), mesh="1", mode="inference", hardware="cpu-cluster")
    module, reference = autopar.compile(configured(), plan), configured()
    for number, (name, change) in enumerate(INSIDE.items()):
        for model in (module, reference):
            change(model)
        torch.testing.assert_close(module(X), reference(X), msg=name)
        assert len(module._programs.made) == number + 1
    torch.testing.assert_close(copy.deepcopy(module)(X), reference(X))
    first = autopar.compile(configured(), plan)
    first.tables[0].mul_(3)
    torch.testing.assert_close(first(X), 3 * configured()(X), msg="all that changes is a tensor in a container")
    made, calls = len(module._programs.made), module.counts["calls"]
    module.history.append(1.0)
    module.options.seen += 1
    torch.testing.assert_close(module(X), reference(X))
    assert len(module._programs.made) == made, "what the forward does not read may change"
    assert module.counts["calls"] == calls, "a program that is made counts as no call"
