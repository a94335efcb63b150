"""Cases of what moves, normalises, pools, looks up and makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import autopar.dialect  # noqa: F401  registers the operators of ours
from tests.rules.drawing import B, C, Case, F, I, P

aten = torch.ops.aten
ops = torch.ops.autopar


def layer_norm_backward(mask: list[bool], weight: bool = True) -> Callable[[], tuple[Any, ...]]:
    def arguments() -> tuple[Any, ...]:
        x, w, b, grad = F(4, 6, 8).tensor(), F(8).tensor(), F(8).tensor(), F(4, 6, 8).tensor()
        _, mean, rstd = aten.native_layer_norm.default(x, [8], w if weight else None, b if weight else None, 1e-5)
        return grad, x, [8], mean, rstd, w if weight else None, b if weight else None, mask

    return arguments


def group_norm_backward() -> tuple[Any, ...]:
    x, w = F(4, 8, 3, 2).tensor(), F(8).tensor()
    _, mean, rstd = aten.native_group_norm.default(x, w, w, 4, 8, 6, 4, 1e-5)
    return F(4, 8, 3, 2).tensor(), x, mean, rstd, w, 4, 8, 6, 4, [True, True, True]


def max_pool_backward() -> tuple[Any, ...]:
    x = F(4, 6, 4, 4).tensor()
    out, indices = aten.max_pool2d_with_indices.default(x, [2, 2], [2, 2])
    return torch.randn_like(out), x, [2, 2], [2, 2], [0, 0], [1, 1], False, indices


def batch_norm_backward() -> tuple[Any, ...]:
    x, w = F(4, 6, 3).tensor(), F(6).tensor()
    _, mean, invstd, _, _ = ops.batch_norm.default(x, w, w, None, None, 0.1, 1e-5)
    return F(4, 6, 3).tensor(), x, w, mean, invstd


def pool_backward(forward: str, *arguments: Any, dims: int) -> Callable[[], tuple[Any, ...]]:
    """Arguments of a pooling's gradient that needs the indices its forward run found."""

    def made() -> tuple[Any, ...]:
        x = F(4, 6, *[4] * dims).tensor()
        out, indices = getattr(aten, forward).default(x, *arguments[:1])
        return torch.randn_like(out), x, *arguments[1:], indices

    return made


CASES: tuple[Case, ...] = (
    # collectives of a model's own: dim 0 is the ranks
    Case("autopar.all_gather.default", (F(4, 6), "x=S0"), "n a -> _ a ~n | exchange n: all_gather"),
    Case("autopar.all_reduce.default", (F(4, 6), "x=S0", "sum"), "n a -> a ~n | exchange n: all_reduce sum"),
    Case("autopar.all_reduce.default", (F(4, 2, 3), "x=S0", "max"), "n a b -> a b ~n | exchange n: all_reduce max"),
    Case("autopar.all_reduce.default", (F(4, 6), "x=S0", "min"), "n a -> a ~n | exchange n: all_reduce min"),
    Case("autopar.reduce_scatter.default", (F(4, 4, 6), "x=S0"), "n _ a -> n a | exchange n: reduce_scatter sum"),
    Case("autopar.all_to_all.default", (F(4, 4, 6), "x=S0"), "n _ a -> n _ a | exchange n: all_to_all"),
    Case("autopar.on_axes.default", (F(4, 6), "x=S0"), "a b -> a b | linear {0}"),
    # view
    Case("aten.view.default", (F(4, 6, 8), [4, 6, 2, 4]), "a b (c d) -> a b c d | linear {0}"),
    Case("aten.view.default", (F(4, 6, 8), [24, 8]), "a b c -> (a b) c | linear {0}"),
    Case("aten.view.default", (F(4, 6), [8, 3]), "a (b c) -> (a b) c | linear {0}"),
    Case("aten.view.default", (F(6, 4), [4, 6]), "(a _) _ -> (a _) _ | linear {0}"),
    Case("aten.view.default", (F(6, 4, 2), [4, 6, 2]), "(a _) _ b -> (a _) _ b | linear {0}"),
    Case("aten.view.default", (F(1, 4, 1, 6), [4, 6, 1]), "1 a 1 b -> a b 1 | linear {0}"),
    Case("aten.view.default", (F(2, 2, 3, 2), [4, -1]), "a b c d -> (a b) (c d) | linear {0}"),
    Case("aten.view.default", (F(), [1, 1]), "() -> 1 1 | linear {0}"),
    Case("aten.view.dtype", (F(4, 6), torch.int64), "_ _ -> _ _"),
    Case("aten._unsafe_view.default", (F(8, 3), [2, 4, 3]), "(a b) c -> a b c | linear {0}"),
    Case("aten.reshape.default", (F(8, 3), [24]), "a b -> (a b) | linear {0}"),
    Case("aten.view_copy.default", (F(8, 3), [24]), "a b -> (a b) | linear {0}"),
    Case("autopar.shard.default", (F(4, 6), "S0 R"), "a b -> a b | linear {0}"),
    Case("aten.permute.default", (F(4, 6, 8), [2, 0, -2]), "a b c -> c a b | linear {0}"),
    Case("aten.transpose.int", (F(4, 6, 8), 1, -1), "a b c -> a c b | linear {0}"),
    Case("aten.t.default", (F(4, 6),), "a b -> b a | linear {0}"),
    Case("aten.t.default", (F(4),), "a -> a | linear {0}"),
    Case("aten.unsqueeze.default", (F(4, 6), 1), "a b -> a 1 b | linear {0}"),
    Case("aten.unsqueeze.default", (F(4, 6), -1), "a b -> a b 1 | linear {0}"),
    Case("aten.squeeze.dim", (F(4, 1, 6), 1), "a 1 c -> a c | linear {0}"),
    Case("aten.squeeze.dim", (F(4, 1, 6), 0), "(a _) 1 c -> (a _) 1 c | linear {0}"),
    Case("aten.squeeze.dim", (F(3, 6), 0), "_ b -> _ b | linear {0}"),
    Case("aten.squeeze.dims", (F(1, 4, 1, 6), [0, 2]), "1 b 1 d -> b d | linear {0}"),
    Case("aten.squeeze.default", (F(1, 4, 1, 6),), "1 (b _) 1 (d _) -> (b _) (d _) | linear {0}"),
    Case("aten.expand.default", (F(4, 1, 6), [2, 4, 8, -1]), "b 1 d -> a b c d | linear {0}"),
    Case("aten.repeat.default", (F(4, 1, 6), [2, 2, 4, 1]), "b 1 d -> a (B2 b) C4 d | linear {0}"),
    Case("aten.unfold.default", (F(4, 8), 1, 4, 2), "a _ -> a _ _ | linear {0}"),
    Case("aten.unfold.default", (F(), 0, 1, 1), "() -> 1 | linear {0}"),
    Case("aten.unfold_backward.default", (F(4, 3, 4), [4, 8], 1, 4, 2), "a _ _ -> a _ | linear {0}"),
    Case("aten.unfold_backward.default", (F(1), [], 0, 1, 1), "1 -> () | linear {0}"),
    Case("aten.unfold_backward.default", (F(1, 3, 4), [4, 8], 1, 4, 2), "1 _ _ -> a _ | linear {0}"),
    Case("aten.pixel_shuffle.default", (F(2, 16, 3, 4), 2), "a (c p! q!) h w -> a c (h p!) (w q!) | linear {0}"),
    Case("aten.pixel_shuffle.default", (F(4, 4, 4), 2), "(p! q!) h w -> 1 (h p!) (w q!) | linear {0}"),
    Case("aten.pixel_unshuffle.default", (F(2, 4, 6, 8), 2), "a c (h p!) (w q!) -> a (c p! q!) h w | linear {0}"),
    Case("aten.view_as_complex.default", (F(4, 6, 2),), "a b _ -> a b | linear {0}"),
    Case("aten.view_as_real.default", (C(4, 6),), "a b -> a b _ | linear {0}"),
    # slice
    Case("aten.slice.Tensor", (F(4, 6), 1, 1, 5), "a _ -> a _ | linear {0}"),
    Case("aten.slice.Tensor", (F(4, 6), 1, 0, 2**63 - 1), "a b -> a b | linear {0}"),
    Case("aten.slice.Tensor", (F(4, 6), 1, 0, 2**63 - 1, 2), "a _ -> a _ | linear {0}"),
    Case("aten.slice_backward.default", (F(4, 4), [4, 6], 1, 1, 5, 1), "a _ -> a _ | linear {0}"),
    Case("aten.select.int", (F(4, 6, 8), 1, -1), "a _ b -> a b | linear {0}"),
    Case("aten.select_backward.default", (F(4, 8), [4, 6, 8], 1, 2), "a b -> a _ b | linear {0}"),
    Case("aten.slice_scatter.default", (F(4, 6), F(4, 2), 1, 2, 4), "a _, a _ -> a _ | linear {0 1}"),
    Case("aten.select_scatter.default", (F(4, 6), F(6), 0, 1), "_ a, a -> _ a | linear {0 1}"),
    Case("aten.split.Tensor", (F(4, 6), 2, 1), "a _ -> a _, a _, a _ | linear {0}"),
    Case("aten.split_with_sizes.default", (F(4, 6), [1, 2, 3], 1), "a _ -> a 1, a _, a _ | linear {0}"),
    Case("aten.chunk.default", (F(4, 6), 3, -1), "a _ -> a _, a _, a _ | linear {0}"),
    Case("aten.unbind.int", (F(4, 3, 6), 1), "a _ b -> a b, a b, a b | linear {0}"),
    Case("aten.cat.default", ([F(4, 2), F(4, 3)], 1), "a _, a _ -> a _ | linear {0 1}"),
    Case("aten.stack.default", ([F(4, 6), F(4, 6)], -1), "a b, a b -> a b _ | linear {0 1}"),
    Case("aten.constant_pad_nd.default", (F(4, 6), [1, 2, 0, 0]), "a _ -> a _ | linear {0}"),
    Case("aten.constant_pad_nd.default", (F(4, 6), [1, 2, 0, 0], 1.0), "a _ -> a _"),
    Case("aten._fft_c2c.default", (C(4, 6), [1], 0, True), "a _ -> a _ | linear {0}"),
    Case("aten._fft_r2c.default", (F(4, 6, 8), [1, 2], 0, True), "a _ _ -> a _ _ | linear {0}"),
    Case("aten._fft_c2r.default", (C(4, 5), [1], 2, 8), "a _ -> a _ | linear {0}"),
    Case("aten.flip.default", (F(4, 6), [1]), "a d! -> a d! | linear {0}"),
    Case("aten.roll.default", (F(4, 6), [2], [1]), "a _ -> a _ | linear {0}"),
    Case("aten.roll.default", (F(4, 6), [2]), "_ _ -> _ _ | linear {0}"),
    Case("aten.rot90.default", (F(4, 6, 8), 1, [1, 2]), "a _ _ -> a _ _ | linear {0}"),
    Case("aten.glu.default", (F(4, 6), -1), "a _ -> a _"),
    Case("aten.glu_backward.default", (F(4, 3), F(4, 6), -1), "a _, a _ -> a _ | linear {0}"),
    Case("aten.tril.default", (F(4, 6, 6), 1), "a r c -> a r c | linear {0}"),
    Case("aten.tril.default", (F(6, 12),), "r c -> r c | linear {0}"),
    Case("aten.triu.default", (F(12, 6), -2), "r c -> r c | linear {0}"),
    Case("autopar.diagonal.default", (F(4, 6, 6), 6, 0, 0, 1, 2), "d0 k c -> d0 k +c | linear {0}"),
    Case("autopar.diagonal.default", (F(6, 12), 6, 0, 4, 0, 1), "k c -> k +c | linear {0}"),
    Case("autopar.diagonal.default", (F(6, 4, 12), 6, 0, 4, 0, 2), "k d1 c -> d1 k +c | linear {0}"),
    Case("autopar.diagonal.default", (F(12, 6), 4, 3, 2, 0, 1), "r c -> l! +r +c | linear {0}"),
    Case("autopar.diagonal.default", (F(12, 6), 4, 2, 1, 1, 0), "c r -> l! +c +r | linear {0}"),
    Case("autopar.diagonal.default", (B(6, 6), 6, 0, 0, 0, 1), "k c! -> k"),
    Case("autopar.along_diagonal.default", (F(4, 6), 6, 6, 0, 0, 1, 2), "d0 k -> d0 k c | linear {0}"),
    Case("autopar.along_diagonal.default", (F(4, 6), 12, 8, 3, 2, 2, 0), "d1 l! -> c d1 r | linear {0}"),
    Case("autopar.on_diagonal.default", (F(4, 6, 6), F(4, 6), 0, 0, 1, 2), "d0 k c, d0 k -> d0 k c | linear {0 1}"),
    Case("autopar.on_diagonal.default", (F(12, 8), F(6), 3, 2, 0, 1), "r c, l! -> r c | linear {0 1}"),
    Case("aten.triu.default", (F(4, 6, 6),), "a r c -> a r c | linear {0}"),
    # normalisation
    Case("aten.native_layer_norm.default", (F(4, 6, 8), [8], F(8), F(8), 1e-5), "a b d!, d!, d! -> a b d!, a b 1, a b 1"),
    Case("aten.native_layer_norm.default", (F(4, 6, 8), [6, 8], None, None, 1e-5), "a d0! d1! -> a d0! d1!, a 1 1, a 1 1"),
    Case(
        "aten.native_layer_norm_backward.default", layer_norm_backward([True, True, True]),
        "a b d!, a b d!, a b 1, a b 1, d!, d! -> a b d!, d! +a +b, d! +a +b | linear {0}",
    ),
    Case(
        "aten.native_layer_norm_backward.default", layer_norm_backward([True, False, True]),
        "a b d!, a b d!, a b 1, a b 1, d!, d! -> a b d!, d! +a +b | linear {0}",
    ),
    Case(
        "aten.native_layer_norm_backward.default", layer_norm_backward([True, False, False], weight=False),
        "a b d!, a b d!, a b 1, a b 1 -> a b d! | linear {0}",
    ),
    Case("aten._fused_rms_norm.default", (F(4, 6, 8), [8], F(8), 1e-5), "a b d!, d! -> a b d!, a b 1"),
    Case("aten._fused_rms_norm.default", (F(4, 6, 8), [8], None, None), "a b d! -> a b d!, a b 1"),
    Case("autopar.rms_norm.default", (F(4, 6, 8), [8], F(8), 1e-5), "a b d!, d! -> a b d!, a b 1"),
    Case("autopar.rms_norm.default", (F(4, 6, 8), [6, 8], None, 1e-5), "a d0! d1! -> a d0! d1!, a 1 1"),
    Case(
        "autopar.rms_norm_backward.default", (F(4, 6, 8), F(4, 6, 8), [8], P(4, 6, 1), F(8)),
        "a b d!, a b d!, a b 1, d! -> a b d!, d! +a +b | linear {0}",
    ),
    Case(
        "autopar.rms_norm_backward.default", (F(4, 6, 8), F(4, 6, 8), [8], P(4, 6, 1), None),
        "a b d!, a b d!, a b 1 -> a b d!, d! +a +b | linear {0}",
    ),
    Case(
        "aten.native_group_norm.default", (F(4, 8, 3, 2), F(8), F(8), 4, 8, 6, 4, 1e-5),
        "n (g c!) _ _, (g c!), (g c!) -> n (g c!) _ _, n g, n g",
    ),
    Case(
        "aten.native_group_norm_backward.default", group_norm_backward,
        "n (g c!) _ _, n (g c!) _ _, n g, n g, (g c!) -> n (g c!) _ _, (g c!) +n, (g c!) +n | linear {0}",
    ),
    Case(
        "autopar.batch_norm.default", (F(4, 6, 3), F(6), F(6), F(6), P(6), 0.1, 1e-5),
        "n c _, c, c, c, c -> n c _, c ~n, c ~n, c ~n, c ~n | inner n: sum(c) sum(c)",
    ),
    Case(
        "autopar.batch_norm.default", (F(4, 6), None, None, None, None, 0.1, 1e-5),
        "n c -> n c, c ~n, c ~n, c ~n, c ~n | inner n: sum(c) sum(c)",
    ),
    Case(
        "autopar.batch_norm_backward.default", batch_norm_backward,
        "n c _, n c _, c, c, c -> n c _, c ~n, c ~n | linear {0} | inner n: sum(2 c)",
    ),
    Case("aten._native_batch_norm_legit.no_stats", (F(4, 6, 3), F(6), F(6), True, 0.1, 1e-5), "n! c _, c, c -> n! c _, c, c"),
    Case(
        "aten._native_batch_norm_legit_no_training.default", (F(4, 6, 3), F(6), F(6), F(6), P(6), 0.1, 1e-5),
        "n c _, c, c, c, c -> n c _, _ ~n ~c, _ ~n ~c",
    ),
    Case(
        "aten._native_batch_norm_legit_functional.default", (F(4, 6, 3), F(6), F(6), F(6), P(6), True, 0.1, 1e-5),
        "n! c _, c, c, c, c -> n! c _, c, c, c, c",
    ),
    Case(
        "aten.native_batch_norm_backward.default",
        (F(4, 6, 3), F(4, 6, 3), F(6), F(6), P(6), F(6), P(6), True, 1e-5, [True, True, True]),
        "n! c _, n! c _, c, c, c, c, c -> n! c _, c, c | linear {0}",
    ),
    # softmax
    Case("aten._softmax.default", (F(4, 6, 8), 1, False), "a d b -> a d b | inner d: max(a b) sum(a b)"),
    Case("aten._log_softmax.default", (F(4, 6), -1, False), "a d -> a d | inner d: max(a) sum(a)"),
    Case("aten._softmax_backward_data.default", (F(4, 6), F(4, 6), -1, torch.float64), "a d, a d -> a d | linear {0} | inner d: sum(a)"),
    Case("aten._log_softmax_backward_data.default", (F(4, 6), F(4, 6), 1, torch.float64), "a d, a d -> a d | linear {0} | inner d: sum(a)"),
    # pooling
    Case("aten.avg_pool1d.default", (F(4, 6, 8), [2]), "a b _ -> a b _ | linear {0}"),
    Case("aten.avg_pool2d.default", (F(4, 6, 4, 4), [2, 2], [2, 2]), "a b _ _ -> a b _ _ | linear {0}"),
    Case("aten.avg_pool3d.default", (F(4, 6, 4, 4, 4), [2, 2, 2]), "a b _ _ _ -> a b _ _ _ | linear {0}"),
    Case("aten.adaptive_avg_pool1d.default", (F(4, 6, 4), [2]), "a b _ -> a b _ | linear {0}"),
    Case("aten.adaptive_avg_pool2d.default", (F(4, 6, 4, 4), [1, 1]), "a b _ _ -> a b 1 1 | linear {0}"),
    Case("aten.adaptive_avg_pool3d.default", (F(4, 6, 4, 4, 4), [1, 1, 1]), "a b _ _ _ -> a b 1 1 1 | linear {0}"),
    Case("aten._adaptive_avg_pool2d.default", (F(4, 6, 4, 4), [2, 2]), "a b _ _ -> a b _ _ | linear {0}"),
    Case("aten._adaptive_avg_pool3d.default", (F(4, 6, 4, 4, 4), [2, 2, 2]), "a b _ _ _ -> a b _ _ _ | linear {0}"),
    Case(
        "aten.avg_pool2d_backward.default", (F(4, 6, 2, 2), F(4, 6, 4, 4), [2, 2], [2, 2], [0, 0], False, True, None),
        "a b _ _, a b _ _ -> a b _ _ | linear {0}",
    ),
    Case("aten._adaptive_avg_pool2d_backward.default", (F(4, 6, 2, 2), F(4, 6, 4, 4)), "a b _ _, a b _ _ -> a b _ _ | linear {0}"),
    Case("aten.max_pool2d_with_indices.default", (F(4, 6, 4, 4), [2, 2], [2, 2]), "a b _ _ -> a b _ _, a b _ _"),
    Case("aten.max_pool2d_with_indices_backward.default", max_pool_backward, "a b _ _, a b _ _, a b _ _ -> a b _ _ | linear {0}"),
    Case(
        "aten._adaptive_avg_pool3d_backward.default", (F(4, 6, 2, 2, 2), F(4, 6, 4, 4, 4)),
        "a b _ _ _, a b _ _ _ -> a b _ _ _ | linear {0}",
    ),
    Case(
        "aten.avg_pool3d_backward.default",
        (F(4, 6, 2, 2, 2), F(4, 6, 4, 4, 4), [2, 2, 2], [2, 2, 2], [0, 0, 0], False, True, None),
        "a b _ _ _, a b _ _ _ -> a b _ _ _ | linear {0}",
    ),
    Case("aten.max_pool3d_with_indices.default", (F(4, 6, 4, 4, 4), [2, 2, 2]), "a b _ _ _ -> a b _ _ _, a b _ _ _"),
    Case(
        "aten.max_pool3d_with_indices_backward.default",
        pool_backward("max_pool3d_with_indices", [2, 2, 2], [2, 2, 2], [2, 2, 2], [0, 0, 0], [1, 1, 1], False, dims=3),
        "a b _ _ _, a b _ _ _, a b _ _ _ -> a b _ _ _ | linear {0}",
    ),
    Case("aten.adaptive_max_pool2d.default", (F(4, 6, 4, 4), [2, 2]), "a b _ _ -> a b _ _, a b _ _"),
    Case(
        "aten.adaptive_max_pool2d_backward.default", pool_backward("adaptive_max_pool2d", [2, 2], dims=2),
        "a b _ _, a b _ _, a b _ _ -> a b _ _ | linear {0}",
    ),
    *(
        Case(
            f"aten.{kind}_pad{dims}d.default",
            (F(4, 6, *[4] * dims), [1] * (2 * dims)),
            f"a b{' _' * dims} -> a b{' _' * dims} | linear {{0}}",
        )
        for kind in ("reflection", "replication")
        for dims in (1, 2, 3)
    ),
    *(
        Case(
            f"aten.{kind}_pad{dims}d_backward.default",
            (F(4, 6, *[6] * dims), F(4, 6, *[4] * dims), [1] * (2 * dims)),
            f"a b{' _' * dims}, a b{' _' * dims} -> a b{' _' * dims} | linear {{0}}",
        )
        for kind in ("reflection", "replication")
        for dims in (1, 2, 3)
    ),
    Case("aten.grid_sampler_2d.default", (F(4, 6, 4, 4), F(4, 2, 6, 2), 0, 0, False), "n c _ _, n h w _ -> n c h w | linear {0}"),
    Case(
        "aten.grid_sampler_2d_backward.default", (F(4, 6, 2, 6), F(4, 6, 4, 4), F(4, 2, 6, 2), 0, 0, False, [True, True]),
        "n c h w, n c _ _, n h w _ -> n c _ _ +h +w, n h w _ +c | linear {0}",
    ),
    Case(
        "aten.grid_sampler_2d_backward.default",
        (F(4, 6, 2, 6), F(4, 6, 4, 4), F(4, 2, 6, 2), 0, 0, False, [False, True]),
        "n c h w, n c _ _, n h w _ -> n h w _ +c | linear {0}",
    ),
    Case("aten.upsample_nearest1d.default", (F(4, 6, 4), [8]), "a b _ -> a b _ | linear {0}"),
    Case("aten.upsample_nearest2d.default", (F(4, 6, 4, 4), [8, 8]), "a b _ _ -> a b _ _ | linear {0}"),
    Case("aten.upsample_nearest3d.default", (F(4, 6, 2, 2, 2), [4, 4, 4]), "a b _ _ _ -> a b _ _ _ | linear {0}"),
    Case("aten._upsample_nearest_exact1d.default", (F(4, 6, 4), [8]), "a b _ -> a b _ | linear {0}"),
    Case("aten._upsample_nearest_exact2d.default", (F(4, 6, 4, 4), [8, 8]), "a b _ _ -> a b _ _ | linear {0}"),
    Case("aten._upsample_nearest_exact3d.default", (F(4, 6, 2, 2, 2), [4, 4, 4]), "a b _ _ _ -> a b _ _ _ | linear {0}"),
    Case("aten.upsample_bilinear2d.default", (F(4, 6, 4, 4), [8, 8], False), "a b _ _ -> a b _ _ | linear {0}"),
    Case("aten.upsample_bicubic2d.default", (F(4, 6, 4, 4), [8, 8], False), "a b _ _ -> a b _ _ | linear {0}"),
    Case("aten.upsample_nearest2d_backward.default", (F(4, 6, 8, 8), [8, 8], [4, 6, 4, 4]), "a b _ _ -> a b _ _ | linear {0}"),
    Case("aten._upsample_nearest_exact2d_backward.default", (F(4, 6, 8, 8), [8, 8], [4, 6, 4, 4]), "a b _ _ -> a b _ _ | linear {0}"),
    Case("aten.upsample_bilinear2d_backward.default", (F(4, 6, 8, 8), [8, 8], [4, 6, 4, 4], False), "a b _ _ -> a b _ _ | linear {0}"),
    Case("aten.upsample_bicubic2d_backward.default", (F(4, 6, 8, 8), [8, 8], [4, 6, 4, 4], False), "a b _ _ -> a b _ _ | linear {0}"),
    # gather
    Case("autopar.embedding.default", (F(12, 8), I(12, 4, 6), 0), "v k, a b -> a b k +v | linear {0}"),
    Case("autopar.embedding_backward.default", (F(4, 6, 8), I(12, 4, 6), 12, 0, -1), "a b k, a b -> v k +a +b | linear {0}"),
    Case("autopar.embedding_backward.default", (F(4, 6, 8), I(12, 4, 6), 12, 0, 5), "a b k, a b -> v k +a +b | linear {0}"),
    Case("aten.embedding.default", (F(12, 8), I(12, 4, 6)), "_ k, a b -> a b k | linear {0}"),
    Case("aten.embedding_dense_backward.default", (F(4, 6, 8), I(12, 4, 6), 12, -1, False), "a b k, a b -> _ k +a +b | linear {0}"),
    Case("aten.embedding_dense_backward.default", (F(4, 6, 8), I(12, 4, 6), 12, -1, True), "a! b! k, a! b! -> _ k | linear {0}"),
    Case("aten.gather.default", (F(4, 6), 1, I(6, 4, 2)), "a _, a c -> a c | linear {0}"),
    Case("aten.gather.default", (F(4, 6, 8), 1, I(6, 2, 4, 8)), "_ _ c, _ d c -> _ d c | linear {0}"),
    Case("aten.gather.default", (F(4), 0, I(4)), "_, () -> () | linear {0}"),
    Case("aten.gather.default", (F(), -1, I(1, 2)), "(), _ -> _ | linear {0}"),
    Case("aten.scatter.src", (F(4, 6), 1, I(6, 4, 1), F(4, 1)), "a _, a 1, a 1 -> a _ | linear {0 2}"),
    Case("aten.scatter.src", (F(4), 0, I(4), F(4)), "_, (), _ -> _ | linear {0 2}"),
    Case("aten.scatter.value", (F(4), 0, I(4), 1.5), "_, () -> _"),
    Case("aten.scatter.value", (F(4, 6), 1, I(6, 4, 2), 1.5), "a _, a c! -> a _"),
    Case("aten.scatter_add.default", (F(4, 6), 1, I(6, 4, 4), F(4, 4)), "a _ +c, a c, a c -> a _ +c | linear {0 2}"),
    Case("aten.scatter_add.default", (F(4, 6), 1, I(6, 4, 2), F(4, 4)), "_ _, _ _, _ _ -> _ _ | linear {0 2}"),
    Case("aten.scatter_add.default", (F(), 0, I(1, 1), F(4)), "(), 1, _ -> () | linear {0 2}"),
    Case("aten.scatter_reduce.two", (F(4, 6), 1, I(6, 4, 4), F(4, 4), "amax"), "a _, a c, a c -> a _ +c:max"),
    Case("aten.scatter_reduce.two", (F(4), 0, I(4), F(), "amax"), "_, (), () -> _"),
    Case("aten.scatter_reduce.two", (F(4, 6), -1, I(6, 4, 4), F(4, 4), "amin"), "a _, a c!, a c! -> a _", {"include_self": False}),
    Case("aten.scatter_reduce.two", (F(4, 6), 1, I(6, 4, 4), F(4, 4), "mean"), "a _, a c!, a c! -> a _"),
    Case("aten.scatter_reduce.two", (F(4, 6), 1, I(6, 4, 2), F(4, 4), "amax"), "_ _, _ _, _ _ -> _ _"),
    Case("aten.index_reduce.default", (F(4, 6), 1, I(6, 8), F(4, 8), "amin"), "a _, c, a c -> a _ +c:min"),
    Case("aten.index_reduce.default", (F(4, 6), 0, I(4, 8), F(8, 6), "amax"), "_ b, c!, c! b -> _ b", {"include_self": False}),
    Case("aten.index_reduce.default", (F(4, 6), -1, I(6, 8), F(4, 8), "prod"), "a _, c!, a c! -> a _"),
    Case("aten.index_select.default", (F(4, 6), 1, I(6, 8)), "a _, i -> a i | linear {0}"),
    Case("aten.index_add.default", (F(4, 6), 1, I(6, 8), F(4, 8)), "a _ +i, i, a i -> a _ +i | linear {0 2}"),
    Case("aten.index_copy.default", (F(4, 6), 0, I(1, 1), F(1, 6)), "_ a, 1, 1 a -> _ a"),
    Case("aten.index_copy_.default", (F(4, 6), 0, I(1, 1), F(1, 6)), "_ a, 1, 1 a -> _ a"),
    Case("aten.index_put_.default", (F(4, 6, 8), [None, I(1, 1)], F(4, 1, 8), False), "a _ c, 1, a 1 c -> a _ c | linear {0 2}"),
    Case("aten.index_put_.default", (F(4, 6, 8), [None, B(6, 8)], F()), "a b c, b c, () -> a b c | linear {0 2}"),
    Case("aten.index_fill.int_Scalar", (F(4, 6), 0, I(4, 2), 1.5), "_ a, _ -> _ a"),
    Case("aten.index.Tensor", (F(4, 6, 8), [None, I(6, 4)]), "a _ c, d -> a d c | linear {0}"),
    Case("aten.index.Tensor", (F(4, 6, 8), [I(4, 2, 1), I(6, 4)]), "_ _ c, d 1, e -> d e c | linear {0}"),
    Case("aten.index.Tensor", (F(4, 6, 8), [I(4, 4), None, I(8, 4)]), "_ b _, d, d -> d b | linear {0}"),
    Case("aten._unsafe_index.Tensor", (F(2, 4, 6, 8), [None, None, I(6, 4, 1), I(8, 4)]), "a b _ _, e 1, f -> a b e f | linear {0}"),
    Case("aten.index_put.default", (F(4, 6, 8), [I(4, 8)], F(8, 6, 8), True), "_ b c +d, d, d b c -> _ b c +d | linear {0 2}"),
    Case("aten.index_put.default", (F(4, 6, 8), [None, I(1, 1)], F(4, 1, 8), False), "a _ c, 1, a 1 c -> a _ c | linear {0 2}"),
    Case(
        "aten._unsafe_index_put.default", (F(2, 4, 6, 8), [None, None, I(6, 4, 1), I(8, 4)], F(2, 4, 4, 4), True),
        "a b _ _ +e +f, e 1, f, a b e f -> a b _ _ +e +f | linear {0 3}",
    ),
    Case("aten.index.Tensor", (F(4, 6), [B(4)]), "_ _, _ -> _ _"),
    Case("aten.index_put.default", (F(4, 6, 8), [None, B(6, 8)], F()), "a b c, b c, () -> a b c | linear {0 2}"),
    Case("aten.index_put.default", (F(4, 6), [B(4, 6)], F(1), True), "a b, a b, 1 -> a b | linear {0 2}"),
    Case("aten.one_hot.default", (I(6, 4, 8), 6), "a b -> a b _"),
    # cross-entropy
    Case("autopar.nll_loss.default", (F(4, 6), I(6, 4), -100, 0), "a c, a -> a +c | linear {0}"),
    Case("autopar.nll_loss.default", (F(4, 6), I(6, 4), 2, 0), "a c, a -> a +c | linear {0}"),
    Case("autopar.nll_loss_backward.default", (F(4), I(6, 4), 6, 2, 0), "a, a -> a c | linear {0}"),
    Case("aten.nll_loss_forward.default", (F(4, 6), I(6, 4), None, 1, -100), "n! c!, n! -> (), ()"),
    Case("aten.nll_loss_forward.default", (F(4, 6), I(6, 4), F(6), 0, -100), "n c!, n, c! -> n, () +n"),
    # factory
    Case("aten.full.default", ([4, 6], 0.0), "-> a b | linear {}", {"dtype": torch.float64}),
    Case("aten.full.default", ([4, 6], 2.0), "-> a b"),
    Case("aten.zeros.default", ([4, 6],), "-> a b | linear {}"),
    Case("aten.ones.default", ([4, 6],), "-> a b"),
    Case("aten.empty.memory_format", ([4, 6],), "-> a b", random=True),
    Case("aten.new_zeros.default", (F(4, 6), [8]), "b c -> a ~b ~c | linear {}"),
    Case("aten.new_empty.default", (F(4, 6), [8]), "b c -> a ~b ~c", random=True),
    Case("aten.new_ones.default", (F(4, 6), [8]), "b c -> a ~b ~c"),
    Case("aten.new_full.default", (F(4, 6), [8], 2.0), "b c -> a ~b ~c"),
    Case("aten.zeros_like.default", (F(4, 6),), "a b -> a b | linear {} {0}"),
    Case("aten.ones_like.default", (F(4, 6),), "a b -> a b"),
    Case("aten.full_like.default", (F(4, 6), 3.0), "a b -> a b"),
    Case("aten.fill.Scalar", (F(4, 6), 3.0), "a b -> a b"),
    Case("aten.arange.start_step", (0, 8, 1), "-> _"),
    Case("aten.arange.default", (8,), "-> _"),
    Case("aten.linspace.default", (0, 1, 8), "-> _"),
    Case("aten.logspace.default", (0, 1, 8), "-> _"),
    *(Case(f"aten.{name}_window.default", (8,), "-> _") for name in ("bartlett", "blackman", "hamming", "hann", "kaiser")),
    Case("aten.eye.default", (4,), "-> _ _"),
    Case("aten.tril_indices.default", (4, 4), "-> _ _"),
    Case("aten.triu_indices.default", (4, 4), "-> _ _"),
    Case("aten.scalar_tensor.default", (2.0,), "-> ()"),
    Case("aten.empty_like.default", (F(4, 6),), "a b -> a b", random=True),
    # scan, sort
    Case("aten.cumsum.default", (F(4, 6), 1), "a d! -> a d! | linear {0}"),
    Case("aten.cumsum.default", (F(4, 6), 1), "a d! -> a d!", {"dtype": torch.int64}),
    Case("aten.cumprod.default", (F(4, 6), 1), "a d! -> a d!"),
    Case("aten.logcumsumexp.default", (F(4, 6), 1), "a d! -> a d!"),
    Case("aten.cummax.default", (F(4, 6), 1), "a d! -> a d!, a d!"),
    Case("aten.cummin.default", (F(4, 6), 1), "a d! -> a d!, a d!"),
    Case("aten.sort.default", (F(4, 6), 1), "a d! -> a d!, a d!"),
    Case("aten.sort.stable", (F(4, 6),), "a d! -> a d!, a d!", {"stable": True, "dim": 1}),
    Case("aten.argsort.default", (F(4, 6), 1), "a d! -> a d!"),
    Case("aten.topk.default", (F(4, 6), 2, 1), "a _ -> a _, a _"),
)
