"""Cases of operators that few models call: special functions, rare reductions, distances and pools."""

from __future__ import annotations

from typing import Any

import torch

from tests.rules.drawing import F32, Case, F, I, P

aten = torch.ops.aten


def fractional() -> tuple[Any, ...]:
    return F(2, 3, 8, 8).tensor(), [2, 2], [4, 4], torch.rand(2, 3, 2, dtype=torch.float64)


def fractional_backward() -> tuple[Any, ...]:
    x, *settings, samples = fractional()
    result, places = aten.fractional_max_pool2d.default(x, *settings, samples)
    return torch.randn_like(result), x, *settings, places


def unpooled(*size: int) -> tuple[Any, ...]:
    pool = aten.max_pool2d_with_indices.default if len(size) == 2 else aten.max_pool3d_with_indices.default
    return *pool(F(2, 3, *size).tensor(), [2] * len(size)), list(size)


def adaptive_backward() -> tuple[Any, ...]:
    x = F(2, 3, 4, 4, 4).tensor()
    result, places = aten.adaptive_max_pool3d.default(x, [2, 2, 2])
    return torch.randn_like(result), x, places


def pdist_backward() -> tuple[Any, ...]:
    x = F(4, 6).tensor()
    distances = aten._pdist_forward.default(x)
    return torch.randn_like(distances), x, 2.0, distances


def scales(channels: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.rand(channels) * 0.2 + 0.05, torch.randint(-2, 3, (channels,), dtype=torch.int32)


LEARNT = (torch.tensor([0.1]), torch.tensor([3.0]))
LEARNT_BY_CHANNEL = (torch.arange(1, 7) * 0.05, torch.arange(6.0) - 2)

CASES: tuple[Case, ...] = (
    Case("aten.igamma.default", (P(4, 6), P(6)), "a b, b -> a b"),
    Case("aten.mvlgamma.default", (P(4, 6), 1), "a b -> a b"),
    Case("aten.special_bessel_j0.default", (F(4, 6),), "a b -> a b"),
    Case("aten.complex.default", (F(4, 6), F(6)), "a b, b -> a b | linear {0 1}"),
    Case("aten.isin.Tensor_Tensor", (I(9, 4, 6), I(9, 3)), "a b, _ -> a b"),
    Case("aten.isin.Tensor_Scalar", (I(9, 4, 6), 3), "a b -> a b"),
    Case("aten.searchsorted.Tensor", lambda: (torch.arange(5.0), F32(4, 6).tensor()), "_, a b -> a b"),
    Case("aten.searchsorted.Tensor", lambda: (F32(4, 5).tensor().sort().values, F32(4, 6).tensor()), "a _, a b -> a b"),
    Case("aten.__lshift__.Scalar", (I(9, 4, 6), 2), "a b -> a b"),
    Case("aten.__rshift__.Tensor", (I(99, 4, 6), I(3, 6)), "a b, b -> a b"),
    Case("aten.fake_quantize_per_tensor_affine_cachemask.default", (F(4, 6), 0.1, 3, -8, 7), "a b -> a b, a b"),
    Case("aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default",
         lambda: (F(4, 6).tensor(), torch.tensor([0.1]), torch.tensor([3]), torch.tensor([1]), -8, 7), "a b, 1, 1, 1 -> a b, a b"),
    Case("aten.fake_quantize_per_channel_affine_cachemask.default", lambda: (F(4, 6, 2).tensor(), *scales(6), 1, -8, 7),
         "a c b, c, c -> a c b, a c b"),
    Case("aten._fake_quantize_learnable_per_tensor_affine.default", (F32(4, 6), *LEARNT, -8, 7, 1.0), "a b, 1, 1 -> a b"),
    Case("aten._fake_quantize_learnable_per_tensor_affine_backward.default", (F32(4, 6), F32(4, 6), *LEARNT, -8, 7, 1.0),
         "a b, a b, 1, 1 -> a b, 1 +a +b, 1 +a +b | linear {0}"),
    Case("aten._fake_quantize_learnable_per_channel_affine.default", (F32(4, 6), *LEARNT_BY_CHANNEL, 1, -8, 7, 1.0), "a c, c, c -> a c"),
    Case("aten._fake_quantize_learnable_per_channel_affine_backward.default", (F32(4, 6), F32(4, 6), *LEARNT_BY_CHANNEL, 1, -8, 7, 1.0),
         "a c, a c, c, c -> a c, c +a, c +a | linear {0}"),
    Case("aten._euclidean_dist.default", (F(2, 4, 3), F(2, 6, 3)), "a m k!, a n k! -> a m n"),
    Case("aten.nansum.default", (F(4, 6), [1]), "a d -> a +d"),
    Case("aten.nanmedian.default", (F(4, 6),), "a! b! -> ()"),
    Case("aten.nanmedian.dim", (F(4, 6), 0), "d! a -> a, a"),
    Case("aten.kthvalue.default", (F(4, 6), 2, 1), "a d! -> a, a"),
    Case("aten.mode.default", (I(3, 4, 6), 0, True), "d! a -> 1 a, 1 a"),
    Case("aten._pdist_forward.default", (F(4, 6),), "_ _ -> _"),
    Case("aten._pdist_backward.default", pdist_backward, "_, _ _, _ -> _ _ | linear {0}"),
    Case("aten.max_unpool2d.default", lambda: unpooled(8, 8), "a b _ _, a b _ _ -> a b _ _ | linear {0}"),
    Case("aten.max_unpool3d.default", lambda: (*unpooled(4, 4, 4), [2, 2, 2], [0, 0, 0]), "a b _ _ _, a b _ _ _ -> a b _ _ _ | linear {0}"),
    Case("aten.fractional_max_pool2d.default", fractional, "n c _ _, n c _ -> n c _ _, n c _ _"),
    Case("aten.fractional_max_pool2d_backward.default", fractional_backward, "n c _ _, n c _ _, n c _ _ -> n c _ _ | linear {0}"),
    Case("aten.adaptive_max_pool3d.default", (F(2, 3, 4, 4, 4), [2, 2, 2]), "a b _ _ _ -> a b _ _ _, a b _ _ _"),
    Case("aten.adaptive_max_pool3d_backward.default", adaptive_backward, "a b _ _ _, a b _ _ _, a b _ _ _ -> a b _ _ _ | linear {0}"),
    Case("aten._upsample_bilinear2d_aa.default", (F(2, 4, 8, 8), [4, 4], False), "a b _ _ -> a b _ _ | linear {0}"),
    Case("aten._upsample_bicubic2d_aa.default", (F(2, 4, 8, 8), [4, 4], False), "a b _ _ -> a b _ _ | linear {0}"),
    Case("aten._upsample_bilinear2d_aa_backward.default", (F(2, 4, 4, 4), [4, 4], [2, 4, 8, 8], False), "a b _ _ -> a b _ _ | linear {0}"),
    Case("aten._upsample_bicubic2d_aa_backward.default", (F(2, 4, 4, 4), [4, 4], [2, 4, 8, 8], False), "a b _ _ -> a b _ _ | linear {0}"),
    Case("aten.renorm.default", (F(4, 6, 2), 2, 1, 1.0), "_ a _ -> _ a _"),
)  # fmt: skip
