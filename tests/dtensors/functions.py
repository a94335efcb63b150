"""What people call on tensors that a plan hands out: functions of torch and torch.nn.functional, and methods of tensors.

A function's arguments say by their names what they are: see ``ARGUMENTS``. The first lies as a plan lays it, the others whole or alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Function = Callable[..., Any]


def _draw(kind: Callable[..., Tensor], *shape: int) -> Tensor:
    return kind(shape, dtype=torch.float64)


def _between(*shape: int) -> Tensor:
    return 0.1 + 0.8 * torch.rand(shape, dtype=torch.float64)


ARGUMENTS: dict[str, Callable[[int, int], Tensor]] = {
    "x": lambda m, n: _draw(torch.randn, m, n),
    "y": lambda m, n: _draw(torch.randn, m, n),
    "z": lambda m, n: _draw(torch.randn, m, n),
    "p": lambda m, n: _between(m, n),  # probabilities
    "q": lambda m, n: _between(m, n),
    "sign": lambda m, n: torch.randint(0, 2, (m, n)).double() * 2 - 1,
    "v": lambda m, n: _draw(torch.randn, n),  # for each column
    "c": lambda m, n: _draw(torch.randn, m, 1),  # for each row
    "rows": lambda m, n: _draw(torch.randn, m),
    "w": lambda m, n: _draw(torch.randn, 5, n),  # a linear layer's weight
    "t": lambda m, n: _draw(torch.randn, n, 5),
    "u": lambda m, n: _draw(torch.randn, 5, m),
    "sq": lambda m, n: _draw(torch.randn, n, n),
    "ids": lambda m, n: torch.randint(0, n, (m,)),
    "few": lambda m, n: torch.tensor([0, m - 1, 1]),
    "ignored": lambda m, n: torch.where(torch.arange(m) < m // 2 + 1, -100, torch.arange(m) % n),
    "index": lambda m, n: torch.randint(0, min(m, n), (m, n)),
    "mask": lambda m, n: torch.rand(m, n) < 0.5,
    "i": lambda m, n: torch.randint(0, 6, (m, n)),
    "i2": lambda m, n: torch.randint(1, 6, (m, n)),
    "b": lambda m, n: torch.rand(m, n) < 0.5,
    "x3": lambda m, n: _draw(torch.randn, m, n, 4),
    "y3": lambda m, n: _draw(torch.randn, m, n, 4),
    "z3": lambda m, n: _draw(torch.randn, m, n, 4),
    "t3": lambda m, n: _draw(torch.randn, m, 4, 3),
    "x4": lambda m, n: _draw(torch.randn, m, n, 4, 4),
    "y4": lambda m, n: _draw(torch.randn, m, n, 4, 4),
    "grid": lambda m, n: 2 * torch.rand(m, 3, 3, 2, dtype=torch.float64) - 1,
    "k1": lambda m, n: _draw(torch.randn, 3, n, 3),
    "k2": lambda m, n: _draw(torch.randn, 3, n, 3, 3),
    "kb": lambda m, n: _draw(torch.randn, 2, n, n),
    "kt": lambda m, n: _draw(torch.randn, n, 3, 3),
    "x5": lambda m, n: _draw(torch.randn, m, n, 2, 2, 2),
}
"""A tensor by the name of an argument, for a first argument of m rows and n columns."""

def _words(text: str) -> list[str]:
    return text.split()


_UNARY = _words("""abs neg exp expm1 sin cos tan sinh cosh tanh atan asinh sigmoid erf erfc square sign sgn floor ceil round
trunc frac relu positive sinc logit_p log_p log2_p log10_p log1p_p sqrt_p rsqrt_p reciprocal_p asin_p acos_p
atanh_p lgamma_p digamma_p erfinv_p exp2 deg2rad rad2deg nan_to_num isnan isinf isfinite isposinf isneginf
logical_not signbit i0 angle conj_physical""")
_ACTIVATIONS = _words("""relu relu6 elu selu celu gelu silu mish softplus softsign tanhshrink hardtanh hardsigmoid hardswish
leaky_relu
logsigmoid softshrink hardshrink sigmoid tanh""")
_BINARY = _words("""add sub mul div maximum minimum fmax fmin atan2 hypot copysign lt le gt ge eq ne logical_and
logical_or logical_xor""")
_INTEGERS = _words("bitwise_and bitwise_or bitwise_xor floor_divide remainder fmod add mul eq")
_REDUCED = _words("sum mean amax amin var std prod logsumexp argmax argmin median nanmean nansum norm all any count_nonzero")
_WHOLE = _words("sum mean max min var std prod argmax argmin median nanmean nansum norm all any count_nonzero")
_SCANS = _words("cumsum cumprod logcumsumexp")


def _of(name: str) -> Function:
    method = getattr(torch.Tensor, name.removesuffix("_p"))
    return (lambda p: method(p)) if name.endswith("_p") else (lambda x: method(x))


def _with(method: Any, **named: Any) -> Function:
    return lambda x: method(x, **named)


def _two(method: Any) -> Function:
    return lambda x, y: method(x, y)


def _integers(method: Any) -> Function:
    return lambda i, i2: method(i, i2)


def _row(method: Any) -> Function:
    return lambda x, v: method(x, v)


def _column(method: Any) -> Function:
    return lambda x, c: method(x, c)


def _along(name: str, dim: int) -> Function:
    return (lambda p: getattr(p, name)(dim)) if name == "logcumsumexp" else (lambda x: getattr(x, name)(dim))


def _reduced(name: str, dim: int) -> Function:
    return lambda x: tuple(made) if isinstance(made := getattr(x, name)(dim=dim), tuple) else made


def _loss(name: str, reduction: str) -> Function:
    loss = getattr(F, name)
    if name == "binary_cross_entropy":
        return lambda p, q: loss(p, q, reduction=reduction)
    if name == "soft_margin_loss":
        return lambda x, sign: loss(x, sign.detach(), reduction=reduction)
    if name == "gaussian_nll_loss":
        return lambda x, y, q: loss(x, y, q, reduction=reduction)
    if name in ("hinge_embedding_loss", "multilabel_soft_margin_loss"):
        return lambda x, sign: loss(x, sign.detach(), reduction=reduction)
    if name == "multi_margin_loss":
        return lambda x, ids: loss(x, ids, reduction=reduction)
    if name in ("cross_entropy", "nll_loss"):
        return lambda x, ids: loss(x.log_softmax(1) if name == "nll_loss" else x, ids, reduction=reduction)
    if name == "kl_div":
        return lambda x, q: loss(x.log_softmax(1), q, reduction=reduction)
    if name == "poisson_nll_loss":
        return lambda x, q: loss(x, q, reduction=reduction)
    return lambda x, y: loss(x, y, reduction=reduction)


_LOSSES = _words("""mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits soft_margin_loss kl_div
poisson_nll_loss gaussian_nll_loss cross_entropy nll_loss hinge_embedding_loss multilabel_soft_margin_loss multi_margin_loss""")


def _through_view(x: Tensor, write: Callable[[Tensor], Any]) -> Tensor:
    changed = x.detach().clone()
    write(changed)
    return changed


def _changed(name: str, *args: Any) -> Function:
    return lambda x: getattr(x.clone(), name)(*args)


FUNCTIONS: dict[str, Function] = {
    **{name.removesuffix("_p"): _of(name) for name in _UNARY},
    **{f"F.{name}": _with(getattr(F, name)) for name in _ACTIVATIONS},
    **{f"{name}(x, y)": _two(getattr(torch, name)) for name in _BINARY},
    **{f"{name}(x, row)": _row(getattr(torch, name)) for name in _BINARY[:6]},
    **{f"{name}(x, column)": _column(getattr(torch, name)) for name in _BINARY[:6]},
    **{f"{name}(i, i)": _integers(getattr(torch, name)) for name in _INTEGERS},
    **{f"{name}()": _of(name) for name in _WHOLE},
    **{f"{name}({dim})": _reduced(name, dim) for name in _REDUCED for dim in (0, 1)},
    **{f"{name}({dim})": _along(name, dim) for name in _SCANS for dim in (0, 1)},
    **{f"F.{name} {reduction}": _loss(name, reduction) for name in _LOSSES for reduction in ("mean", "sum", "none")},
    # numbers
    "x + 1": lambda x: x + 1,
    "2 - x": lambda x: 2 - x,
    "x * 3": lambda x: x * 3,
    "x / 2": lambda x: x / 2,
    "1 / p": lambda p: 1 / p,
    "x ** 2": lambda x: x**2,
    "x ** 3": lambda x: x**3,
    "p ** q": lambda p, q: p**q,
    "2 ** x": lambda x: 2**x,
    "x.clamp": lambda x: x.clamp(-0.5, 0.5),
    "x.clamp_min": lambda x: x.clamp_min(0.1),
    "x.clamp(y)": lambda x, y: x.clamp(min=y),
    "x > 0": lambda x: x > 0,
    "lerp": lambda x, y: torch.lerp(x, y, 0.3),
    "lerp(weight)": lambda x, y, q: torch.lerp(x, y, q),
    "addcmul": lambda x, y, z: torch.addcmul(x, y, z, value=2),
    "addcdiv": lambda x, y, q: torch.addcdiv(x, y, q, value=2),
    "where": lambda mask, x, y: torch.where(mask, x, y),
    "where(number)": lambda x: torch.where(x > 0, x, 0.0),
    "masked_fill": lambda x, mask: x.masked_fill(mask, 2.0),
    "heaviside": lambda x, y: torch.heaviside(x.detach(), y.detach()),
    "xlogy": lambda p, q: torch.xlogy(p, q),
    "logaddexp": lambda x, y: torch.logaddexp(x, y),
    "isclose": lambda x, y: torch.isclose(x, y),
    "float": lambda x: x.float(),
    "to(bool)": lambda x: (x > 0).to(torch.float64),
    "bitwise_not": lambda i: i.bitwise_not(),
    "F.threshold": lambda x: F.threshold(x, 0.1, 0.5),
    "F.prelu": lambda x, v: F.prelu(x, v),
    "F.glu(0)": lambda x: F.glu(x[: x.shape[0] // 2 * 2], 0),
    "F.glu(1)": lambda x: F.glu(x[:, : x.shape[1] // 2 * 2], 1),
    "F.rrelu": lambda x: F.rrelu(x, training=False),
    "F.dropout(eval)": lambda x: F.dropout(x, training=False),
    # reductions
    "sum(keepdim)": lambda x: x.sum(0, keepdim=True),
    "mean(both)": lambda x: x.mean((0, 1)),
    "mean(keepdim)": lambda x: x.mean(1, keepdim=True),
    "max(0)": lambda x: tuple(x.max(0)),
    "max(1)": lambda x: tuple(x.max(1)),
    "min(0)": lambda x: tuple(x.min(0)),
    "var(0) biased": lambda x: x.var(0, correction=0),
    "var_mean": lambda x: torch.var_mean(x, 1),
    "std_mean": lambda x: torch.std_mean(x, 0),
    "aminmax": lambda x: tuple(torch.aminmax(x)),
    "norm(1)": lambda x: x.norm(1),
    "norm(inf)": lambda x: x.norm(float("inf")),
    "norm(3, 0)": lambda x: x.norm(3, dim=0),
    "vector_norm": lambda x: torch.linalg.vector_norm(x),
    "vector_norm(0)": lambda x: torch.linalg.vector_norm(x, dim=0),
    "matrix_norm": lambda x: torch.linalg.matrix_norm(x),
    "F.normalize(0)": lambda x: F.normalize(x, dim=0),
    "F.normalize(1)": lambda x: F.normalize(x, dim=1),
    "square.mean": lambda x: x.square().mean(),
    "abs.sum": lambda x: x.abs().sum(),
    "mean squared": lambda x: x.mean() ** 2,
    "mean * sum": lambda x: x.mean() * x.sum(),
    "sum / norm": lambda x: x.sum() / x.norm(),
    "x - mean": lambda x: x - x.mean(),
    "x - mean(0)": lambda x: x - x.mean(0),
    "x * sum": lambda x: x * x.sum(),
    "sum + 1": lambda x: x.sum() + 1,
    "sum(0) * row": lambda x, v: x.sum(0) * v,
    "mean + mean": lambda x, y: x.mean() + y.square().mean(),
    "sum.exp": lambda x: (x.sum() / 100).exp(),
    "sum(0).softmax": lambda x: x.sum(0).softmax(0),
    "mean(0).relu": lambda x: x.mean(0).relu(),
    "sum(0) > 0": lambda x: x.sum(0) > 0,
    "sum(0).clamp": lambda x: x.sum(0).clamp(min=0.0),
    "sum.square": lambda x: x.sum(0).square().sum(),
    "sum of amax": lambda x: x.amax(1).sum() + x.amin(0).square().sum(),
    "sum of norms": lambda x: x.norm(dim=1).sum() + x.norm(dim=0).mean() + x.norm() * 2,
    "exp of norms": lambda x: (x.norm(dim=1) / 10).exp() - x.norm(1, dim=0),
    "prod of sums": lambda x: x.sum(0) * x.sum(0) + x.sum(0) / x.shape[0],
    "linear of sums": lambda x, w: F.linear(x.sum(0), w),
    "sums of means": lambda x: x.mean(0).sum() + x.mean(1).mean() + x.mean(0).square().mean(),
    "x / norm(1)": lambda x: x / x.norm(dim=1, keepdim=True) + x.amax(0),
    "any of all": lambda b: b.all(1).any() | b.any(0).all(),
    "numel": lambda x: torch.tensor(float(x.numel())),
    "item": lambda x: torch.tensor(x.sum().item(), dtype=torch.float64),
    "torch.equal": lambda x, y: torch.tensor([torch.equal(x, y), torch.equal(x, x)]),
    "allclose": lambda x, y: torch.tensor([torch.allclose(x, y), torch.allclose(x, x)]),
    "trace": lambda x: x.trace(),
    "dist": lambda x, y: torch.dist(x, y),
    "quantile": lambda x: x.quantile(0.3),
    "bincount": lambda i: i.flatten().bincount(),
    "histc": lambda x: x.histc(5, -2, 2),
    "unique": lambda i: i.unique(),
    "renorm": lambda x: x.renorm(2, 0, 1.0),
    # softmax, sorting
    "softmax(0)": lambda x: x.softmax(0),
    "softmax(1)": lambda x: x.softmax(1),
    "log_softmax(0)": lambda x: x.log_softmax(0),
    "log_softmax(1)": lambda x: x.log_softmax(1),
    "F.softmin": lambda x: F.softmin(x, 1),
    "logsumexp(both)": lambda x: x.logsumexp((0, 1)),
    "sort(0)": lambda x: tuple(x.sort(0)),
    "sort(1)": lambda x: tuple(x.sort(1)),
    "argsort": lambda x: x.argsort(0),
    "topk(0)": lambda x: tuple(x.topk(3, 0)),
    "topk(1)": lambda x: tuple(x.topk(3, 1)),
    "kthvalue": lambda x: tuple(x.kthvalue(2, 0)),
    "mode": lambda i: i.mode(0).values,
    "cummax": lambda x: tuple(x.cummax(0)),
    "diff": lambda x: x.diff(dim=0),
    "searchsorted": lambda x, y: torch.searchsorted(x.sort(1).values, y),
    "bucketize": lambda x, v: torch.bucketize(x, v.sort().values),
    # products
    "mm": lambda x, t: x @ t,
    "mm(left)": lambda x, u: u @ x,
    "linear": lambda x, w: F.linear(x, w),
    "gram": lambda x: x @ x.T,
    "gram(T)": lambda x: x.T @ x,
    "mm(y.T)": lambda x, y: x @ y.T,
    "addmm": lambda x, sq, v: torch.addmm(v, x, sq),
    "mv": lambda x, v: x @ v,
    "outer": lambda rows, v: torch.outer(rows, v),
    "dot": lambda rows: rows @ rows,
    "inner": lambda x, w: torch.inner(x, w),
    "bmm": lambda x3, t3: torch.bmm(x3, t3),
    "baddbmm": lambda x3, t3: torch.baddbmm(torch.ones_like(x3[:, :, :3]), x3, t3),
    "matmul(3)": lambda x3: x3 @ x3.transpose(1, 2),
    "einsum": lambda x3, y3: torch.einsum("abc,adc->abd", x3, y3),
    "einsum(sum)": lambda x, y: torch.einsum("ab,ab->", x, y),
    "F.bilinear": lambda x, y, kb: F.bilinear(x, y, kb),
    "kron": lambda x, few: torch.kron(x, few.to(x.dtype)),
    "cdist": lambda x, y: torch.cdist(x, y),
    "F.cosine_similarity": lambda x, y: F.cosine_similarity(x, y),
    "F.pairwise_distance": lambda x, y: F.pairwise_distance(x, y),
    "F.pdist": lambda x: F.pdist(x),
    "cross": lambda t3: torch.cross(t3, t3.flip(2), dim=2),
    "vdot": lambda rows: torch.vdot(rows, rows),
    "multi_dot": lambda x, t: torch.linalg.multi_dot([x.T, x, t]),
    "matrix_power": lambda sq: torch.linalg.matrix_power(sq, 3),
    "det": lambda sq: torch.linalg.det(sq),
    "slogdet": lambda sq: tuple(torch.linalg.slogdet(sq)),
    "inv": lambda sq: torch.linalg.inv(sq),
    "solve": lambda sq, t: torch.linalg.solve(sq, t),
    "cholesky": lambda sq: torch.linalg.cholesky(sq @ sq.T + torch.diag_embed(torch.ones_like(sq[0]))),
    "svdvals": lambda x: torch.linalg.svdvals(x),
    "qr": lambda x: torch.linalg.qr(x).R.abs(),
    "eigvalsh": lambda sq: torch.linalg.eigvalsh(sq + sq.T),
    "matrix_exp": lambda sq: torch.matrix_exp(0.1 * sq),
    "pinv": lambda x: torch.linalg.pinv(x),
    # criteria with more arguments
    "F.cross_entropy(ignored)": lambda x, ignored: F.cross_entropy(x, ignored),
    "F.cross_entropy(smoothing)": lambda x, ids: F.cross_entropy(x, ids, label_smoothing=0.1),
    "F.cross_entropy(weight)": lambda x, ids, v: F.cross_entropy(x, ids, weight=v.detach().exp()),
    "F.cross_entropy(probabilities)": lambda x, y: F.cross_entropy(x, y.softmax(1)),
    "F.cross_entropy(3)": lambda x3, index: F.cross_entropy(x3.transpose(1, 2), index % 4),
    "F.nll_loss(ignored)": lambda x, ignored: F.nll_loss(x.log_softmax(1), ignored),
    "F.binary_cross_entropy(weight)": lambda p, q, v: F.binary_cross_entropy(p, q, weight=v.detach().exp()),
    "F.binary_cross_entropy_with_logits(pos_weight)": lambda x, q, v: F.binary_cross_entropy_with_logits(x, q, pos_weight=v.detach().exp()),
    "F.kl_div(batchmean)": lambda x, q: F.kl_div(x.log_softmax(1), q, reduction="batchmean"),
    "F.kl_div(log)": lambda x, y: F.kl_div(x.log_softmax(1), y.log_softmax(1), reduction="batchmean", log_target=True),
    "F.triplet_margin_loss": lambda x, y, z: F.triplet_margin_loss(x, y, z),
    "F.cosine_embedding_loss": lambda x, y, rows: F.cosine_embedding_loss(x, y, rows.sign()),
    "F.margin_ranking_loss": lambda x, y, sign: F.margin_ranking_loss(x, y, sign),
    "F.huber_loss(delta)": lambda x, y: F.huber_loss(x, y, delta=0.4),
    "F.mse_loss(weight)": lambda x, y, q: F.mse_loss(x, y, weight=q),
    "F.multilabel_margin_loss": lambda x, index: F.multilabel_margin_loss(x, index),
    # normalisation, attention
    "F.layer_norm": lambda x: F.layer_norm(x, x.shape[1:]),
    "F.layer_norm(affine)": lambda x, v: F.layer_norm(x, x.shape[1:], v, v),
    "F.rms_norm": lambda x, v: F.rms_norm(x, x.shape[1:], v),
    "F.group_norm": lambda x3: F.group_norm(x3, 2),
    "F.batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "F.instance_norm": lambda x3: F.instance_norm(x3),
    "F.local_response_norm": lambda x4: F.local_response_norm(x4, 2),
    "F.scaled_dot_product_attention": lambda x4: F.scaled_dot_product_attention(x4, x4, x4),
    "F.scaled_dot_product_attention(causal)": lambda x4: F.scaled_dot_product_attention(x4, x4, x4, is_causal=True),
    "F.scaled_dot_product_attention(3)": lambda x3, y3, z3: F.scaled_dot_product_attention(x3, y3, z3),
    # images
    "F.conv1d": lambda x3, k1: F.conv1d(x3, k1, padding=1),
    "F.conv2d": lambda x4, k2: F.conv2d(x4, k2, padding=1),
    "F.conv2d(stride)": lambda x4, k2: F.conv2d(x4, k2, stride=2),
    "F.conv_transpose1d": lambda x3, kt: F.conv_transpose1d(x3, kt),
    "F.max_pool1d": lambda x3: F.max_pool1d(x3, 2),
    "F.max_pool2d": lambda x4: F.max_pool2d(x4, 2),
    "F.avg_pool2d": lambda x4: F.avg_pool2d(x4, 2),
    "F.avg_pool1d": lambda x3: F.avg_pool1d(x3, 2),
    "F.lp_pool2d": lambda x4: F.lp_pool2d(x4, 2.0, 2),
    "F.adaptive_avg_pool2d": lambda x4: F.adaptive_avg_pool2d(x4, 1),
    "F.adaptive_max_pool2d": lambda x4: F.adaptive_max_pool2d(x4, 2),
    "F.adaptive_avg_pool1d": lambda x3: F.adaptive_avg_pool1d(x3, 2),
    "F.interpolate": lambda x4: F.interpolate(x4, scale_factor=2),
    "F.interpolate(bilinear)": lambda x4: F.interpolate(x4, scale_factor=2, mode="bilinear"),
    "F.pixel_shuffle": lambda x4: F.pixel_shuffle(x4[:, : x4.shape[1] // 4 * 4], 2),
    "F.pixel_unshuffle": lambda x4: F.pixel_unshuffle(x4, 2),
    "F.unfold": lambda x4: F.unfold(x4, 2),
    "F.grid_sample": lambda x4, grid: F.grid_sample(x4, grid, align_corners=False),
    "F.pad(0)": lambda x: F.pad(x, (0, 0, 1, 2)),
    "F.pad(1)": lambda x: F.pad(x, (1, 2)),
    "F.pad(reflect)": lambda x3: F.pad(x3, (1, 2), mode="reflect"),
    "F.pad(circular)": lambda x3: F.pad(x3, (1, 2), mode="circular"),
    "F.avg_pool3d": lambda x5: F.avg_pool3d(x5, 2),
    # look-ups
    "F.embedding": lambda x, ids, few: F.embedding(few, x),
    "F.embedding(ids)": lambda ids, t: F.embedding(ids, t),
    "F.one_hot": lambda i: F.one_hot(i, 6),
    "gather(0)": lambda x, index: x.gather(0, index),
    "gather(1)": lambda x, index: x.gather(1, index),
    "take_along_dim": lambda x, index: x.take_along_dim(index, 1),
    "index_select(0)": lambda x, few: x.index_select(0, few),
    "index_select(1)": lambda x, few: x.index_select(1, few % x.shape[1]),
    "x[few]": lambda x, few: x[few],
    "x[:, few]": lambda x, few: x[:, few % x.shape[1]],
    "x[rows, ids]": lambda x, ids: x[range(x.shape[0]), ids],
    "x[mask]": lambda x, mask: x[mask],
    "masked_select": lambda x, mask: x.masked_select(mask),
    "nonzero": lambda i: i.nonzero(),
    "take": lambda x, few: x.take(few),
    "scatter": lambda x, index, y: x.scatter(0, index, y),
    "scatter(number)": lambda x, index: x.scatter(1, index, 2.0),
    "scatter_add": lambda x, index, y: x.scatter_add(0, index, y),
    "scatter_add(1)": lambda x, index, y: x.scatter_add(1, index, y),
    "scatter_reduce": lambda x, index, y: x.scatter_reduce(0, index, y, "amax"),
    "index_add": lambda x, few: x.index_add(0, few, torch.ones_like(x)[:3]),
    "index_fill": lambda x, few: x.index_fill(0, few, 1.0),
    "index_copy": lambda x, few: x.index_copy(0, few, torch.ones_like(x)[:3]),
    "index_put": lambda x, few: x.index_put((few,), torch.ones_like(x)[:3]),
    "masked_scatter": lambda x, mask, y: x.masked_scatter(mask, y),
    # views and copies
    "T": lambda x: x.T,
    "transpose": lambda x3: x3.transpose(0, 2),
    "permute": lambda x3: x3.permute(1, 2, 0),
    "movedim": lambda x3: x3.movedim(0, 1),
    "unsqueeze": lambda x: x.unsqueeze(1),
    "squeeze": lambda x: x.unsqueeze(0).squeeze(),
    "squeeze(0)": lambda x: x.squeeze(0) * 2,
    "squeeze((0, 1))": lambda x: x.squeeze((0, 1)) * 2,
    "squeeze_": lambda x: (x * 1).squeeze_(),
    "squeeze(0).mul_": lambda x: _through_view(x, lambda y: y.squeeze(0).mul_(3)),
    "flatten": lambda x: x.flatten(),
    "flatten(3)": lambda x3: x3.flatten(1),
    "flatten(0, 1)": lambda x3: x3.flatten(0, 1),
    "reshape(-1)": lambda x: x.reshape(-1),
    "reshape(2)": lambda x3: x3.reshape(x3.shape[0], -1),
    "view": lambda x3: x3.view(x3.shape[0] * x3.shape[1], 4),
    "unflatten(4)": lambda x3: x3.unflatten(2, (2, 2)),
    "unflatten(0)": lambda x: x[: x.shape[0] // 2 * 2].unflatten(0, (2, -1)),
    "unflatten(1)": lambda x: x[:, : x.shape[1] // 2 * 2].unflatten(1, (-1, 2)),
    "unflatten(0, 3)": lambda x: x[: x.shape[0] // 3 * 3].unflatten(0, (3, -1)),
    "expand": lambda x: x.unsqueeze(0).expand(3, -1, -1),
    "expand_as": lambda v, y: v.expand_as(y),
    "broadcast_to": lambda c, y: c.broadcast_to(y.shape),
    "repeat": lambda x: x.repeat(2, 3),
    "repeat(1, 2)": lambda x: x.repeat(1, 2),
    "tile": lambda x: x.tile(2),
    "repeat_interleave(0)": lambda x: x.repeat_interleave(2, 0),
    "repeat_interleave(1)": lambda x: x.repeat_interleave(2, 1),
    "x[0]": lambda x: x[0],
    "x[-1]": lambda x: x[-1],
    "x[:, 0]": lambda x: x[:, 0],
    "x[1:4]": lambda x: x[1:4],
    "x[:, 2:5]": lambda x: x[:, 2:5],
    "x[::2]": lambda x: x[::2],
    "x[..., None]": lambda x: x[..., None],
    "x[:, ::3]": lambda x: x[:, ::3],
    "narrow": lambda x: x.narrow(0, 1, 3),
    "select": lambda x: x.select(1, 2),
    "split": lambda x: x.split(3),
    "split(1)": lambda x: x.split(4, 1),
    "chunk": lambda x: x.chunk(2),
    "chunk(1)": lambda x: x.chunk(3, 1),
    "tensor_split": lambda x: x.tensor_split(3),
    "unbind": lambda x: x.unbind(0),
    "unbind(1)": lambda x: x.unbind(1),
    "chunk product": lambda x: x[:, : x.shape[1] // 2 * 2].chunk(2, 1)[0] * x[:, : x.shape[1] // 2 * 2].chunk(2, 1)[1],
    "diagonal": lambda x: x.diagonal(),
    "diag": lambda x: x.diag(),
    "diag_embed": lambda v: v.diag_embed(),
    "triu": lambda x: x.triu(),
    "tril": lambda x: x.tril(1),
    "flip(0)": lambda x: x.flip(0),
    "flip(1)": lambda x: x.flip(1),
    "roll(0)": lambda x: x.roll(1, 0),
    "roll(1)": lambda x: x.roll(2, 1),
    "rot90": lambda x: x.rot90(),
    "unfold": lambda x: x.unfold(1, 2, 1),
    "unfold(0)": lambda x: x.unfold(0, 2, 2),
    "cat(0)": lambda x, y: torch.cat([x, y]),
    "cat(1)": lambda x, y: torch.cat([x, y], 1),
    "stack": lambda x, y: torch.stack([x, y]),
    "stack(2)": lambda x, y: torch.stack([x, y], 2),
    "stack of sums": lambda x, y: torch.stack([x.sum(), y.sum(), x.mean()]),
    "stack of norms": lambda x, y: torch.stack([x.norm(), y.norm()]).norm(),
    "hstack": lambda x, y: torch.hstack([x, y]),
    "vstack": lambda x, y: torch.vstack([x, y]),
    "block_diag": lambda x, y: torch.block_diag(x, y),
    "meshgrid": lambda rows, v: torch.meshgrid(rows, v, indexing="ij"),
    "combinations": lambda rows: torch.combinations(rows),
    "contiguous": lambda x: x.T.contiguous(),
    "clone": lambda x: x.clone(),
    "detach": lambda x: x.detach(),
    "view_as_real": lambda x, y: torch.view_as_real(torch.complex(x, y)),
    "complex abs": lambda x, y: torch.complex(x, y).abs(),
    "fft": lambda x: torch.view_as_real(torch.fft.fft(x, dim=1)),
    "fft(0)": lambda x: torch.view_as_real(torch.fft.fft(x, dim=0)),
    "zeros_like": lambda x: torch.zeros_like(x),
    "full_like": lambda x: torch.full_like(x, 2.0),
    "new_zeros": lambda x: x.new_zeros(x.shape) + x,
    "vander": lambda rows: torch.vander(rows),
    "tril_mask": lambda sq: sq.masked_fill(torch.ones_like(sq).tril() == 0, -1.0),
    "atleast_3d": lambda x: torch.atleast_3d(x),
    "swapaxes": lambda x: x.swapaxes(0, 1),
    "ravel": lambda x: x.T.ravel(),
    "cumulative_trapezoid": lambda x: torch.cumulative_trapezoid(x, dim=1),
    "cov": lambda x: x.cov(),
    "corrcoef": lambda x: x.corrcoef(),
    # written in place
    **{f"{name}{args}": _changed(name, *args) for name, args in (
        ("add_", (1,)), ("mul_", (2,)), ("zero_", ()), ("fill_", (2.0,)), ("clamp_", (-0.5, 0.5)), ("exp_", ()), ("relu_", ()),
        ("abs_", ()), ("tril_", ()), ("sub_", (0.5,)), ("div_", (3,)), ("pow_", (2,)), ("neg_", ()), ("sigmoid_", ()),
    )},
    "copy_": lambda x, y: x.clone().copy_(y),
    "add_(y)": lambda x, y: x.clone().add_(y),
    "mul_(row)": lambda x, v: x.clone().mul_(v),
    "addcmul_": lambda x, y, z: x.clone().addcmul_(y, z),
    "addcdiv_": lambda x, y, q: x.clone().addcdiv_(y, q),
    "lerp_": lambda x, y: x.clone().lerp_(y, 0.1),
    "masked_fill_": lambda x, mask: x.clone().masked_fill_(mask, 1.0),
    "sub_(mean)": lambda x: x.clone().sub_(x.mean(0)),
    "div_(norm)": lambda x: x.clone().div_(x.norm()),
    "_foreach_add": lambda x, y: torch._foreach_add([x, y], [y, x], alpha=2),
    "_foreach_norm": lambda x, y: torch.stack(list(torch._foreach_norm([x, y]))),
    "_foreach_mul": lambda x, y: torch._foreach_mul([x, y], 3.0),
    "_foreach_sqrt": lambda p, q: torch._foreach_sqrt([p, q]),
    "_foreach_lerp": lambda x, y: torch._foreach_lerp([x], [y], 0.3),
    "_foreach_addcdiv": lambda x, y, q: torch._foreach_addcdiv([x], [y], [q], value=0.5),
    # as criteria and penalties are written
    "weighted mean": lambda x, q: (x * q).sum() / q.sum(),
    "masked mean": lambda x, mask: (x * mask).sum() / mask.sum(),
    "accuracy": lambda x, ids: (x.argmax(1) == ids).double().mean(),
    "focal": lambda x, q: ((1 - x.sigmoid()) ** 2 * F.binary_cross_entropy_with_logits(x, q, reduction="none")).mean(),
    "orthogonality": lambda x: (x @ x.T - torch.diag_embed((x @ x.T).diagonal())).square().sum(),
    "total variation": lambda x: (x[1:] - x[:-1]).abs().mean(),
    "contrastive": lambda x, y, few: F.cross_entropy(F.normalize(x) @ F.normalize(y).T, (x[:, 0] * 0).long()),
    "entropy": lambda x: -(x.softmax(1) * x.log_softmax(1)).sum(1).mean(),
    "log likelihood": lambda x, ids: x.log_softmax(1).gather(1, ids.unsqueeze(1)).mean(),
    "group lasso": lambda x: x.norm(dim=1).sum(),
    "spectral": lambda x: torch.linalg.matrix_norm(x, 2),
    "module linear": lambda x: nn.Identity()(x) * 1.0,
}  # fmt: skip
"""By name, at least 300."""
assert len(FUNCTIONS) >= 300, len(FUNCTIONS)

