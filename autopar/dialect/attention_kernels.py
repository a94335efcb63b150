"""The kernels that attention runs: forward with its ``lse``, and the gradients of queries, keys and values.

On a GPU the kernel is the one that torch itself would run. Every kernel gives ``lse`` the same meaning, so forward and backward may take
different ones. Key heads are repeated for the kernels that need one for each query head.
"""

from __future__ import annotations

from functools import cache
from typing import Literal

import torch
from torch import Tensor

from autopar.dialect.library import wide_dtype
from autopar.errors import UsageError
from autopar.torch_compat import choose_attention

Kernel = Literal["cpu", "cudnn", "flash", "efficient", "math"]
_CHOICES: dict[str, Kernel] = {"cudnn": "cudnn", "flash": "flash", "efficient": "efficient"}
"""The fused kernels of a GPU, by torch's word."""
TAKES_GROUPS: frozenset[Kernel] = frozenset({"cudnn", "flash"})
"""The kernels that take fewer key heads than query heads."""
MASK_MULTIPLE = 16
"""Elements that a row of an added mask is padded to a multiple of. The efficient kernel loads aligned rows; torch pads to the same."""
WRONG = 0.05
"""Share of the largest value by which a kernel may differ from the formula. bfloat16 rounds by 0.004, TF32 by 0.0005; another meaning of
``lse`` or of heads is off by far more."""


_DTYPES_ON_CPU = frozenset({torch.float32, torch.float64, torch.bfloat16, torch.float16})


def run_forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Results ``[b, h, s, e]`` and ``lse [b, h, s]`` of one call. Raises UsageError: see ``choose_kernel``."""
    kernel = choose_kernel(q, k, v, mask, causal, backward=False)
    return _forward(kernel, q, k, v, mask, causal, scale)


def run_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of queries, keys and values of one call. Raises UsageError: see ``choose_kernel``.

    Args:
        out, lse: results over all keys; ``k`` and ``v`` may be a part of them.
    """
    kernel = choose_kernel(q, k, v, mask, causal, backward=True)
    return _backward(kernel, grad, q, k, v, out, lse, mask, causal, scale)


def choose_kernel(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, *, backward: bool) -> Kernel:
    """The kernel by device, dtype and shape. On a GPU it is torch's choice, which ``torch.backends.cuda.enable_cudnn_sdp`` and others rule.

    Raises:
        UsageError: the first time, a kernel of the GPU that gives other numbers than the formula.
    """
    queries, keys, dtype = q.shape, k.shape, q.dtype
    fused = len(queries) == 4 and queries[3] == keys[3] == v.shape[3] and 0 not in queries and 0 not in keys
    if not fused or not dtype == k.dtype == v.dtype:
        return "math"
    if q.device.type == "cpu":
        return "cpu" if dtype in _DTYPES_ON_CPU else "math"
    return _choose_on_gpu(q, k, v, mask, causal, backward) if q.device.type == "cuda" else "math"


def _choose_on_gpu(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, backward: bool) -> Kernel:
    if mask is not None:
        mask = mask.expand(*q.shape[:3], k.shape[2])
    found = _CHOICES.get(choose_attention(q, k, v, mask, causal, backward=backward), "math")
    if found == "math" and q.shape[1] != k.shape[1]:  # the efficient kernel takes repeated heads: torch is asked with their shape
        one = k[:, :1].expand(-1, q.shape[1], -1, -1)
        found = "efficient" if choose_attention(q, one, one, mask, causal, backward=backward) == "efficient" else "math"
    if found != "math":
        _check_kernel(found, q.device, q.dtype, q.shape[3], q.shape[1] // k.shape[1], backward)
    return found


@cache
def _check_kernel(kernel: Kernel, device: torch.device, dtype: torch.dtype, dim: int, shared: int, backward: bool) -> None:
    """Compares a kernel with the formula, once a process. Raises UsageError: it gives other numbers.

    Args:
        shared: query heads of a key head.
        backward: whether its backward is compared; else its forward.
    """
    length, heads, scale = 64, 2 * shared, dim**-0.5

    def draw(number: int, count: int) -> Tensor:
        places = torch.arange(count * length * dim, device=device, dtype=torch.float32)
        return torch.sin(places * (0.7 + number) + number).view(1, count, length, dim).to(dtype)

    q, k, v, grad = draw(1, heads), draw(2, 2), draw(3, 2), draw(4, heads)
    out, lse = _forward("math", q, k, v, None, True, scale)
    if backward:
        wanted: tuple[Tensor, ...] = _backward("math", grad, q, k, v, out, lse, None, True, scale)
        found: tuple[Tensor, ...] = _backward(kernel, grad, q, k, v, out, lse, None, True, scale)
    else:
        wanted, found = (out, lse), _forward(kernel, q, k, v, None, True, scale)
    off = max(float((a.float() - b.float()).abs().max() / b.float().abs().max()) for a, b in zip(found, wanted, strict=True))
    if not off <= WRONG:
        part = "backward" if backward else "forward"
        message = f"{kernel} attention in {dtype} with heads of {dim}, {shared} to a key head, is off by {100 * off:.3g} % in {part}"
        raise UsageError(f"{message} on {device}", f"call torch.backends.cuda.enable_{_FLAGS[kernel]}_sdp(False), and report it")


_FLAGS: dict[str, str] = {"cudnn": "cudnn", "flash": "flash", "efficient": "mem_efficient"}
"""By kernel, the word in the name of torch's function that switches it off."""


def _forward(
    kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:  # fmt: skip
    q, k, v = _rows(q), _keys(kernel, k, q.shape[1]), _keys(kernel, v, q.shape[1])
    aten = torch.ops.aten
    if kernel == "cpu":
        bias = _additive(mask, q, k)
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu.default(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)
        return out, lse
    if kernel == "cudnn":
        bias = _additive(mask, q, k)
        out, lse = aten._scaled_dot_product_cudnn_attention.default(q, k, v, bias, True, 0.0, causal, False, scale=scale)[:2]
        return out, lse.squeeze(-1)
    if kernel == "flash":
        out, lse = aten._scaled_dot_product_flash_attention.default(q, k, v, 0.0, causal, False, scale=scale)[:2]
        return out, lse
    if kernel == "efficient":
        bias = _padded(_additive(mask, q, k))
        out, lse = aten._scaled_dot_product_efficient_attention.default(q, k, v, bias, True, 0.0, causal, scale=scale)[:2]
        return out, lse[:, :, : q.shape[2]]
    return _math_forward(q, k, v, mask, causal, scale)


def _backward(
    kernel: Kernel, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Tensor | None, causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    heads = k.shape[1]
    grad, q, out = _rows(grad), _rows(q), _rows(out)
    k, v = _keys(kernel, k, q.shape[1]), _keys(kernel, v, q.shape[1])
    aten = torch.ops.aten
    if kernel == "cpu":
        backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        found = backward(grad, q, k, v, out, lse, 0.0, causal, attn_mask=_additive(mask, q, k), scale=scale)
    elif kernel == "cudnn":
        state = torch.zeros((), dtype=torch.int64, device=q.device)
        backward = aten._scaled_dot_product_cudnn_attention_backward.default
        saved = out, lse.unsqueeze(-1), state, state, _additive(mask, q, k), None, None, q.shape[2], k.shape[2]
        found = backward(grad, q, k, v, *saved, 0.0, causal, scale=scale)
    elif kernel == "flash":
        state = torch.zeros(2, dtype=torch.uint64, device=q.device)
        unused = torch.empty(0, dtype=torch.uint64, device=q.device)
        backward = aten._scaled_dot_product_flash_attention_backward.default
        found = backward(grad, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, state, unused, scale=scale)
    elif kernel == "efficient":
        padded = torch.nn.functional.pad(lse, (0, -lse.shape[2] % 32))
        state = torch.zeros((), dtype=torch.int64, device=q.device)
        backward = aten._scaled_dot_product_efficient_attention_backward.default
        wanted = [True, True, True, False]
        bias = _padded(_additive(mask, q, k))
        found = backward(grad, q, k, v, bias, out, padded, state, state, 0.0, wanted, causal, scale=scale)[:3]
    else:
        found = _math_backward(grad, q, k, v, out, lse, mask, causal, scale)
    dq, dk, dv = found
    return dq, _sum_heads(dk, heads), _sum_heads(dv, heads)


def _keys(kernel: Kernel, tensor: Tensor, heads: int) -> Tensor:
    """Keys or values as a kernel takes them: with a head for each of the ``heads`` of the queries, where it needs that."""
    if kernel not in TAKES_GROUPS and tensor.shape[1] != heads:
        tensor = tensor.repeat_interleave(heads // tensor.shape[1], dim=1)
    return _rows(tensor)


def _sum_heads(gradient: Tensor, heads: int) -> Tensor:
    """The gradient of heads, from that of repeated ones."""
    if gradient.shape[1] == heads:
        return gradient
    b, _, t, d = gradient.shape
    return gradient.reshape(b, heads, -1, t, d).sum(2)


def _additive(mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """The mask as scores to add, in the dtype of ``q``, with four dims."""
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        mask = q.new_zeros(()).masked_fill(~mask, float("-inf"))
    return _rows(mask.to(q.dtype).expand(*mask.shape[:-1], k.shape[2])).expand(*q.shape[:3], k.shape[2])


def _padded(bias: Tensor | None) -> Tensor | None:
    """The same scores, in memory in rows of a multiple of ``MASK_MULTIPLE``."""
    if bias is None or bias.shape[-1] % MASK_MULTIPLE == 0:
        return bias
    length = bias.shape[-1]
    return torch.nn.functional.pad(bias, (0, -length % MASK_MULTIPLE))[..., :length]


def _rows(tensor: Tensor) -> Tensor:
    """The tensor with neighbours of the last dim side by side in memory, which the fused kernels take for granted."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _scores(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    scores = torch.matmul(q, k.transpose(-1, -2)) * scale
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    if mask is not None and mask.dtype == torch.bool:
        return scores.masked_fill(~mask, float("-inf"))
    return scores if mask is None else scores + mask


def _math_forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    wide = wide_dtype(q.dtype)
    scores = _scores(q.to(wide), k.to(wide), mask, causal, scale)
    lse = torch.logsumexp(scores, -1)
    return torch.matmul(_probabilities(scores, lse), v.to(wide)).to(q.dtype), lse


def _probabilities(scores: Tensor, lse: Tensor) -> Tensor:
    """``exp(scores - lse)``; a query that attends nothing has zeros."""
    return torch.exp(scores - torch.where(lse.isneginf(), 0, lse).unsqueeze(-1))


def _math_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """With ``p = exp(scores - lse)``: ``dv = p^T grad``, ``ds = p * (grad v^T - rowsum(grad * out))``, ``dq = ds k``, ``dk = ds^T q``."""
    wide = wide_dtype(q.dtype)
    dtype = q.dtype
    grad, q, k, v, out = (tensor.to(wide) for tensor in (grad, q, k, v, out))
    p = _probabilities(_scores(q, k, mask, causal, scale), lse.to(wide))
    ds = p * (torch.matmul(grad, v.transpose(-1, -2)) - (grad * out).sum(-1, keepdim=True)) * scale
    found = torch.matmul(ds, k), torch.matmul(ds.transpose(-1, -2), q), torch.matmul(p.transpose(-1, -2), grad)
    dq, dk, dv = (tensor.to(dtype) for tensor in found)
    return dq, dk, dv
