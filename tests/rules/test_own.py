"""Rules that users give for operators of their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import RuleError, UsageError
from autopar.planning.cautions import UnknownOperatorWarning
from autopar.rules import find_rule, why_once
from autopar.rules.lookup import OWN, find_rule_of_shapes
from autopar.verify import verify


@torch.library.custom_op("autopar_tests::scaled", mutates_args=())
def scaled(x: Tensor, w: Tensor, power: int) -> Tensor:
    return (x * w) ** power


@scaled.register_fake
def _(x: Tensor, w: Tensor, power: int) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("autopar_tests::scaled_backward", mutates_args=())
def scaled_backward(grad: Tensor, x: Tensor, w: Tensor, power: int) -> tuple[Tensor, Tensor]:
    inner = grad * power * (x * w) ** (power - 1)
    return inner * w, (inner * x).sum((0, 1))


@scaled_backward.register_fake
def _(grad: Tensor, x: Tensor, w: Tensor, power: int) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(w)


def _save(ctx, inputs, output):  # type: ignore[no-untyped-def]
    ctx.save_for_backward(*inputs[:2])
    ctx.power = inputs[2]


scaled.register_autograd(lambda ctx, grad: (*scaled_backward(grad, *ctx.saved_tensors, ctx.power), None), setup_context=_save)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(16))

    def forward(self, x: Tensor) -> Tensor:
        return scaled(x.sin(), self.w, 2).sum()


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    yield
    OWN.clear()
    find_rule_of_shapes.cache_clear()


def test_an_operator_of_ones_own_is_whole_until_it_has_a_rule() -> None:
    torch.manual_seed(0)
    model, x = Model(), torch.randn(4, 8, 16)

    def planned() -> autopar.Plan:
        pins = {"input:x": "S0 R S1"}
        return autopar.plan(model, (x,), mesh="dp=2,tp=2", hardware="cpu-cluster", cost_model="communication", constraints=pins)

    with pytest.warns(UnknownOperatorWarning, match="autopar_tests.scaled"):
        before = planned()
    specs = {op.op.partition(".")[2].partition(".")[0]: [item.spec for item in (*op.inputs, *op.outputs)] for op in before.ops}
    assert not any("S" in spec for spec in specs["scaled"])
    autopar.rule("autopar_tests::scaled", "b s d, d -> b s d")
    autopar.rule("autopar_tests::scaled_backward", "b s d, b s d, d -> b s d, d | linear {0}")
    after = planned()
    specs = {op.op.partition(".")[2].partition(".")[0]: [item.spec for item in (*op.inputs, *op.outputs)] for op in after.ops}
    assert specs["scaled"] == ["S0 R S1", "S1", "S0 R S1"]
    assert specs["scaled_backward"] == ["S0 R S1", "S0 R S1", "S1", "S0 R S1", "S1 +P0"]
    assert verify(after, (model, (x,)), backend="simulate", steps=2).passed


def test_what_cannot_be_a_rule_is_refused_in_words() -> None:
    for name in ("mylib.op", "mylib::", "::op", "op", "a::b.c.d", ""):
        with pytest.raises(UsageError, match=r"not the name of an operator\nhint: write it as it is registered"):
            autopar.rule(name, "a -> a")
    for name in ("aten::mm", "autopar::contract"):
        with pytest.raises(UsageError, match="not an operator of your own"):
            autopar.rule(name, "a -> a")
    with pytest.raises(RuleError, match="hint: a rule reads like"):
        autopar.rule("mylib::op", "b s d, d ->> b s d")
    assert not OWN


def test_a_rule_that_does_not_fit_the_call_leaves_it_whole_and_says_why() -> None:
    graph = autopar.capture(Model(), (torch.randn(4, 8, 16),))
    op = next(op for op in graph.ops if op.target == "autopar_tests.scaled.default")
    assert not find_rule(op, graph.tensors).known and why_once(op)
    autopar.rule("autopar_tests::scaled", "b s d -> b s d", once=True)
    rule = find_rule(op, graph.tensors)
    assert not rule.known and "2" in rule.reason and why_once(op) == "its rule says that it runs once"
    autopar.rule("autopar_tests::scaled.default", "... d!, d! -> ... d!")
    assert find_rule(op, graph.tensors).known and not why_once(op), "an overload's own rule comes first"
