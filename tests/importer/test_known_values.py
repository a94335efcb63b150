"""Conditions on values: those of constants are answered, checks leave no trace, guards of finiteness are said, the rest is refused."""

from __future__ import annotations

import inspect
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.errors import CaptureError
from autopar.importer import capture
from autopar.importer.export.exported import GradModeWarning
from autopar.importer.stand_ins.known_values import AssumedFiniteWarning
from tests.importer.checking import checked, wrong
from tests.importer.graph_interpreter import run_graph


class Model(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layer(x))


def causal(y):
    mask = torch.full((4, 4), float("-inf")).triu(1)
    return y.sin() if (mask == torch.full((4, 4), float("-inf")).triu(1)).all() else y.cos()


def counted(y):
    for number in torch.arange(4).split([1, 3])[1].tolist():
        y = y.sin() if number > 1 else y
    return y


def written(y):
    mask = torch.ones(4)
    part, before = mask[:2], mask + 1
    mask.zero_()
    part[1] = 5
    mask += 1
    mask[mask == 6] = 3
    return y.sin() if (mask.tolist(), part.tolist(), before.sum()) == ([1, 3, 1, 1], [1, 3], 8) else y.cos()


def written_with_what_is_not_known(y):
    mask = torch.ones(4)
    part = mask[:2]
    mask.copy_(y[0])
    return y.sin() if part.sum() > 1 else y.cos()  # here


def written_by_chance(y):
    mask = torch.ones(4)
    mask.bernoulli_(0.5)
    return y.sin() if mask.sum() > 1 else y.cos()  # here


def written_as_out(y):
    mask = torch.ones(4)
    torch.add(torch.ones(4), 1, out=mask)
    return y.sin() if mask.sum() > 4 else y.cos()  # here


def replaced(y):
    mask = torch.ones(4)
    mask.data = torch.zeros(4)
    return y.sin() if mask.sum() > 1 else y.cos()  # here


def made_in_many_steps(y):
    mask = torch.zeros(600)
    for place in range(600):
        mask[place] = place % 2
    return y.sin() if mask.sum() == 300 else y.cos()


def drawn(y):
    return y.sin() if torch.rand(3).sum() > 1 else y  # here


def asked(y):
    if (y > 0).all():  # here
        y = y.sin()
    else:
        raise ValueError
    return y


@pytest.mark.parametrize(("function", "count"), [(causal, 1), (counted, 2), (checked, 1), (written, 1), (made_in_many_steps, 1)])
def test_what_is_known_is_answered_and_checks_leave_no_trace(function, count):
    graph = capture(Model(function), (torch.randn(2, 4),), mode="inference").graph
    assert [op.target for op in graph.ops if "bias" not in op.name][-count:] == ["aten.sin.default"] * count
    assert len(graph.ops) == 2 + count


REFUSED = [written_with_what_is_not_known, written_by_chance, written_as_out, replaced, drawn, asked]


@pytest.mark.parametrize("function", REFUSED)
def test_what_is_not_known_is_refused(function):
    with pytest.raises(CaptureError, match=r"depends on the values of a tensor\n.*# here"):
        capture(Model(function), (torch.randn(2, 4),), mode="inference")


def test_no_tensor_to_write_to_is_none():
    assert capture(Model(lambda y: F.normalize(y, out=None)), (torch.randn(2, 4),), mode="inference").graph.ops


def test_a_check_that_fails_on_known_values_fails():
    with pytest.raises(CaptureError, match="three is not four"):
        capture(Model(wrong), (torch.randn(2, 4),), mode="inference")


def test_guards_of_finiteness_are_taken_for_granted_and_said():
    def guarded(y):
        return y if torch.isfinite(y).all() else y.clamp(-1, 1)

    with pytest.warns(AssumedFiniteWarning, match=r"test_known_values.py:\d+: planned as if all values were finite: return y if torch"):
        graph = capture(Model(guarded), (torch.randn(2, 4),), mode="inference").graph
    assert len(graph.ops) == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        capture(Model(checked), (torch.randn(2, 4),), mode="inference")


def test_distributions_look_at_their_parameters_without_a_trace():
    def likely(y):
        picked = torch.distributions.Categorical(logits=y)
        spread = torch.distributions.Normal(y, y.exp())
        joint = torch.distributions.MultivariateNormal(y[0], y.T @ y + torch.ones(4).diag())
        total = picked.log_prob(y.argmax(1)).unsqueeze(1) + joint.log_prob(y).unsqueeze(1)
        return total + spread.log_prob(y.sin()) + torch.distributions.kl_divergence(spread, spread)

    graph = capture(Model(likely), (torch.randn(2, 4),), mode="inference").graph
    assert not {op.target for op in graph.ops}.intersection({"aten.ge.Scalar", "aten.gt.Scalar", "aten.all.default", "aten.eq.Tensor"})


def test_torch_asks_whether_a_mask_is_causal_for_speed_alone():
    """Of a mask that is given nothing is known: it is added as it is."""
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), 1, enable_nested_tensor=False)
    x, mask = torch.randn(2, 6, 8), nn.Transformer.generate_square_subsequent_mask(6)
    captured = capture(encoder, (x, mask), mode="inference")
    values = {**dict(encoder.named_parameters()), **captured.constants, "src": x, "mask": mask}
    found = run_graph(captured.graph, {item.tensor: values[item.name].detach() for item in captured.graph.inputs})
    (output,) = captured.graph.outputs
    torch.testing.assert_close(found[output.tensor], encoder(x, mask).detach())


def by_gradients(y):
    return y * 2 if torch.is_grad_enabled() else y * 3


def by_inference_mode(y):
    return y * 3 if torch.is_inference_mode_enabled() else y * 2


ASKING = [
    (by_gradients, "train", 2, "planned as if torch.is_grad_enabled() were always True"),
    (by_gradients, "inference", 3, "planned as if torch.is_grad_enabled() were always False"),
    (by_inference_mode, "inference", 2, "planned as if torch.is_inference_mode_enabled() were always False"),
]


@pytest.mark.parametrize(("function", "mode", "factor", "words"), ASKING)
def test_what_depends_on_the_callers_mode_of_autograd_is_said(function, mode, factor, words):
    model, x = Model(function), torch.randn(2, 4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        captured = capture(model, (x,), mode=mode)
    found = {str(one.message) for one in caught if one.category is GradModeWarning}
    assert len(found) == 1
    (text,) = found
    line = function.__code__.co_firstlineno + 1
    assert text.startswith(f"{__file__}:{line}: {words}: return y") and "\nhint: call the compiled module where torch.is_" in text
    numbers = [argument for op in captured.graph.ops for argument in op.args if op.phase == "forward" and argument in (2, 3)]
    assert numbers == [factor]
    assert inspect.isbuiltin(torch.is_grad_enabled), "the function is torch's own again"


def in_a_mode_of_its_own(y):
    with torch.no_grad():
        return y.sin() if torch.is_grad_enabled() else y.cos() + 0 * y


def test_what_depends_on_no_caller_is_not():
    """The forward's own ``torch.no_grad()``, and modules of torch, which ask to choose a faster way."""
    encoder, x = nn.TransformerEncoderLayer(4, 2, dropout=0.0, batch_first=True), torch.randn(2, 3, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error", GradModeWarning)
        capture(Model(lambda y: y + in_a_mode_of_its_own(y)), (x,), mode="train")
        for mode in ("train", "inference"):
            capture(nn.Sequential(encoder, nn.TransformerEncoder(encoder, 2)), (x,), mode=mode)
            capture(nn.MultiheadAttention(4, 2, batch_first=True), (x, x, x), mode=mode)
