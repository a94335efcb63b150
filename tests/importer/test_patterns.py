"""Written-out RMS norms, repeated heads and merged rows are recognised, whatever the order of their factors; near misses are not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autopar.importer import capture
from tests.importer.test_capture import run, targets

torch.set_num_threads(1)


class Norm(nn.Module):
    def __init__(self, form, dtype=torch.float32) -> None:
        super().__init__()
        self.form = form
        self.weight = nn.Parameter(torch.rand(8, dtype=dtype) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.form(self.weight, x)


def llama(weight, x):
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
    return weight * wide.to(x.dtype)


def t5(weight, x):
    return (torch.rsqrt((x.float() ** 2).mean(dim=-1, keepdim=True) + 1e-5) * x).to(x.dtype) * weight


def square(weight, x):
    return x * torch.rsqrt(1e-5 + (x * x).mean(2, keepdim=True)) * (1 + weight)


@pytest.mark.parametrize("form", [llama, t5, square])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_written_out(form, dtype):
    model, x = Norm(form, dtype), torch.randn(2, 3, 8, dtype=dtype, requires_grad=True)
    captured = capture(model, (x,))
    assert {"autopar.rms_norm.default", "autopar.rms_norm_backward.default"} <= set(targets(captured.graph))
    assert not {"aten.rsqrt.default", "aten.pow.Tensor_Scalar", "aten.mean.dim"} & set(targets(captured.graph))
    tangent = torch.randn(2, 3, 8).to(dtype)
    results = run(captured, model, {"x": x}, {"0": tangent})
    out = model(x)
    out.backward(tangent)
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 3e-2, "atol": 3e-2}
    torch.testing.assert_close(results["output", "0"], out.detach(), **tolerance)
    torch.testing.assert_close(results["gradient", "x"], x.grad, **tolerance)
    torch.testing.assert_close(results["gradient", "weight"], model.weight.grad, **tolerance)


NEAR_MISSES = [
    lambda w, x: w * (x * torch.rsqrt(x.pow(3).mean(-1, keepdim=True).abs() + 1e-5)),
    lambda w, x: w * (x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-5)),
    lambda w, x: w * (x.relu() * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)),
    lambda w, x: w.reshape(8, 1, 1)[:3] * (x[:1] * torch.rsqrt(x[:1].pow(2).mean(-1, keepdim=True) + 1e-5)),
    lambda w, x: w * (x * torch.rsqrt(torch.add(x.pow(2).mean(-1, keepdim=True), 1.0, alpha=2) + x.mean())),
]


@pytest.mark.parametrize("form", NEAR_MISSES)
def test_what_is_not_rms_norm_is_left(form):
    model, x = Norm(form), torch.randn(2, 3, 8)
    captured = capture(model, (x,), mode="inference")
    assert "autopar.rms_norm.default" not in targets(captured.graph)
    torch.testing.assert_close(run(captured, model, {"x": x})["output", "0"], model(x).detach())


class Attend(nn.Module):
    def __init__(self, repeat) -> None:
        super().__init__()
        self.repeat = repeat

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(q, self.repeat(k), self.repeat(v), is_causal=True)


def copied(x):
    b, g, s, d = x.shape
    return x[:, :, None].expand(b, g, 3, s, d).reshape(b, g * 3, s, d)


def interleaved(x):
    return x.repeat_interleave(3, dim=1)


def tiled(x):
    return x.repeat(1, 3, 1, 1)


@pytest.mark.parametrize(("repeat", "heads"), [(copied, 2), (interleaved, 2), (tiled, 6)])
def test_repeated_heads_are_shared(repeat, heads):
    inputs = {"q": torch.randn(2, 6, 5, 8), "k": torch.randn(2, 2, 5, 8), "v": torch.randn(2, 2, 5, 8)}
    model = Attend(repeat)
    captured = capture(model, tuple(inputs.values()), mode="inference")
    (op,) = [op for op in captured.graph.ops if op.target == "autopar.attention.default"]
    assert captured.graph.tensors[op.inputs[1]].shape[1] == heads
    torch.testing.assert_close(run(captured, model, inputs)["output", "0"], model(*inputs.values()))


class Heads(nn.Module):
    """torch's own attention; with weights it takes another way."""

    def __init__(self, weights: bool, batch_first: bool) -> None:
        super().__init__()
        self.weights, self.attention = weights, nn.MultiheadAttention(8, 2, batch_first=batch_first)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=self.weights)[0]


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_rows_of_torchs_attention_stay_apart(weights, batch_first):
    """Merged, time before batch, they could not be split by the batch without sending them."""
    model, x = Heads(weights, batch_first), torch.randn(3, 5, 8, requires_grad=True)
    captured = capture(model, (x,))
    assert not [tensor for tensor in captured.graph.tensors.values() if tensor.shape[0:1] == (15,)]
    tangent = torch.randn(3, 5, 8)
    results = run(captured, model, {"x": x}, {"0": tangent})
    out = model(x)
    out.backward(tangent)
    torch.testing.assert_close(results["output", "0"], out.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(results["gradient", "x"], x.grad, rtol=1e-5, atol=1e-5)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(results["gradient", name], parameter.grad, rtol=1e-5, atol=1e-5)


class Rows(nn.Module):
    """Tokens ``[3, 5, 8]`` under a layer in some form, with its weight and bias."""

    def __init__(self, form) -> None:
        super().__init__()
        self.form, self.layer = form, nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.form(x, self.layer)


NEAR_ROWS = [  # merged first to last, told apart in other pieces, read as they are too, or of other columns
    lambda x, layer: layer(x.reshape(15, 8)).view(3, 5, 4),
    lambda x, layer: layer(x.transpose(0, 1).reshape(15, 8)).view(5, 12),
    lambda x, layer: layer(x.transpose(0, 1).reshape(15, 8)).view(5, 6, 2),
    lambda x, layer: layer(x.transpose(0, 1).reshape(15, 8)),
]


@pytest.mark.parametrize("form", NEAR_ROWS)
def test_other_merged_rows_are_left(form):
    model, x = Rows(form), torch.randn(3, 5, 8)
    captured = capture(model, (x,), mode="inference")
    assert [tensor for tensor in captured.graph.tensors.values() if tensor.shape[0:1] == (15,)]
    torch.testing.assert_close(run(captured, model, {"x": x})["output", "0"], model(x).detach())


def test_merged_rows_that_something_else_reads_stay_there():
    def form(x, layer):
        rows = layer(x.transpose(0, 1).reshape(15, 8))
        return rows.view(5, 3, 4).sum() + rows.softmax(0)

    model, x = Rows(form), torch.randn(3, 5, 8)
    captured = capture(model, (x,), mode="inference")
    torch.testing.assert_close(run(captured, model, {"x": x})["output", "0"], model(x).detach())


class Written(nn.Module):
    """A form between two layers. Some of its parts are written in place before its end."""

    def __init__(self, form) -> None:
        super().__init__()
        self.form, self.layer, self.table = form, nn.Linear(8, 8), nn.Parameter(torch.randn(6, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.form(self, self.layer(x))


def norm_of_what_was(model, x):
    normal = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
    x.add_(1)
    return model.layer.bias * normal


def norm_without_grad(model, x):
    normal = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
    with torch.no_grad():
        x.view(-1).add_(1)
    return model.layer.bias * normal


def norm_by_another_mean(model, x):
    mean = x.pow(2).mean(-1, keepdim=True)
    mean.view(-1).add_(1)
    return model.layer.bias * (x * torch.rsqrt(mean + 1e-5))


def norm_times(model, x):
    normal = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
    normal[..., 2:].mul_(3)
    return model.layer.bias * normal


def heads_that_were(model, x):
    k = x.view(3, 1, 5, 8) * 2
    repeated = k.repeat_interleave(3, 1)
    k.zero_()
    return nn.functional.scaled_dot_product_attention(x.view(3, 1, 5, 8).expand(3, 3, 5, 8), repeated, repeated)


def heads_written(model, x):
    repeated = interleaved(x.view(3, 1, 5, 8) * 2)
    repeated[:, 1] += 1
    return nn.functional.scaled_dot_product_attention(x.view(3, 1, 5, 8).expand(3, 3, 5, 8), repeated, repeated)


def rows_that_were(model, x):
    rows = model.layer(x.transpose(0, 1).reshape(15, 8))
    x.zero_()
    return rows.view(5, 3, 8)


def rows_under_another_weight(model, x):
    weight = model.layer.weight * 1
    rows = nn.functional.linear(x.transpose(0, 1).reshape(15, 8), weight)
    weight[0] = 0
    return rows.view(5, 3, 8)


def bags_of_other_sizes(model, x):
    offsets = torch.arange(0, 15, 3)
    offsets[1:] -= 1
    indices = (x.sum(-1) > 0).long().view(-1)
    return nn.functional.embedding_bag(indices, model.table, offsets, mode="sum")


def loss_of_what_was(model, x):
    logits = x.transpose(0, 1).reshape(15, 8)
    x.zero_()
    return nn.functional.cross_entropy(logits, torch.arange(15) % 8)


@pytest.mark.parametrize("form", [
    norm_of_what_was, norm_without_grad, norm_by_another_mean, norm_times, heads_that_were, heads_written, rows_that_were,
    rows_under_another_weight, bags_of_other_sizes, loss_of_what_was,
])  # fmt: skip
def test_what_is_written_in_place_is_part_of_no_form(form):
    model, x = Written(form), torch.randn(3, 5, 8)
    captured = capture(model, (x,), mode="inference")
    (found,) = (value for (kind, _), value in run(captured, model, {"x": x}).items() if kind == "output")
    torch.testing.assert_close(found, model(x).detach())


def norm_of_what_is(model, x):
    x[..., 2:] += 1
    scaled = model.layer.bias * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))
    return scaled, x.zero_()


def test_what_is_written_before_and_after_a_form_does_not_matter():
    model, x = Written(norm_of_what_is), torch.randn(3, 5, 8)
    captured = capture(model, (x,), mode="inference")
    assert "autopar.rms_norm.default" in targets(captured.graph)
    torch.testing.assert_close(run(captured, model, {"x": x})["output", "0"], model(x)[0].detach())


def test_slices_name_their_bounds():
    class Slices(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[:, -3:] + x[..., :-1, 1:][:, :, :3][:, :3].sum() + x[:, 5:9:2].sum()

    captured = capture(Slices(), (torch.randn(2, 8, 3),), mode="inference")
    bounds = {op.args[1:] for op in captured.graph.ops if op.target == "aten.slice.Tensor"}
    assert bounds == {(1, 5, 8, 1), (1, 0, 7, 1), (2, 1, 3, 1), (1, 0, 3, 1), (1, 5, 8, 2)}
