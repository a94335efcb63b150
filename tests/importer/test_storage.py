"""Operators about storage and bags of lookups, rewritten: values and gradients of the model's own."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from autopar.errors import CaptureError
from autopar.importer import capture
from autopar.importer.trace.in_place import InPlace
from autopar.rules import find_rule
from tests.importer.graph_interpreter import run_graph


class Model(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *inputs):
        return self.function(*inputs)


def check(function, *inputs):
    """Outputs and input gradients of the captured graph against the function's."""
    captured = capture(Model(function), inputs)
    values = dict(captured.constants)
    for item in captured.graph.inputs:
        if item.kind == "input":
            values[item.tensor] = inputs[int(item.name.rpartition(".")[2])]
    expected = function(*inputs)
    tangent = torch.randn_like(expected)
    values |= {item.tensor: tangent for item in captured.graph.of_kind("tangent")}
    found = run_graph(captured.graph, values)
    for item in captured.graph.outputs:
        if item.kind == "output":
            torch.testing.assert_close(found[item.tensor], expected)
        else:
            mine = inputs[int(item.name.rpartition(".")[2])]
            torch.testing.assert_close(found[item.tensor], torch.autograd.grad(expected, mine, tangent, retain_graph=True)[0])
    assert all(find_rule(op, captured.graph.tensors).known for op in captured.graph.ops)


WINDOW = torch.hann_window(16)
X = torch.randn(6, 8, requires_grad=True)
INDICES, OFFSETS = torch.randint(6, (12,)), torch.tensor([0, 3, 3, 9])


@pytest.mark.parametrize("function", [
    lambda x: (x * 2).as_strided((3, 4, 2), (4, 2, 1), 1),
    lambda x: (x * 2).t().as_strided((5, 3), (8, 2)),
    lambda x: F.adaptive_avg_pool2d(x[None, None].contiguous(memory_format=torch.channels_last), 1),
    lambda x: F.adaptive_avg_pool2d(x[None, None], (2, 4)),
    lambda x: F.adaptive_avg_pool1d(x[None].transpose(1, 2), 1),
    lambda x: (x * 2).fill_diagonal_(3.0),
    lambda x: (x * 2).reshape(12, 4).fill_diagonal_(-1.0, wrap=True),
    lambda x: (x * 2).reshape(4, 12).fill_diagonal_(-1.0, wrap=True),
    lambda x: (x * 2).flatten()[:27].reshape(3, 3, 3).fill_diagonal_(0.0),
    lambda x: torch.istft(torch.stft(x.reshape(2, 24), 16, 4, window=WINDOW, return_complex=True), 16, 4, window=WINDOW),
])  # fmt: skip
def test_strides(function):
    check(function, X)


def test_a_view_of_what_lies_in_another_order_in_memory_here():
    """A layer over places gives a picture whose channels lie innermost, a convolution leaves them there, and ``contiguous`` does nothing;
    products as the graph holds them lie otherwise."""
    over, weight, bias = torch.randn(4, 4), torch.randn(3, 4, 1, 1), torch.randn(4)

    def function(x):
        picture = F.linear(x.reshape(2, 4, 6).transpose(1, 2), over, bias).transpose(1, 2).reshape(2, 4, 2, 3)
        return F.conv2d(picture, weight).permute(0, 2, 3, 1).contiguous().view(-1, 3)

    check(function, X)


def picture(x):
    """Of a layer over places and a convolution: its channels lie innermost in torch's own run, and not in a product of the dialect's."""
    laid = F.linear(x.reshape(2, 4, 6).transpose(1, 2), torch.ones(4, 4) / 3, torch.ones(4)).transpose(1, 2).reshape(2, 4, 2, 3)
    return F.conv2d(laid, torch.ones(3, 4, 1, 1) / 2).permute(0, 2, 3, 1)


def through_view(x):
    h = picture(x).contiguous()
    h.view(-1, 3).mul_(2.0)
    return h.square().sum(0)


def through_reshape(x):
    h = picture(x)
    h.reshape(-1, 3).mul_(2.0)
    return h.square().sum(0)


def through_flatten_without_grad(x):
    h = picture(x)
    with torch.no_grad():
        h.flatten(0, 2).mul_(2.0)
    return h.square().sum(0)


def into_a_copy(x):
    h = (x * 2).t().relu()
    h.reshape(-1).mul_(3)
    return h.square()


def into_a_copy_that_a_loss_reads(x):
    logits = (x * 1.0).reshape(3, 4, 4).transpose(0, 1).reshape(12, 4)
    logits.mul_(2)
    return F.cross_entropy(logits, torch.arange(12) % 4) + x.sum(0)


def into_a_copy_of_one_part(x):
    h = x * 2
    torch.cat([h]).add_(1)
    return h.square()


def through_strides(x):
    h = x * 2
    h.as_strided((4, 4), (4, 1), 3).add_(1)
    return h.square()


def then_by_strides(x):
    h = (x * 2).t()
    h.mul_(3)
    return h.as_strided((3, 4, 2), (8, 2, 3), 1).square()


def through_what_drops_nothing(x):
    h = x * 2
    F.dropout(h, 0.5, training=False).add_(1)
    return h.square()


@pytest.mark.parametrize("function", [
    through_view, through_reshape, through_flatten_without_grad, into_a_copy, into_a_copy_that_a_loss_reads, into_a_copy_of_one_part,
    through_what_drops_nothing, through_strides, then_by_strides,
])  # fmt: skip
def test_what_is_written_in_place_is_read_as_in_the_model(function):
    """Whether a reshape is a view hangs on the order in memory."""
    check(function, X)


def test_a_view_that_would_be_a_copy_is_refused_where_it_is_written():
    def function(x):
        h = x * 2
        h.t().add_(1)
        return h

    exported = torch.export.export(Model(function), (X,), strict=False).graph_module
    in_place = InPlace(exported)
    double, turned, _, _ = (node for node in exported.graph.nodes if node.op in ("call_function", "output"))
    value = X * 2
    assert in_place.concerns(double) and in_place.concerns(turned)
    assert in_place.run(turned, value.t, turned.target, {double: value}).data_ptr() == value.data_ptr()
    with pytest.raises(CaptureError, match=r"aten\.t\.default shares memory with its argument") as refused:
        in_place.run(turned, lambda: value.t().clone(), turned.target, {double: value})
    assert ".clone()" in str(refused.value)


@pytest.mark.parametrize("others", [1, 2])
def test_parts_of_nothing_have_gradients_of_nothing(others):
    empty, parts = torch.empty(0, 8, requires_grad=True), [X] * others
    captured = capture(Model(lambda x, *parts: torch.cat([x, *parts])), (empty, *parts))
    assert len(captured.graph.gradients) == 1 + others
    gradient = captured.graph.gradients[next(item.tensor for item in captured.graph.inputs if item.name.endswith(".0"))]
    assert next(captured.graph.tensors[item.tensor].shape for item in captured.graph.outputs if item.name == gradient) == (0, 8)


def test_as_strided_scatter():
    check(lambda x, y: torch.as_strided_scatter(x.detach() * 1.0, y, (3, 2), (5, 1), 2), X, torch.randn(3, 2, requires_grad=True))


@pytest.mark.parametrize("shape", [(6, 8), (6, 1)])
def test_masked_scatter(shape):
    mask, source = torch.rand(shape) < 0.5, torch.randn(7, 8, requires_grad=True)
    check(lambda x, s, m: (x * 2).masked_scatter(m, s), X, source, mask)


@pytest.mark.parametrize(("shape", "masked"), [((8,), (6, 8)), ((6, 1), (1, 8)), ((3, 1, 8), (6, 1))])
def test_masked_scatter_broadcasts(shape, masked):
    mask, source = torch.rand(masked) < 0.5, torch.randn(3, 6, 8, requires_grad=True)
    check(lambda x, s, m: (x * 2).masked_scatter(m, s), torch.randn(shape, requires_grad=True), source, mask)


@pytest.mark.parametrize("shape", [(6, 8), (8,)])
def test_masked_scatter_of_nothing(shape):
    x, mask = torch.randn(shape, requires_grad=True), torch.zeros(6, 8, dtype=torch.bool)
    check(lambda x, s, m: (x * 2).masked_scatter(m, s), x, torch.zeros(0), mask)


def test_storage_beyond_the_tensor_is_refused():
    with pytest.raises(CaptureError, match="beyond the tensor"):
        capture(Model(lambda x: (x * 2)[3:].as_strided((6, 8), (8, 1), 0)), (X,))


@pytest.mark.parametrize("padding", [None, 1])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_of_one_size(mode, padding):
    check(lambda w, i: F.embedding_bag(i, w, mode=mode, padding_idx=padding), X, INDICES.reshape(4, 3))


@pytest.mark.parametrize(
    "options", [{"mode": "sum"}, {"mode": "mean"}, {"mode": "mean", "padding_idx": 2}, {"mode": "sum", "include_last_offset": True}]
)
def test_bags_by_offsets(options):
    offsets = torch.cat([OFFSETS, torch.tensor([12])]) if "include_last_offset" in options else OFFSETS
    check(lambda w, i, o: F.embedding_bag(i, w, o, **options), X, INDICES, offsets)


def test_weighted_bags():
    check(
        lambda w, i, s: F.embedding_bag(i, w, mode="sum", per_sample_weights=s),
        X,
        INDICES.reshape(4, 3),
        torch.rand(4, 3, requires_grad=True),
    )
