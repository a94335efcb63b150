"""torch operators swapped for dialect compositions while the exported graph is traced again.

One table at the end: torch operator to a function of the same arguments. The functions run under the joint tracing, so
that what they call is what the graph holds, and autograd sees the dialect's own gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from string import ascii_letters
from typing import Any

import torch
from torch import Tensor

from autopar.dialect import contraction
from autopar.dialect.lookup import PaddedEmbedding

aten = torch.ops.aten
Replacement = Callable[..., Any]


# --- contractions -----------------------------------------------------------------------------------------------------


def contract(a: Tensor, first: Sequence[str], b: Tensor, second: Sequence[str], result: Sequence[str]) -> Tensor:
    """A contraction of two tensors by factor letters, in the form the dialect wants.

    Dims of size 1 that the other operand has larger are dropped (broadcasting), and factors that only one operand has
    and the result has not are summed first, so that each operand's gradient is again a contraction.
    """
    sizes = {factor: max(n, 1) for factor, n in zip(first, a.shape, strict=True)}
    for factor, n in zip(second, b.shape, strict=True):
        sizes[factor] = max(sizes.get(factor, 1), n)
    a, first = _prepare(a, tuple(first), sizes, {*second, *result})
    b, second = _prepare(b, tuple(second), sizes, {*first, *result})
    return torch.ops.autopar.contract.default(a, b, contraction.write(first, second, tuple(result)))


def _prepare(tensor: Tensor, factors: tuple[str, ...], sizes: Mapping[str, int], wanted: set[str]) -> tuple[Tensor, tuple[str, ...]]:
    broadcast = [dim for dim, factor in enumerate(factors) if tensor.shape[dim] == 1 and sizes[factor] > 1]
    alone = [dim for dim, factor in enumerate(factors) if factor not in wanted and dim not in broadcast]
    if broadcast:
        tensor = tensor.squeeze(broadcast)
        alone = [dim - sum(other < dim for other in broadcast) for dim in alone]
    if alone:
        tensor = tensor.sum(alone)
    dropped = {factors[dim] for dim in broadcast} | {factor for factor in factors if factor not in wanted}
    return tensor, tuple(factor for factor in factors if factor not in dropped)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    batch = _batch_letters(x.dim() - 1)
    out = contract(x, (*batch, "k"), weight, ("n", "k"), (*batch, "n")) if weight.dim() == 2 else contract(x, (*batch, "k"), weight, ("k",), batch)
    return out if bias is None else out + bias


def _batch_letters(dims: int) -> tuple[str, ...]:
    """Letters for leading dims: b, s and so on for the common cases, never k, m, n."""
    return tuple("bsthuvwxyzacdefg"[:dims])


def matmul(a: Tensor, b: Tensor) -> Tensor:
    letters = _batch_letters(max(a.dim(), b.dim(), 2) - 2)
    first = ("k",) if a.dim() == 1 else (*letters[len(letters) - (a.dim() - 2) :], "m", "k")
    second = ("k",) if b.dim() == 1 else (*letters[len(letters) - (b.dim() - 2) :], "k", "n")
    kept = [*letters, *(["m"] if a.dim() > 1 else []), *(["n"] if b.dim() > 1 else [])]
    return contract(a, first, b, second, kept)


def addmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return _scaled(bias, beta) + _scaled(matmul(a, b), alpha)


def _scaled(tensor: Tensor, factor: float) -> Tensor:
    return tensor if factor == 1 else tensor * factor


def einsum(equation: str, operands: Sequence[Tensor], path: Sequence[int] | None = None) -> Tensor:
    """Operands are contracted left to right, keeping at each step the factors that are still needed."""
    parsed = _parse_einsum(equation, operands)
    if parsed is None or len(operands) < 2 or any(operand.is_complex() for operand in operands):
        return aten.einsum.default(equation, operands)
    factors, result = parsed
    tensor, have = operands[0], factors[0]
    for index in range(1, len(operands)):
        later = {factor for rest in factors[index + 1 :] for factor in rest} | set(result)
        last = index == len(operands) - 1
        keep = result if last else tuple(f for f in dict.fromkeys((*have, *factors[index])) if f in later)
        tensor = contract(tensor, have, operands[index], factors[index], keep)
        have = keep
    return tensor


def _parse_einsum(equation: str, operands: Sequence[Tensor]) -> tuple[list[tuple[str, ...]], tuple[str, ...]] | None:
    """Factors of operands and result, ellipses spelled out; None when a factor repeats inside one operand (a diagonal)."""
    text, arrow, right = equation.replace(" ", "").partition("->")
    terms = text.split(",")
    spare = [letter for letter in ascii_letters if letter not in equation]
    widest = max(operand.dim() - len(term.replace("...", "")) for term, operand in zip(terms, operands, strict=True))
    rest = tuple(spare[:widest]) if "..." in text else ()

    def spell(term: str, dims: int) -> tuple[str, ...]:
        before, dots, after = term.partition("...")
        missing = dims - len(before) - len(after)
        return (*before, *(rest[len(rest) - missing :] if dots else ()), *after)

    factors = [spell(term, operand.dim()) for term, operand in zip(terms, operands, strict=True)]
    if any(len(set(term)) != len(term) for term in factors):
        return None
    if not arrow:
        every = [factor for term in factors for factor in term]
        return factors, (*rest, *sorted(factor for factor in set(every) - set(rest) if every.count(factor) == 1))
    return factors, spell(right, len(right.replace("...", "")) + len(rest))


# --- convolutions -----------------------------------------------------------------------------------------------------


def _convolve(dims: int) -> Replacement:
    def convolve(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: int | Sequence[int] = 1,
        padding: int | str | Sequence[int] = 0,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
    ) -> Tensor:
        if x.dim() == dims + 1:
            return convolve(x.unsqueeze(0), weight, bias, stride, padding, dilation, groups).squeeze(0)
        steps, spread = _each(stride, dims), _each(dilation, dims)
        if isinstance(padding, str):
            totals = [d * (k - 1) if padding == "same" else 0 for d, k in zip(spread, weight.shape[2:], strict=True)]
            if any(total % 2 for total in totals):
                x = torch.nn.functional.pad(x, [side for total in reversed(totals) for side in (0, total % 2)])
            padding = [total // 2 for total in totals]
        out = torch.ops.autopar.convolution.default(x, weight, steps, _each(padding, dims), spread, groups)
        return out if bias is None else out + bias.reshape(-1, *[1] * dims)

    return convolve


def _each(value: int | Sequence[int], dims: int) -> list[int]:
    values = [value] if isinstance(value, int) else list(value)
    return values * dims if len(values) == 1 else values


def convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Tensor:
    if transposed:
        return aten.convolution.default(x, weight, bias, stride, padding, dilation, transposed, output_padding, groups)
    return _convolve(weight.dim() - 2)(x, weight, bias, stride, padding, dilation, groups)


# --- attention, embedding ---------------------------------------------------------------------------------------------


def attention_replacement(next_seed: Callable[[], int]) -> Replacement:
    def attention(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
        if q.dim() != 4:
            return _with_four_dims(attention, q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        batch = max(q.shape[0], k.shape[0], v.shape[0])
        q, k, v = (_expand_batch(tensor, batch) for tensor in (q, k, v))
        if k.shape[1] != v.shape[1] or (not enable_gqa and q.shape[1] != k.shape[1]):
            heads = max(q.shape[1], k.shape[1], v.shape[1])
            q, k, v = (tensor.expand(-1, heads, -1, -1) for tensor in (q, k, v))
        if attn_mask is not None and attn_mask.dim() < 4:
            attn_mask = attn_mask.reshape(*[1] * (4 - attn_mask.dim()), *attn_mask.shape)
        if dropout_p > 0 or (attn_mask is not None and attn_mask.requires_grad):
            return _attention_in_parts(q, k, v, attn_mask, dropout_p, is_causal, scale, next_seed)
        return torch.ops.autopar.attention.default(q, k, v, attn_mask, is_causal, scale, 0.0)[0]

    return attention


def _expand_batch(tensor: Tensor, batch: int) -> Tensor:
    return tensor if tensor.shape[0] == batch else tensor.expand(batch, -1, -1, -1)


def _with_four_dims(
    attention: Replacement, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, causal: bool, scale: float, gqa: bool
) -> Tensor:
    """Attention on ``[..., s, d]``: fewer than four dims get dims of size 1, more are flattened into the first."""
    if q.dim() < 4:
        lead = 4 - q.dim()

        def widen(tensor: Tensor) -> Tensor:
            place = tensor.dim() - 2
            return tensor.reshape(*tensor.shape[:place], *[1] * lead, *tensor.shape[place:])

        if mask is not None and mask.dim() > 2:
            mask = widen(mask)
        out = attention(widen(q), widen(k), widen(v), mask, dropout, causal, scale=scale, enable_gqa=gqa)
        return out.reshape(*q.shape[:-1], v.shape[-1])
    lead_sizes = torch.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])

    def flat(tensor: Tensor) -> Tensor:
        return tensor.expand(*lead_sizes, *tensor.shape[-3:]).flatten(0, -4)

    if mask is not None and mask.dim() > 3:
        mask = flat(mask)
    out = attention(flat(q), flat(k), flat(v), mask, dropout, causal, scale=scale, enable_gqa=gqa)
    return out.unflatten(0, lead_sizes)


def _attention_in_parts(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, causal: bool, scale: float, next_seed: Callable[[], int]
) -> Tensor:
    """Attention whose probabilities are dropped or whose mask is trained: no fused kernel gives these the dialect's meaning."""
    share = q.shape[1] // k.shape[1]
    if share > 1:
        k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
    scores = contract(q, tuple("bhsd"), k, tuple("bhtd"), tuple("bhst")) * scale
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    p = torch.softmax(scores, -1)
    if dropout > 0:
        p = torch.ops.autopar.dropout.default(p, dropout, next_seed())[0]
    return contract(p, tuple("bhst"), v, tuple("bhtd"), tuple("bhsd"))


def embedding(weight: Tensor, indices: Tensor, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False) -> Tensor:
    if scale_grad_by_freq:
        return aten.embedding.default(weight, indices, padding_idx, scale_grad_by_freq, False)
    if padding_idx >= 0 and weight.requires_grad:
        return PaddedEmbedding.apply(weight, indices, padding_idx)  # type: ignore[no-any-return]
    return torch.ops.autopar.embedding.default(weight, indices, 0)


# --- losses -----------------------------------------------------------------------------------------------------------


def cross_entropy(
    x: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Cross entropy of logits ``[c]``, ``[n, c]`` or ``[n, c, ...]``; targets are class indices or probabilities."""
    dim = 0 if x.dim() == 1 else 1
    logp = torch.log_softmax(x.movedim(dim, -1), -1)
    if target.is_floating_point():
        return _soft_cross_entropy(logp, target.movedim(dim, -1), weight, reduction, label_smoothing)
    if label_smoothing == 0:
        return _reduced_nll(logp, target, weight, reduction, ignore_index)
    plain = _reduced_nll(logp, target, weight, reduction, ignore_index)
    weighted = logp if weight is None else logp * weight
    spread = (-weighted.sum(-1)).masked_fill(target == ignore_index, 0)
    if reduction == 1:
        spread = spread.sum() / _weight_total(target, weight, ignore_index, logp.dtype)
    elif reduction == 2:
        spread = spread.sum()
    return (1 - label_smoothing) * plain + (label_smoothing / logp.shape[-1]) * spread


def _soft_cross_entropy(logp: Tensor, target: Tensor, weight: Tensor | None, reduction: int, label_smoothing: float) -> Tensor:
    if label_smoothing:
        target = target * (1 - label_smoothing) + label_smoothing / logp.shape[-1]
    weighted = logp if weight is None else logp * weight
    rows = -(weighted * target).sum(-1)
    if reduction == 0:
        return rows
    return rows.sum() / rows.numel() if reduction == 1 else rows.sum()


def nll_loss(x: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = 1, ignore_index: int = -100) -> Tensor:
    logp = x if x.dim() == 1 else x.movedim(1, -1)
    return _reduced_nll(logp, target, weight, reduction, ignore_index)


def _reduced_nll(logp: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int) -> Tensor:
    """``logp [..., c]``, ``target [...]``. The mean is over the (weights of the) targets that are not ignored."""
    rows = torch.ops.autopar.nll_loss.default(logp, target, ignore_index, 0)
    if weight is not None:
        rows = rows * _target_weights(target, weight, ignore_index)
    if reduction == 0:
        return rows
    total = rows.sum(dtype=_accumulation(logp.dtype))
    if reduction == 1:
        total = total / _weight_total(target, weight, ignore_index, total.dtype)
    return total.to(logp.dtype)


def _accumulation(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _target_weights(target: Tensor, weight: Tensor, ignore_index: int) -> Tensor:
    """The class weight of each target, 0 for ignored ones: the lookup of a one-column table."""
    rows = torch.ops.autopar.embedding.default(weight.unsqueeze(-1), target, 0).squeeze(-1)
    return rows.masked_fill(target == ignore_index, 0)


def _weight_total(target: Tensor, weight: Tensor | None, ignore_index: int, dtype: torch.dtype) -> Tensor:
    if weight is None:
        return (target != ignore_index).sum().to(dtype)
    return _target_weights(target, weight, ignore_index).sum().to(dtype)


# --- normalisation, dropout -------------------------------------------------------------------------------------------


def batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Tensor:
    if training or running_mean is None or running_var is None:
        operator = torch.ops.autopar.batch_norm.default
        out, _, _, new_mean, new_var = operator(x, weight, bias, running_mean, running_var, momentum, eps)
        if training and running_mean is not None and running_var is not None:
            running_mean.copy_(new_mean)
            running_var.copy_(new_var)
        return out
    scale = torch.rsqrt(running_var + eps)
    if weight is not None:
        scale = scale * weight
    shift = -running_mean * scale
    if bias is not None:
        shift = shift + bias
    shape = [1, -1, *[1] * (x.dim() - 2)]
    return (x * scale.reshape(shape) + shift.reshape(shape)).to(x.dtype)


def dropout_replacement(next_seed: Callable[[], int]) -> Replacement:
    def dropout(x: Tensor, p: float, train: bool) -> Tensor:
        return torch.ops.autopar.dropout.default(x, p, next_seed())[0] if train and p > 0 else x

    return dropout


def replacements() -> dict[Any, Replacement]:
    """The table for one capture; dropout seeds count from 1 in it."""
    seeds = count(1)

    def next_seed() -> int:
        return next(seeds)

    return {
        aten.linear.default: linear,
        aten.matmul.default: matmul,
        aten.mm.default: matmul,
        aten.bmm.default: matmul,
        aten.mv.default: matmul,
        aten.dot.default: matmul,
        aten.addmm.default: addmm,
        aten.baddbmm.default: addmm,
        aten.einsum.default: einsum,
        aten.conv1d.default: _convolve(1),
        aten.conv2d.default: _convolve(2),
        aten.conv3d.default: _convolve(3),
        aten.conv1d.padding: _convolve(1),
        aten.conv2d.padding: _convolve(2),
        aten.conv3d.padding: _convolve(3),
        aten.convolution.default: convolution,
        aten.scaled_dot_product_attention.default: attention_replacement(next_seed),
        aten.embedding.default: embedding,
        aten.cross_entropy_loss.default: cross_entropy,
        aten.nll_loss.default: nll_loss,
        aten.nll_loss_nd.default: nll_loss,
        aten.nll_loss2d.default: nll_loss,
        aten.batch_norm.default: batch_norm,
        aten.dropout.default: dropout_replacement(next_seed),
    }
