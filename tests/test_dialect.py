"""Every operator of the dialect against the torch operators it stands for: values, gradients, shape functions."""

from __future__ import annotations

import math
import re

import pytest
import torch
from torch.nn import functional

import autopar.dialect as dialect
from autopar.dialect import attention as attention_module
from autopar.dialect import attention_kernels
from autopar.errors import UsageError
from autopar.runtime.instructions.operators import find_function
from autopar.verify.live_memory import LiveMemory

ops = torch.ops.autopar
torch.set_num_threads(1)


def random(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0, grad: bool = True) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype).requires_grad_(grad)


def check(ours, theirs, *inputs: torch.Tensor | None, rtol: float = 1e-9, atol: float = 1e-10) -> None:
    """Same value and same gradients of a random projection."""
    results, gradients = [], []
    for function in (ours, theirs):
        copies = [None if x is None else x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
        result = function(*copies)
        wanted = [x for x in copies if x is not None and x.requires_grad]
        results.append(result.detach())
        gradients.append(torch.autograd.grad(result, wanted, random(*result.shape, dtype=result.dtype, seed=9, grad=False)))
    torch.testing.assert_close(*results, rtol=rtol, atol=atol)
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol)


def registered(operator, *args) -> None:
    """Schema, shape function, strides and autograd registration agree with what runs."""
    torch.library.opcheck(operator, args, test_utils=("test_schema", "test_autograd_registration", "test_faketensor"))


# --- contract ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("equation", "a", "b"),
    [
        ("b s k, n k -> b s n", (2, 3, 5), (4, 5)),
        ("m k, k n -> m n", (3, 5), (5, 4)),
        ("b h m k, b h k n -> b h m n", (2, 3, 4, 5), (2, 3, 5, 6)),
        ("k, k -> ", (5,), (5,)),
        ("m, n -> m n", (3,), (4,)),
        ("b s e c, b s d -> e b c d", (2, 3, 4, 5), (2, 3, 6)),
        ("b s n, b s k -> n k", (2, 3, 4), (2, 3, 5)),
    ],
)
def test_contract_is_einsum(equation, a, b):
    plain = equation.replace(" ", "")
    check(lambda x, y: ops.contract(x, y, equation), lambda x, y: torch.einsum(plain, x, y), random(*a), random(*b))
    registered(ops.contract.default, random(*a), random(*b), equation)


def test_contract_result_is_contiguous():
    assert ops.contract(random(2, 3, 5), random(4, 5), "b s k, n k -> n s b").is_contiguous()


@pytest.mark.parametrize(
    ("equation", "problem"), [("m k -> m", "equation like"), ("m k, n k", "equation like"), ("m, n k -> m", "fit shapes")]
)
def test_contract_refuses_what_does_not_fit(equation, problem):
    with pytest.raises(ValueError, match=problem):
        ops.contract(random(3, 5, grad=False), random(4, 5, grad=False), equation)


def test_contract_refuses_factors_of_two_sizes():
    with pytest.raises(ValueError, match="factor k is 5 and 6"):
        ops.contract(random(3, 5, grad=False), random(4, 6, grad=False), "m k, n k -> m n")


# --- attention --------------------------------------------------------------------------------------------------------

ATTENTION_CASES = [
    pytest.param((2, 4, 6, 8), (2, 4, 6, 8), None, False, id="plain"),
    pytest.param((2, 4, 6, 8), (2, 4, 6, 8), None, True, id="causal"),
    pytest.param((2, 4, 6, 8), (2, 2, 6, 8), None, True, id="shared-heads"),
    pytest.param((2, 4, 5, 8), (2, 1, 7, 8), None, False, id="cross"),
    pytest.param((2, 4, 5, 8), (2, 4, 7, 8), None, True, id="causal-cross"),
    pytest.param((2, 4, 6, 8), (2, 4, 6, 8), "float", False, id="float-mask"),
    pytest.param((2, 4, 6, 8), (2, 2, 6, 8), "bool", False, id="bool-mask"),
]


def attention_mask(kind: str | None, q: tuple[int, ...], k: tuple[int, ...]) -> torch.Tensor | None:
    if kind is None:
        return None
    mask = random(q[0], 1, q[2], k[2], grad=False)
    return mask if kind == "float" else (mask > 0) | torch.eye(q[2], k[2], dtype=torch.bool)


@pytest.mark.parametrize("kernel", ["chosen", "math"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("q", "k", "mask", "causal"), ATTENTION_CASES)
def test_attention_is_scaled_dot_product_attention(q, k, mask, causal, dtype, kernel, monkeypatch):
    if kernel == "math":
        monkeypatch.setattr(attention_kernels, "choose_kernel", lambda *_, **__: "math")
    bias = attention_mask(mask, q, k)
    bias = bias.to(dtype) if mask == "float" else bias
    tolerance = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 6e-2}[dtype]

    def theirs(a, b, c):
        return functional.scaled_dot_product_attention(a, b, c, bias, 0.0, causal, scale=0.3, enable_gqa=True)

    tensors = [random(*shape, dtype=dtype, seed=i) for i, shape in enumerate((q, k, k))]
    check(lambda a, b, c: ops.attention(a, b, c, bias, causal, 0.3, 0.0, 0)[0], theirs, *tensors, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("q", "k", "mask", "causal"), ATTENTION_CASES)
def test_attention_kernels_agree_on_lse(q, k, mask, causal, monkeypatch):
    tensors = [random(*shape, seed=i, grad=False) for i, shape in enumerate((q, k, k))]
    arguments = (*tensors, attention_mask(mask, q, k), causal, 0.3, 0.0, 0)
    _, chosen = ops.attention(*arguments)
    monkeypatch.setattr(attention_kernels, "choose_kernel", lambda *_, **__: "math")
    torch.testing.assert_close(chosen, ops.attention(*arguments)[1])


def test_attention_with_values_of_another_size_and_hidden_rows():
    q, k, v = random(2, 4, 6, 8), random(2, 4, 6, 8, seed=1), random(2, 4, 6, 5, seed=2)
    mask = torch.ones(6, 6, dtype=torch.bool)
    mask[2] = False
    check(
        lambda a, b, c: ops.attention(a, b, c, mask, False, 0.5, 0.0, 0)[0],
        lambda a, b, c: functional.scaled_dot_product_attention(a, b, c, mask, scale=0.5),
        q, k, v,
    )  # fmt: skip


def test_attention_lse_is_float32_for_narrow_inputs_and_layout_is_heads_last():
    q = random(2, 4, 6, 8, dtype=torch.bfloat16, grad=False)
    out, lse = ops.attention(q, q, q, None, True, 0.3, 0.0, 0)
    assert lse.dtype == torch.float32 and lse.shape == (2, 4, 6)
    assert out.transpose(1, 2).is_contiguous()


def test_attention_is_registered():
    q, k = random(2, 4, 6, 8), random(2, 2, 6, 8)
    registered(ops.attention.default, q, k, k, None, True, 0.3, 0.0, 0)
    out, lse = ops.attention(q.detach(), k.detach(), k.detach(), None, True, 0.3, 0.0, 0)
    saved = [x.detach() for x in (q, k, k, out, lse)]
    registered(ops.attention_backward.default, random(*q.shape, grad=False), *saved, None, True, 0.3, 0.0, 0)
    out, lse = ops.attention(*saved[:3], None, True, 0.3, 0.0, 3)
    registered(ops.attention.default, q, k, k, None, True, 0.3, 0.0, 3)
    registered(ops.attention_backward.default, random(*q.shape, grad=False), *saved[:3], out, lse, None, True, 0.3, 0.0, 3)


@pytest.mark.parametrize("mask_shape", [(6, 7), (2, 1, 1, 7), (2, 4, 6, 1)])
def test_attention_with_operands_of_any_layout_and_masks_that_broadcast(mask_shape):
    q, k = random(2, 8, 6, 4).permute(0, 3, 2, 1), random(2, 8, 4, 7, seed=1).permute(0, 2, 3, 1)
    q, k, mask = q.detach().requires_grad_(), k.detach().requires_grad_(), random(*mask_shape, grad=False)
    assert q.stride(-1) != 1 and k.stride(-1) != 1
    grad = random(8, 2, 4, 6, grad=False).permute(1, 2, 3, 0)
    out = ops.attention(q, k, k, mask, False, 0.3, 0.0, 0)[0]
    expected = functional.scaled_dot_product_attention(q, k, k, mask, scale=0.3)
    torch.testing.assert_close(out, expected)
    for a, b in zip(torch.autograd.grad(out, (q, k), grad), torch.autograd.grad(expected, (q, k), grad), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("offset", [None, 0, 8, 40])
@pytest.mark.parametrize("way", ["cudnn", "cudnn masked", "flash", "efficient", "efficient masked"])
def test_fused_gpu_kernels_accept_what_they_are_given(way, offset, monkeypatch):
    """Without an offset attention is not causal. (Shapes alone: no kernel runs on the device of nothing.)"""
    kernel, masked, calls = way.partition(" ")[0], "masked" in way, []

    def choose(q, k, v, mask, causal, *, backward):
        calls.append((q.shape[2], k.shape[2], causal))
        return kernel

    monkeypatch.setattr(attention_kernels, "choose_kernel", choose)
    q = torch.empty(2, 8, 40, 64, device="meta", dtype=torch.bfloat16)
    k = torch.empty(2, 2, 96, 64, device="meta", dtype=torch.bfloat16)
    mask = torch.empty(2, 1, 40, 96, device="meta", dtype=torch.bool) if masked else None
    settings = mask, offset is not None, 0.125, 0.0, offset or 0
    out, lse = attention_module._attention(q, k, k, *settings)
    assert out.shape == q.shape and lse.shape == (2, 8, 40) and lse.dtype == torch.float32
    gradients = attention_module._attention_backward(q, q, k, k, out, lse, *settings)
    assert [g.shape for g in gradients] == [q.shape, k.shape, k.shape]
    if offset is not None and not masked:
        wanted = [(40, 40, True)] if offset == 0 else [(40, offset, False), (40, 40, True)]
        assert calls == wanted * 2, "a kernel is causal on squares alone, and no key is read that no query sees"


def shapes_alone() -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys."""
    q, k = (torch.empty(1, heads, 64, 32, device="meta", dtype=torch.bfloat16) for heads in (4, 2))
    return q, k


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("choice", ["cudnn", "flash", "efficient", "math", "overrideable"])
def test_a_gpu_runs_the_kernel_that_torch_would(choice, backward, monkeypatch):
    asked, checked = [], []
    monkeypatch.setattr(attention_kernels, "choose_attention", lambda *given, backward: asked.append((given, backward)) or choice)
    monkeypatch.setattr(attention_kernels, "_check_kernel", lambda *given: checked.append(given))
    q, k = shapes_alone()
    found = attention_kernels._choose_on_gpu(q, k, k, None, True, backward)
    assert found == (choice if choice in ("cudnn", "flash", "efficient") else "math")
    assert asked[0] == ((q, k, k, None, True), backward)
    assert checked == ([] if found == "math" else [(found, q.device, q.dtype, 32, 2, backward)])


def test_heads_are_repeated_where_only_then_a_fused_kernel_takes_them(monkeypatch):
    q, k = shapes_alone()
    monkeypatch.setattr(attention_kernels, "choose_attention", lambda q, k, *_, backward: "efficient" if q.shape == k.shape else "math")
    monkeypatch.setattr(attention_kernels, "_check_kernel", lambda *_: None)
    assert attention_kernels._choose_on_gpu(q, k, k, None, True, True) == "efficient"


def test_a_kernel_that_gives_other_numbers_is_refused(monkeypatch):
    check, right = attention_kernels._check_kernel.__wrapped__, attention_kernels._forward
    for shared, backward in ((1, False), (4, False), (4, True)):
        check("cpu", torch.device("cpu"), torch.bfloat16, 16, shared, backward)

    def in_bits(kernel, *given):
        out, lse = right(kernel, *given)
        return out, lse * (1.0 if kernel == "math" else 1 / math.log(2))

    monkeypatch.setattr(attention_kernels, "_forward", in_bits)
    monkeypatch.setitem(attention_kernels._FLAGS, "cpu", "flash")
    words = "cpu attention in torch.float32 with heads of 16, 2 to a key head, is off by 44.3 % in forward on cpu"
    with pytest.raises(UsageError, match=re.escape(words)):
        check("cpu", torch.device("cpu"), torch.float32, 16, 2, False)


def test_masks_of_any_number_of_keys_lie_in_aligned_rows():
    bias = random(1, 2, 3, 18, grad=False)
    found = attention_kernels._padded(bias)
    assert torch.equal(found, bias) and found.stride() == (2 * 3 * 32, 3 * 32, 32, 1)
    assert attention_kernels._padded(bias[..., :16]).shape[-1] == 16 and attention_kernels._padded(None) is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("q", "k", "mask", "causal"), ATTENTION_CASES)
def test_attention_on_a_gpu_is_that_of_torch(q, k, mask, causal, dtype):
    wide = [(*shape[:2], 8 * shape[2] + 1, 8 * shape[3]) for shape in (q, k, k)]
    tensors = [random(*shape, dtype=dtype, seed=i).detach().cuda().requires_grad_() for i, shape in enumerate(wide)]
    bias = attention_mask(mask, *wide[:2])
    bias = None if bias is None else bias.cuda() if bias.dtype == torch.bool else bias.to("cuda", dtype)
    ours = ops.attention(*tensors, bias, causal, 0.3, 0.0, 0)[0]
    theirs = functional.scaled_dot_product_attention(*tensors, bias, 0.0, causal, scale=0.3, enable_gqa=q[1] != k[1])
    grad = torch.randn_like(ours)
    for a, b in zip((ours, *torch.autograd.grad(ours, tensors, grad)), (theirs, *torch.autograd.grad(theirs, tensors, grad)), strict=True):
        torch.testing.assert_close(a, b, rtol=3e-2, atol=3e-2 * float(b.abs().max()))


# queries, keys, parts of the queries; two parts of 20 in 14 keys: the second sees them all, some rows of the first do
WINDOWS = [
    pytest.param((2, 4, 6, 8), (2, 4, 6, 8), 2, id="halves"),
    pytest.param((2, 4, 6, 8), (2, 2, 6, 8), 3, id="shared-heads"),
    pytest.param((1, 4, 8, 8), (1, 1, 8, 8), 8, id="a-query-each"),
    pytest.param((1, 2, 64, 16), (1, 2, 64, 16), 4, id="blocks"),
    pytest.param((1, 2, 6, 8), (1, 2, 14, 8), 2, id="keys-no-query-sees"),
    pytest.param((1, 2, 20, 8), (1, 2, 14, 8), 2, id="queries-behind-the-keys"),
]


def windows_of_attention(q, k, parts, mask, dtype):
    """(whole, from parts): out, lse, and the gradients of queries, keys and values."""
    tensors = [random(*shape, dtype=dtype, seed=i) for i, shape in enumerate((q, k, k))]
    bias = attention_mask(mask, q, k)
    bias = bias.to(dtype) if mask == "float" else bias
    grad = random(*q, dtype=dtype, seed=7, grad=False)
    out, lse = ops.attention(*tensors, bias, True, 0.3, 0.0, 0)
    whole = [out.detach(), lse, *torch.autograd.grad(out, tensors, grad)]
    length = q[2] // parts
    found = []
    for offset in range(0, q[2], length):
        part = [tensors[0].detach()[:, :, offset : offset + length], *(x.detach() for x in tensors[1:])]
        part = [x.requires_grad_() for x in part]
        own = None if bias is None else bias[..., offset : offset + length, :]
        out, lse = ops.attention(*part, own, True, 0.3, 0.0, offset)
        assert out.transpose(1, 2).is_contiguous() and lse.is_contiguous()
        found.append([out.detach(), lse, *torch.autograd.grad(out, part, grad[:, :, offset : offset + length])])
        assert all(gradient.isfinite().all() for gradient in found[-1])
        for gradient in found[-1][3:]:
            assert not gradient[:, :, offset + length :].any(), "keys that no query of the part sees have no gradient"
    out, lse, dq, dk, dv = zip(*found, strict=True)
    return whole, [torch.cat(out, 2), torch.cat(lse, 2), torch.cat(dq, 2), sum(dk), sum(dv)]


@pytest.mark.parametrize("kernel", ["chosen", "math"])
@pytest.mark.parametrize("mask", [None, "float", "bool"])
@pytest.mark.parametrize(("q", "k", "parts"), WINDOWS)
def test_windows_of_causal_attention_add_up(q, k, parts, mask, kernel, monkeypatch):
    if kernel == "math":
        monkeypatch.setattr(attention_kernels, "choose_kernel", lambda *_, **__: "math")
    for a, b in zip(*windows_of_attention(q, k, parts, mask, torch.float64), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11)


def test_windows_of_causal_attention_in_bfloat16():
    for a, b in zip(*windows_of_attention((1, 4, 32, 16), (1, 2, 32, 16), 4, None, torch.bfloat16), strict=True):
        torch.testing.assert_close(a, b, rtol=3e-2, atol=6e-2)


def test_an_offset_means_nothing_without_causality_and_nothing_is_split_at_offset_zero(monkeypatch):
    q, k = random(1, 2, 4, 8, grad=False), random(1, 2, 8, 8, grad=False)
    torch.testing.assert_close(ops.attention(q, k, k, None, False, 0.3, 0.0, 4)[0], ops.attention(q, k, k, None, False, 0.3, 0.0, 0)[0])
    calls = []
    forward = attention_module.run_forward
    monkeypatch.setattr(attention_module, "run_forward", lambda *arguments: calls.append(arguments) or forward(*arguments))
    ops.attention(k, k, k, None, True, 0.3, 0.0, 0)
    ((_, keys, values, mask, causal, _),) = calls
    assert (keys.data_ptr(), values.data_ptr(), mask, causal) == (k.data_ptr(), k.data_ptr(), None, True)


def test_attention_refuses_dropout():
    q = random(1, 1, 2, 8, grad=False)
    with pytest.raises(NotImplementedError, match="captured as its parts"):
        ops.attention(q, q, q, None, False, 1.0, 0.1, 0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "causal", "masked"), [(8, True, False), (2, True, False), (8, False, True), (2, False, False)])
def test_attention_on_a_gpu_agrees_with_the_cpu(heads, causal, masked, dtype):
    q, k, v = random(2, 8, 64, 64, seed=1), random(2, heads, 64, 64, seed=2), random(2, heads, 64, 64, seed=3)
    mask = random(2, 1, 64, 64, grad=False) if masked else None
    grad = random(2, 8, 64, 64, seed=4, grad=False)
    out, _ = ops.attention(q, k, v, mask, causal, 0.125, 0.0, 0)
    expected = [out, *torch.autograd.grad(out, (q, k, v), grad)]
    there = [x.detach().to("cuda", dtype).requires_grad_() for x in (q, k, v)]
    out, lse = ops.attention(*there, None if mask is None else mask.to("cuda", dtype), causal, 0.125, 0.0, 0)
    found = [out, *torch.autograd.grad(out, there, grad.to("cuda", dtype))]
    assert lse.shape == (2, 8, 64) and lse.dtype == torch.float32
    tolerance = 2e-3 if dtype == torch.float32 else 5e-2
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.detach().cpu().double(), b.detach(), rtol=tolerance, atol=tolerance)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("offset", [0, 32, 96])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [8, 2])
def test_a_window_of_causal_attention_on_a_gpu_agrees_with_the_cpu(heads, dtype, offset):
    q, k, v = random(2, 8, 32, 64, seed=1), random(2, heads, 128, 64, seed=2), random(2, heads, 128, 64, seed=3)
    grad = random(2, 8, 32, 64, seed=4, grad=False)
    results = []
    for device, kind in (("cpu", torch.float64), ("cuda", dtype)):
        there = [x.detach().to(device, kind).requires_grad_() for x in (q, k, v)]
        out, lse = ops.attention(*there, None, True, 0.125, 0.0, offset)
        results.append([out, lse, *torch.autograd.grad(out, there, grad.to(device, kind))])
    tolerance = 2e-3 if dtype == torch.float32 else 5e-2
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(b.detach().cpu().double(), a.detach().double(), rtol=tolerance, atol=tolerance)


# --- convolution ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("x", "w", "settings"),
    [
        ((2, 4, 9), (6, 4, 3), ([2], [1], [1], 1)),
        ((2, 4, 8, 7), (6, 2, 3, 3), ([1, 2], [1, 0], [1, 2], 2)),
        ((2, 4, 5, 5), (4, 1, 3, 3), ([1, 1], [1, 1], [1, 1], 4)),
        ((1, 2, 4, 4, 4), (3, 2, 2, 2, 2), ([1, 1, 1], [0, 0, 0], [1, 1, 1], 1)),
    ],
)
def test_convolution(x, w, settings):
    torch_convolution = [functional.conv1d, functional.conv2d, functional.conv3d][len(x) - 3]
    check(lambda a, b: ops.convolution(a, b, *settings), lambda a, b: torch_convolution(a, b, None, *settings), random(*x), random(*w))
    registered(ops.convolution.default, random(*x), random(*w), *settings)


def test_convolution_refuses_channels_that_do_not_fit():
    with pytest.raises(ValueError, match="channels do not fit"), torch.device("meta"):
        ops.convolution(torch.empty(2, 4, 5, 5), torch.empty(6, 3, 3, 3), [1, 1], [0, 0], [1, 1], 1)


# --- embedding and loss -----------------------------------------------------------------------------------------------


def test_embedding():
    indices = torch.tensor([[1, 4, 4], [0, 6, 1]])
    check(lambda w: ops.embedding(w, indices, 0), lambda w: functional.embedding(indices, w), random(7, 5))
    check(lambda w: dialect.lookup.PaddedEmbedding.apply(w, indices, 4), lambda w: functional.embedding(indices, w, 4), random(7, 5))
    registered(ops.embedding.default, random(7, 5), indices, 0)


def test_embedding_windows_add_up():
    weight, indices, grad = random(8, 5, grad=False), torch.tensor([[1, 4, 7], [0, 6, 1]]), random(2, 3, 5, grad=False)
    parts = [ops.embedding(weight[offset : offset + 4], indices, offset) for offset in (0, 4)]
    torch.testing.assert_close(sum(parts), weight[indices])
    whole = ops.embedding_backward(grad, indices, 8, 0, 6)
    torch.testing.assert_close(torch.cat([ops.embedding_backward(grad, indices, 4, offset, 6) for offset in (0, 4)]), whole)
    assert whole[6].abs().sum() == 0 and whole[7].abs().sum() > 0


def test_gradients_that_are_no_numbers_reach_their_own_row_alone():
    """As where attention at padding has nothing to attend to: the word of the padding, and what a rank does not have, stay as they are."""
    indices, grad = torch.tensor([[1, 6, 7]]), random(1, 3, 5, grad=False)
    grad[0, 1], grad[0, 2] = torch.nan, torch.inf
    wanted = torch.ops.aten.embedding_dense_backward.default(grad, indices, 8, 6, False)
    assert wanted[:7].isfinite().all()
    parts = [ops.embedding_backward(grad, indices, 4, offset, 6) for offset in (0, 4)]
    torch.testing.assert_close(ops.embedding_backward(grad, indices, 8, 0, 6), wanted)
    torch.testing.assert_close(torch.cat(parts), wanted)


def test_nll_loss():
    target = torch.tensor([0, 5, -100, 2])
    check(
        lambda x: ops.nll_loss(torch.log_softmax(x, -1), target, -100, 0),
        lambda x: functional.cross_entropy(x, target, reduction="none"),
        random(4, 6),
    )
    registered(ops.nll_loss.default, random(4, 6), target, -100, 0)


def test_nll_loss_windows_add_up():
    logp, target, grad = random(2, 3, 8, grad=False), torch.tensor([[0, 7, 3], [4, -1, 2]]), random(2, 3, grad=False)
    parts = [ops.nll_loss(logp[..., offset : offset + 4], target, -1, offset) for offset in (0, 4)]
    torch.testing.assert_close(sum(parts), ops.nll_loss(logp, target, -1, 0))
    whole = ops.nll_loss_backward(grad, target, 8, -1, 0)
    torch.testing.assert_close(torch.cat([ops.nll_loss_backward(grad, target, 4, -1, offset) for offset in (0, 4)], -1), whole)
    assert whole[1, 1].abs().sum() == 0


@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("largest", [False, True])
def test_extreme(largest, dim, keepdim):
    torch_extreme = torch.max if largest else torch.min
    check(lambda x: ops.extreme(x, dim, keepdim, largest, 0)[0], lambda x: torch_extreme(x, dim, keepdim)[0], random(3, 4, 5))
    x = torch.randint(0, 3, (3, 4, 5))
    assert torch.equal(ops.extreme(x, dim, keepdim, largest, 7)[1], torch_extreme(x, dim, keepdim)[1] + 7)
    registered(ops.extreme.default, random(3, 4, 5), dim, keepdim, largest, 0)


def test_ctc_loss():
    targets, steps, lengths = torch.randint(1, 5, (3, 4)), torch.tensor([9, 8, 9]), torch.tensor([4, 2, 0])
    check(
        lambda x: ops.ctc_loss(torch.log_softmax(x, -1), targets, steps, lengths, 0, False),
        lambda x: functional.ctc_loss(torch.log_softmax(x, -1), targets, steps, lengths, reduction="none"),
        random(9, 3, 5),
    )
    registered(ops.ctc_loss.default, random(9, 3, 5), targets, steps, lengths, 0, False)


# --- normalisation, dropout -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(6, 3), (6, 3, 4), (6, 3, 4, 5)])
@pytest.mark.parametrize("affine", [True, False])
def test_batch_norm(shape, affine):
    weight, bias = (random(3, seed=1), random(3, seed=2)) if affine else (None, None)
    mean, variance = random(3, seed=3, grad=False), random(3, seed=4, grad=False).abs()
    expected_mean, expected_variance = mean.clone(), variance.clone()
    functional.batch_norm(random(*shape), expected_mean, expected_variance, weight, bias, True, 0.1, 1e-5)
    check(
        lambda x, w, b: ops.batch_norm(x, w, b, mean, variance, 0.1, 1e-5)[0],
        lambda x, w, b: functional.batch_norm(x, mean.clone(), variance.clone(), w, b, True, 0.1, 1e-5),
        random(*shape), weight, bias,
    )  # fmt: skip
    _, _, _, new_mean, new_variance = ops.batch_norm(random(*shape), weight, bias, mean, variance, 0.1, 1e-5)
    torch.testing.assert_close(new_mean, expected_mean)
    torch.testing.assert_close(new_variance, expected_variance)
    registered(ops.batch_norm.default, random(*shape), weight, bias, mean, variance, 0.1, 1e-5)


@pytest.mark.parametrize(("shape", "normalized"), [((2, 3, 8), [8]), ((4, 2, 6), [2, 6]), ((8,), [8])])
@pytest.mark.parametrize("affine", [True, False])
def test_rms_norm(shape, normalized, affine):
    weight = random(*normalized, seed=1) if affine else None
    check(
        lambda x, w: ops.rms_norm(x, normalized, w, 1e-5)[0],
        lambda x, w: functional.rms_norm(x, normalized, w, 1e-5),
        random(*shape), weight,
    )  # fmt: skip
    registered(ops.rms_norm.default, random(*shape), normalized, weight, 1e-5)


@pytest.mark.parametrize("affine", [True, False])
def test_rms_norms_hold_little_beside_their_results(affine):
    """Of the size of x: nothing in forward, and one tensor in backward."""
    x, weight = random(16, 64, grad=False), random(64, grad=False) if affine else None
    with torch.no_grad(), LiveMemory([x]) as memory:
        _, scale = find_function("autopar.rms_norm.default")(x, [64], weight, 1e-5)
        assert memory.peak <= 2 * x.nbytes + 2 * scale.nbytes
    with torch.no_grad(), LiveMemory([x, scale]) as memory:
        find_function("autopar.rms_norm_backward.default")(x, x, [64], scale, weight)
    assert memory.peak <= 3 * x.nbytes + 2 * scale.nbytes + 64 * x.itemsize


def test_dropout_is_a_function_of_seed_and_step():
    x = random(1000)
    out, mask = ops.dropout(x, 0.25, 3)
    torch.testing.assert_close(out, torch.where(mask, x / 0.75, 0))
    assert 0.65 < mask.double().mean() < 0.85
    (gradient,) = torch.autograd.grad(out.sum(), x)
    torch.testing.assert_close(gradient, mask.double() / 0.75)
    assert torch.equal(ops.dropout(x, 0.25, 3)[1], mask)
    assert not torch.equal(ops.dropout(x, 0.25, 4)[1], mask)
    with dialect.random_step(1):
        assert not torch.equal(ops.dropout(x, 0.25, 3)[1], mask)
    assert torch.equal(ops.dropout(x, 0.25, 3)[1], mask)


def test_dropout_of_everything_is_zero():
    assert ops.dropout(random(8), 1.0, 1)[0].abs().sum() == 0


# --- dtypes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_keep_the_dtype(dtype):
    x, w = random(2, 3, 8, dtype=dtype), random(5, 8, dtype=dtype)
    image, kernel = random(2, 4, 6, 6, dtype=dtype), random(8, 4, 3, 3, dtype=dtype)
    scale = random(4, dtype=dtype)
    results = [
        ops.contract(x, w, "b s k, n k -> b s n"),
        ops.convolution(image, kernel, [1, 1], [1, 1], [1, 1], 1),
        ops.embedding(w, torch.tensor([1, 2]), 0),
        ops.nll_loss(x, torch.ones(2, 3, dtype=torch.int64), -100, 0),
        ops.batch_norm(image, scale, scale, None, None, 0.1, 1e-5)[0],
        ops.rms_norm(x, [8], None, 1e-5)[0],
        ops.dropout(x, 0.1, 1)[0],
    ]
    for result in results:
        assert result.dtype == dtype
        inputs = [t for t in (x, w, image, kernel, scale) if t.requires_grad]
        gradients = torch.autograd.grad(result.float().sum(), inputs, allow_unused=True)
        assert all(g.dtype == dtype for g in gradients if g is not None)
