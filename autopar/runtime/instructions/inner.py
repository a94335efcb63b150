"""Operators that need collectives inside: their bodies on a rank's part, as generators.

A body yields a collective and this rank's tensor for each that its strategy declares, in that order, is sent the reduced tensor (of a
permute, the other rank's; of one that travels beside the work, a function that waits for it), and returns what the operator returns. Of
rows, as many as there are, it yields how many go to each rank too (``Unequal``), and None in place of numbers that all ranks know.
Statistics are at least float32, as in the whole operator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from autopar.cost_models.collectives import KINDS
from autopar.dialect.library import wide_dtype
from autopar.graph import Op
from autopar.rules import way_of
from autopar.runtime.instructions import expert_exchange, kept_collectives
from autopar.runtime.instructions.expert_exchange import COUNTS, KeptWays, find_way
from autopar.runtime.instructions.sequences import (
    mirrored_attention,
    mirrored_attention_backward,
    ring_attention,
    ring_attention_backward,
)
from autopar.runtime.ranks.backends import Unequal
from autopar.sharding import InnerCollective, Strategy

Request = tuple[InnerCollective, Tensor | Unequal | None]
Answer: TypeAlias = Tensor | Callable[[], Tensor]
Body: TypeAlias = Generator[Request, Answer | None, Any]


def body(
    op: Op, strategy: Strategy, sizes: Sequence[int], args: Sequence[Any], kwargs: Mapping[str, Any], ways: KeptWays | None = None
) -> Body:  # fmt: skip
    """The operator on one rank, under a strategy with inner collectives.

    Args:
        op: the operator.
        strategy: declares the collectives.
        sizes: the mesh's axis sizes.
        args, kwargs: its arguments on this rank, with local tensors.
        ways: those along which this rank's rows travel to experts; None finds each anew.
    """
    function = BODIES[f"{op.target.rpartition('.')[0]} {way_of(strategy)}".rstrip()]
    parts = math.prod(sizes[axis] for axis in {axis for item in strategy.inner for axis in item.axes})
    if strategy.inner[0].reduction == COUNTS:
        function = partial(function, find=partial(find_way if ways is None else ways.find, strategy.inner[0].axes))
    running = function(parts, *args, **kwargs)
    answer: Answer | None = None
    for item in strategy.inner:
        tensor, reduction = running.send(answer)
        answer = None  # what the body has let go of is gone before more comes
        sent = 0 if tensor is None or isinstance(tensor, Unequal) else tensor.nbytes * (1 if KINDS[item.kind].takes_full else parts)
        fits = sent <= item.bytes  # a smaller part may have less; rows are as many as there are
        assert reduction == item.reduction and fits, f"{op.target}: {item} declared, {reduction} of {sent} bytes asked"
        answer = yield item, tensor
        del tensor
    try:
        running.send(answer)
    except StopIteration as stop:
        return stop.value
    raise AssertionError(f"{op.target} asks for more collectives than its strategy declares")


Statistics = Generator[tuple[Tensor, str], Tensor, Any]
"""Yields a local statistic and its reduction; is sent the reduced one."""


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(wide_dtype(tensor.dtype))


def _top(wide: Tensor, dim: int) -> Generator[tuple[Tensor, str], Tensor, Tensor]:
    """The maximum over the whole dim; 0 where that is minus infinity."""
    top = yield wide.amax(dim, keepdim=True), "max"
    return top.masked_fill(top.isneginf(), 0.0)


def _softmax(parts: int, x: Tensor, dim: int, half_to_float: bool = False) -> Statistics:
    wide = _wide(x)
    top = yield from _top(wide, dim)
    exponentials = (wide - top).exp_()
    total = yield exponentials.sum(dim, keepdim=True), "sum"
    return exponentials.div_(total).to(torch.float32 if half_to_float else x.dtype)


def _log_softmax(parts: int, x: Tensor, dim: int, half_to_float: bool = False) -> Statistics:
    """The exponentials are gone when the result is made: logits are large."""
    wide = _wide(x)
    top = yield from _top(wide, dim)
    total = yield (wide - top).exp_().sum(dim, keepdim=True), "sum"
    return (wide - top).sub_(total.log()).to(torch.float32 if half_to_float else x.dtype)


def _softmax_backward(parts: int, grad: Tensor, out: Tensor, dim: int, input_dtype: torch.dtype) -> Statistics:
    wide, probabilities = _wide(grad), _wide(out)
    total = yield (wide * probabilities).sum(dim, keepdim=True), "sum"
    return (wide - total).mul_(probabilities).to(input_dtype)


def _log_softmax_backward(parts: int, grad: Tensor, out: Tensor, dim: int, input_dtype: torch.dtype) -> Statistics:
    wide = _wide(grad)
    total = yield wide.sum(dim, keepdim=True), "sum"
    return _wide(out).exp().mul_(-total).add_(wide).to(input_dtype)


def _channels(values: Tensor, like: Tensor) -> Tensor:
    return values.reshape(1, -1, *[1] * (like.dim() - 2))


def _batch_norm(
    parts: int,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
) -> Statistics:
    """Mean first, then the squared distances from it, so that nothing is lost to cancellation: those from the part's own mean, and for
    each of its elements that mean's from the whole one."""
    dims = [0, *range(2, x.dim())]
    own = x.numel() // x.shape[1]
    count = own * parts
    own_variance, own_mean = torch.var_mean(_wide(x), dims, correction=0)
    mean = (yield own_mean * own, "sum") / count
    variance = (yield (own_variance + (own_mean - mean).square()) * own, "sum") / count
    invstd = torch.rsqrt(variance + eps)
    out = _normalised(x, mean, variance, eps, weight, bias)
    unbiased = variance * (count / max(count - 1, 1))
    new_mean = mean.clone() if running_mean is None else (1 - momentum) * running_mean + (momentum * mean).to(running_mean.dtype)
    new_var = unbiased.clone() if running_var is None else (1 - momentum) * running_var + (momentum * unbiased).to(running_var.dtype)
    return out, mean, invstd, new_mean, new_var


def _normalised(x: Tensor, mean: Tensor, variance: Tensor, eps: float, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """``(x - mean) / sqrt(variance + eps) * weight + bias`` by channel, in one pass."""
    scale = torch.ones_like(mean) if weight is None else weight.to(mean.dtype)
    shift = torch.zeros_like(mean) if bias is None else bias.to(mean.dtype)
    return torch.native_batch_norm(x, scale, shift, mean, variance, False, 0.0, eps)[0]


def _batch_norm_backward(parts: int, grad: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, invstd: Tensor) -> Statistics:
    count = x.numel() // x.shape[1] * parts
    grad, x, variance = grad.contiguous(), x.contiguous(), invstd.square().reciprocal()
    sums = torch.ops.aten.native_batch_norm_backward.default(grad, x, invstd, None, None, mean, invstd, True, 0.0, [False, True, True])
    dweight, dbias = yield torch.stack([item.to(mean.dtype) for item in sums[1:]]), "sum"
    scale = invstd if weight is None else invstd * weight
    dx = _normalised(x, mean, variance, 0.0, -scale * dweight / count, -scale * dbias / count)
    dx = torch.addcmul(dx, grad, _channels(scale, x).to(grad.dtype)) if dx.dtype != mean.dtype else dx.addcmul_(grad, _channels(scale, x))
    dtype = mean.dtype if weight is None else weight.dtype
    return dx, dweight.to(dtype), dbias.to(dtype)


def _dims(x: Tensor, dim: int | Sequence[int] | None) -> list[int]:
    given = [dim] if isinstance(dim, int) else list(dim or ())
    return given or list(range(x.dim()))


def _moments(parts: int, x: Tensor, dim: int | Sequence[int] | None, keepdim: bool, correction: float | None) -> Statistics:
    """Variance and mean: the mean first, then the squared distances from it, as of batch norm; none of all elements are held."""
    dims = _dims(x, dim)
    own = math.prod(x.shape[d] for d in dims)
    count = own * parts
    own_variance, own_mean = torch.var_mean(_wide(x), dims, correction=0, keepdim=True)
    mean = (yield own_mean * own, "sum") / count
    total = yield (own_variance + (own_mean - mean).abs().square()) * own, "sum"
    variance = total / max(count - (1 if correction is None else correction), 0)
    return tuple(value if keepdim else value.squeeze(dims) for value in (variance, mean))


def _var(parts: int, x: Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False) -> Statistics:
    variance, _ = yield from _moments(parts, x, dim, keepdim, correction)
    return variance.to(x.dtype)


def _std(parts: int, x: Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False) -> Statistics:
    variance, _ = yield from _moments(parts, x, dim, keepdim, correction)
    return variance.sqrt().to(x.dtype)


def _var_mean(parts: int, x: Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False) -> Statistics:
    variance, mean = yield from _moments(parts, x, dim, keepdim, correction)
    return variance.to(x.dtype), mean.to(x.dtype)


def _std_mean(parts: int, x: Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False) -> Statistics:
    variance, mean = yield from _moments(parts, x, dim, keepdim, correction)
    return variance.sqrt().to(x.dtype), mean.to(x.dtype)


def _logsumexp(parts: int, x: Tensor, dim: Any, keepdim: bool = False) -> Statistics:
    """Of the parts' own, so that no exponentials are held."""
    dims = _dims(x, dim)
    own = _wide(x).logsumexp(dims, keepdim=True)
    top = yield own, "max"
    finite = top.masked_fill(top.isinf(), 0.0)
    total = yield (own - finite).exp(), "sum"
    out = total.log() + finite
    return (out if keepdim else out.squeeze(dims)).to(x.dtype)


def _extreme(parts: int, x: Tensor, dim: int, keepdim: bool, largest: bool, offset: int) -> Statistics:
    """The value, then the first of the places that have it. Both are of one size: places are counted in as many bytes as values take."""
    wide = _wide(x) if x.is_floating_point() else x if x.element_size() >= 4 else x.to(torch.int32)
    values, places = wide.max(dim, keepdim) if largest else wide.min(dim, keepdim)
    top = yield values, "max" if largest else "min"
    counted = torch.int64 if wide.element_size() == 8 else torch.int32
    there = torch.where((values == top) | (values.isnan() & top.isnan()), places + offset, torch.iinfo(counted).max).to(counted)
    first = yield there, "min"
    return top.to(x.dtype), first.to(torch.int64)


def _norm(
    parts: int, x: Tensor, ord: float | None = 2, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Statistics:
    """The local norm to its power, summed, and the root of that. A norm of order 0 is a count."""
    order = 2 if ord is None else ord
    wide = _wide(x if dtype is None else x.to(dtype))
    local = torch.linalg.vector_norm(wide, order, _dims(x, dim), keepdim)
    if order == 0:
        total = yield local, "sum"
    else:
        total = (yield local**order, "sum") ** (1 / order)
    return total.to(dtype or x.dtype)


BODIES: Mapping[str, Callable[..., Any]] = {
    "aten._softmax": _softmax,
    "aten._log_softmax": _log_softmax,
    "aten._softmax_backward_data": _softmax_backward,
    "aten._log_softmax_backward_data": _log_softmax_backward,
    "aten.var": _var,
    "aten.std": _std,
    "aten.var_mean": _var_mean,
    "aten.std_mean": _std_mean,
    "aten.logsumexp": _logsumexp,
    "aten.linalg_vector_norm": _norm,
    "aten.norm": _norm,
    "autopar.attention mirrored": mirrored_attention,
    "autopar.attention_backward mirrored": mirrored_attention_backward,
    "autopar.attention ring": ring_attention,
    "autopar.attention_backward ring": ring_attention_backward,
    "autopar.extreme": _extreme,
    "autopar.batch_norm": _batch_norm,
    "autopar.batch_norm_backward": _batch_norm_backward,
    "autopar.dispatch": expert_exchange.dispatch,
    "autopar.dispatch_ids": expert_exchange.dispatch_ids,
    "autopar.combine": expert_exchange.combine,
    "autopar.all_gather": kept_collectives.all_gather,
    "autopar.all_reduce": kept_collectives.all_reduce,
    "autopar.reduce_scatter": kept_collectives.reduce_scatter,
    "autopar.all_to_all": kept_collectives.all_to_all,
}
"""By operator without its overload, and the way in which a factor is split along which ranks exchange parts, if one is."""
