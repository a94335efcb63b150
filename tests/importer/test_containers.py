"""Arguments and results of classes that export does not know, modules that were compiled, caches that start empty."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import CaptureError
from autopar.importer import capture
from autopar.importer.arguments.containers import closed, opened
from autopar.runtime.module.compiling import rebuild
from autopar.verify import verify
from autopar.verify.launch import run_ranks


@dataclass(frozen=True)
class Batch:
    x: Tensor
    scale: float = 2.0
    more: Any = None


class Cache:
    """Keys of earlier tokens, layer by layer, as transformers keeps them: empty at first, grown by ``cat``."""

    def __init__(self) -> None:
        self.layers = [SimpleNamespace(keys=torch.tensor([]), kind=type)]

    def update(self, keys: Tensor) -> Tensor:
        self.layers[0].keys = torch.cat([self.layers[0].keys, keys], dim=-2)
        return self.layers[0].keys


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, batch: Batch, *, cache: Cache | None = None) -> UserDict:
        cache = cache if cache is not None else Cache()
        keys = cache.update(self.layer(batch.x) * batch.scale + batch.more["y"].x)
        return UserDict({"keys": keys.sum(-2), "cache": cache, "batch": Batch(keys, more=None)})


def test_containers_are_opened_and_closed():
    x, y = torch.ones(2), torch.zeros(3)
    value = (Batch(x, more=[Cache()]), UserDict({"a": y, 1: None}), SimpleNamespace(x=3), None, "text")
    tree = opened(value)
    assert tree[0]["x"] is x and tree[0]["scale"] == 2.0 and set(tree[0]["more"][0]) == {"layers"} and set(tree[1]) == {"a"}
    back = closed((tree[0] | {"x": y}, *tree[1:]), value)
    assert isinstance(back[0], Batch) and back[0].x is y and value[0].x is x and back[1]["a"] is y and back[2:] == value[2:]
    assert isinstance(back[0].more[0], Cache) and back[0].more[0].layers[0].kind is type


@pytest.mark.parametrize("grown", [False, True])
def test_models_with_classes_of_their_own_are_planned_and_verified(grown):
    batch = Batch(torch.randn(4, 3, 4), more={"y": Batch(torch.randn(4, 3, 4))})
    cache = Cache()
    cache.layers[0].keys = torch.randn(4, 2, 4)
    target = (Model(), (batch,), {"cache": cache} if grown else {})
    made = autopar.plan(*target, mesh="2x2", mode="train")
    assert set(made.inputs) == {"batch.x", "batch.more.y.x"} | ({"cache.layers.0.keys"} if grown else set())
    assert set(made.outputs) == {"keys", "cache.layers.0.keys", "batch.x"}
    result = verify(made, target, backend="simulate", steps=2)
    assert result.passed, result.problems
    assert ("aten.cat.default" in {op.op for op in made.ops}) == grown


@dataclass
class Given:
    x: Any
    sizes: Any = None
    inner: Any = None
    other: Any = None


RESULTS = {
    "an empty list in the middle": lambda x: (x, [], x.sum(), ()),
    "empty items of a dictionary": lambda x: {"x": x, "none": {}, "of": [(), {"y": x}]},
    "only plain values in a field": lambda x: Given(x, (3, 4), {"n": [1, "s", None]}),
    "an empty field": lambda x: Given(x, [], {}),
    "a dataclass of plain values in a field": lambda x: Given(x, inner=Given(3, sizes=(1.5,))),
    "an infinite number": lambda x: Given(x, float("inf")),
}


class Giving(nn.Linear):
    def __init__(self, result: Any) -> None:
        super().__init__(4, 4)
        self.result = result

    def forward(self, x: Tensor) -> Any:
        return self.result(super().forward(x))


def test_arguments_of_own_classes_are_asked_for_when_compiled():
    """The plan has dictionaries in their place; the hint was to run the model without autopar."""
    batch = Batch(torch.randn(4, 3, 4), more={"y": Batch(torch.randn(4, 3, 4))})
    plan = autopar.plan(Model(), (batch,), mesh="1", hardware="cpu-cluster")
    with pytest.raises(CaptureError, match=r"(?s)'dict' object has no attribute 'x'.*pass example="):
        rebuild(Model(), plan)
    assert rebuild(Model(), plan, example=((batch,), {}, ()))


@pytest.mark.parametrize("result", RESULTS.values(), ids=RESULTS)
def test_results_hold_what_the_model_gave(result: Any) -> None:
    """Empty containers were left out of tuples, so that all behind them moved; fields without tensors had their defaults."""
    model, x = Giving(result), torch.randn(8, 4)
    plan, wanted = autopar.plan(model, (x,), mesh="1", mode="inference", hardware="cpu-cluster"), model(x)
    assert run_ranks(lambda rank: _shown(autopar.compile(model, plan)(x)), 1) == [_shown(wanted)]
    assert verify(plan, (model, (x,)), backend="simulate").passed


def _shown(value: Any) -> Any:
    """Tensors by their sums, lists as tuples."""
    if isinstance(value, Given):
        return {name: _shown(part) for name, part in vars(value).items()}
    if isinstance(value, dict):
        return {name: _shown(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return tuple(map(_shown, value))
    return round(value.sum().item(), 4) if isinstance(value, Tensor) else value


def test_a_class_whose_field_cannot_be_told_is_not_made_up() -> None:
    """A field that no capture sees had its default."""
    model, x = Giving(lambda x: Given(x, other=print)), torch.randn(8, 4)
    plan = autopar.plan(model, (x,), mesh="1", mode="inference", hardware="cpu-cluster")

    def run(rank: int) -> tuple[Any, str]:
        found = autopar.compile(model, plan)(x)
        try:
            return found.sizes, found.other
        except AttributeError as error:
            return found.sizes, str(error)

    assert run_ranks(run, 1) == [(None, "the result has no 'other'; it has x, sizes, inner")]


@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # torch.compile's own imports
def test_compiled_modules_are_captured_as_what_they_are():
    plain = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    inside = nn.Sequential(plain[0], torch.compile(plain[1]), torch.compile(plain[2]))
    graphs = [capture(model, (torch.randn(2, 4),)).graph for model in (plain, torch.compile(plain), inside)]
    assert [op.target for op in graphs[0].ops] == [op.target for op in graphs[1].ops] == [op.target for op in graphs[2].ops]
    assert [item.name for item in graphs[1].of_kind("parameter")] == [name for name, _ in torch.compile(plain).named_parameters()]


def test_what_the_forward_notes_in_attributes_is_forgotten():
    class Counting(nn.Linear):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x)

    model = Counting(4, 4)
    capture(model, (torch.randn(2, 4),))
    assert "calls" not in vars(model)


@pytest.mark.parametrize("noted", [True, False])
def test_parameters_that_the_first_call_rescales(noted):
    class Rescaling(nn.Linear):
        rescaled = False

        def __init__(self) -> None:
            super().__init__(4, 4)
            self.rescaled = False

        def forward(self, x: Tensor) -> Tensor:
            if not self.training and not self.rescaled:
                with torch.no_grad():
                    self.weight.div_(2)
                self.rescaled = noted
            return super().forward(x)

    model, x = Rescaling(), torch.randn(8, 4)
    if not noted:
        with pytest.raises(CaptureError, match="changes its parameter weight in place"):
            capture(model, (x,), mode="inference")
        return
    made = autopar.plan(model, (x,), mesh="2x2", mode="inference")
    assert not model.rescaled
    assert verify(made, (model, (x,)), backend="simulate").passed
