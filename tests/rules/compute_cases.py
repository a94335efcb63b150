"""Cases of what computes: elementwise, contraction, convolution, attention, reduction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import autopar.dialect  # noqa: F401  registers the operators of ours
from tests.rules.drawing import F32, B, C, Case, Draw, F, I, P

ops = torch.ops.autopar


def attention_backward(heads: int, key_heads: int, mask: Draw | None, causal: bool, rows: int = 6) -> Callable[[], tuple[Any, ...]]:
    def arguments() -> tuple[Any, ...]:
        q, k, v = F(2, heads, rows, 4).tensor(), F(2, key_heads, rows, 4).tensor(), F(2, key_heads, rows, 4).tensor()
        drawn_mask = None if mask is None else mask.tensor()
        out, lse = ops.attention.default(q, k, v, drawn_mask, causal, 0.5, 0.0, 0)
        return F(2, heads, rows, 4).tensor(), q, k, v, out, lse, drawn_mask, causal, 0.5, 0.0, 0

    return arguments


def dropout_backward() -> tuple[Any, ...]:
    return F(4, 6).tensor(), B(4, 6).tensor(), 2.0


CONV = ([1, 1], [1, 1], [1, 1])

def ctc() -> tuple[Any, ...]:
    """Log probabilities of eight steps, four sequences of at most three targets."""
    logp = torch.log_softmax(F(8, 4, 6).tensor(), -1)
    return logp, torch.randint(1, 6, (4, 3)), torch.tensor([8, 7, 8, 6]), torch.tensor([3, 3, 1, 2]), 0, False


CELLS = ("lstm", 4, 2, "n!"), ("gru", 3, 1, "1"), ("tanh", 1, 1, "1"), ("relu", 1, 1, "1")
"""Recurrent cells: gates, states, and these in a rule."""


def recurrence(cell: str, gates: int, states: int) -> tuple[Any, ...]:
    """Five steps of four sequences, two units."""
    return F(5, 4, 2 * gates).tensor(), F(states, 4, 2).tensor(), F(2 * gates, 2).tensor(), F(2 * gates).tensor(), cell


def recurrence_backward(cell: str, gates: int, states: int) -> tuple[Any, ...]:
    first, *rest = recurrence(cell, gates, states)
    return F(states, 5, 4, 2).tensor(), first, ops.recurrence.default(first, *rest), *rest


def cdist_backward(batch: int, *points: int) -> Callable[[], tuple[Any, ...]]:
    """Of 4 points, the same for all of a batch or not, to 6 others."""
    return lambda: (F(batch, 4, 6).tensor(), F(*points, 4, 3).tensor(), F(batch, 6, 3).tensor(), 2.0, P(batch, 4, 6).tensor())


def grouped(rows: int, inner: int, outer: int) -> Callable[[], tuple[Any, ...]]:
    """Rows of four experts, one of them without any."""
    return lambda: (F(rows, inner).tensor(), F(4, inner, outer).tensor(), torch.tensor([3, 3, 5, rows]), 0, 0)


IDS = ((0, 0), (1, 1), (2, 2), (3, 3))
"""The experts of eight rows, which lie by expert."""


def experts(a: F, b: F, equation: str) -> Callable[[], tuple[Any, ...]]:
    """Rows by expert, two of each."""
    return lambda: (a.tensor(), b.tensor(), torch.tensor(IDS), equation, 4, 0)


def grouped_outer(rows: int, inner: int, outer: int) -> Callable[[], tuple[Any, ...]]:
    return lambda: (F(rows, inner).tensor(), F(rows, outer).tensor(), torch.tensor([3, 3, 5, rows]), 4, 0, 0)


def definite(*names: str) -> Any:
    """Symmetric positive definite matrices, or what the operators named make of them: the first's results and then the last's."""

    def made() -> tuple[Any, ...]:
        x = torch.randn(4, 6, 6, dtype=torch.float64)
        x = x @ x.mT + torch.eye(6, dtype=torch.float64)
        for name in names:
            x = getattr(torch.ops.aten, name).default(x)
        return x if isinstance(x, tuple) else (x,)

    return made


LINEAR_ALGEBRA: tuple[Case, ...] = (
    Case("aten.linalg_matrix_exp.default", (F(4, 6, 6),), "a _ _ -> a _ _"),
    Case("aten.cholesky.default", definite(), "a _ _ -> a _ _"),
    Case("aten.cholesky_inverse.default", definite("linalg_cholesky"), "a _ _ -> a _ _"),
    *(Case(f"aten.{name}.default", definite(), "a _ _ -> a _ _, a") for name in ("linalg_inv_ex", "linalg_cholesky_ex")),
    *(Case(f"aten.{name}.default", definite(), "a _ _ -> a _ _, a _, a") for name in ("linalg_lu_factor_ex", "linalg_ldl_factor_ex")),
    Case("aten.linalg_lu.default", (F(2, 4, 6, 5),), "a b _ _ -> a b _ _, a b _ _, a b _ _"),
    Case("aten._linalg_det.default", (F(4, 6, 6),), "a _ _ -> a, a _ _, a _"),
    Case("aten._linalg_slogdet.default", (F(4, 6, 6),), "a _ _ -> a, a, a _ _, a _"),
    Case("aten._linalg_eigh.default", definite(), "a _ _ -> a _, a _ _"),
    Case("aten._linalg_eigh.default", lambda: (*definite()(), "L", False), "a _ _ -> a _, _ ~a"),
    Case("aten.linalg_eig.default", (F(4, 6, 6),), "a _ _ -> a _, a _ _"),
    Case("aten.linalg_eigvals.default", (F(4, 6, 6),), "a _ _ -> a _"),
    Case("aten._linalg_svd.default", (F(4, 6, 5), False, True), "a _ _ -> a _ _, a _, a _ _"),
    Case("aten._linalg_svd.default", (F(4, 6, 5), False, False), "a _ _ -> _ ~a, a _, _ ~a"),
    Case("aten.linalg_qr.default", (F(4, 6, 5),), "a _ _ -> a _ _, a _ _"),
    Case("aten.linalg_qr.default", (F(4, 6, 5), "r"), "a _ _ -> _ ~a, a _ _"),
    Case("aten.linalg_pinv.atol_rtol_tensor", (F(4, 6, 5),), "a _ _, () -> a _ _", {"rtol": P()}),
    Case("aten.linalg_pinv.atol_rtol_tensor", (F(4, 6, 5),), "a _ _, a -> a _ _", {"rtol": P(4)}),
    Case("aten._linalg_solve_ex.default", (F(4, 6, 6), F(4, 6, 3)), "a _ _, a _ _ -> a _ _, a _ _, a _, a"),
    Case("aten._linalg_solve_ex.default", (F(6, 6, 6), F(6, 6)), "a _ _, a _ -> a _, a _ _, a _, a"),
    Case("aten._linalg_solve_ex.default", (F(6, 6), F(6)), "_ _, _ -> _, _ _, _, ()"),
    Case("aten.linalg_solve_triangular.default", (F(4, 6, 6), F(4, 6, 3)), "a _ _, a _ _ -> a _ _", {"upper": True}),
    Case("aten.cholesky_solve.default", lambda: (F(4, 6, 3), *definite("linalg_cholesky")()), "a _ _, a _ _ -> a _ _"),
    Case("aten.linalg_lu_solve.default", lambda: (*definite("linalg_lu_factor_ex")()[:2], F(4, 6, 3)), "a _ _, a _, a _ _ -> a _ _"),
    Case("aten.lu_unpack.default", lambda: definite("linalg_lu_factor_ex")()[:2], "a _ _, a _ -> a _ _, a _ _, a _ _"),
    Case("aten.linalg_cross.default", (F(4, 3, 6), F(4, 3, 6)), "a _ b, a _ b -> a _ b | linear {0} {1}", {"dim": 1}),
)

CASES: tuple[Case, ...] = (
    # pointwise
    Case("aten.add.Tensor", (F(4, 6), F(4, 6)), "a b, a b -> a b | linear {0 1}"),
    Case("aten.add.Tensor", (F(4, 6, 8), F(6, 1)), "a b c, b 1 -> a b c | linear {0 1}"),
    Case("aten.add.Tensor", (F(4, 6), 2.0), "a b -> a b"),
    Case("aten.add.Tensor", (F(4, 6), F()), "a b, () -> a b | linear {0 1}"),
    Case("aten.add.Scalar", (F(4, 6), 2.0), "a b -> a b"),
    Case("aten.sub.Tensor", (F(4, 6), F(6)), "a b, b -> a b | linear {0 1}"),
    Case("aten.rsub.Scalar", (F(4, 6), 2.0), "a b -> a b"),
    Case("aten.mul.Tensor", (F(4, 6), F(4, 1)), "a b, a 1 -> a b | linear {0} {1}"),
    Case("aten.mul.Tensor", (F(4, 6), 2.0), "a b -> a b | linear {0}"),
    Case("aten.mul.Scalar", (F(4, 6), 2.0), "a b -> a b | linear {0}"),
    Case("aten.div.Tensor", (F(4, 6), P(6)), "a b, b -> a b | linear {0}"),
    Case("aten.div.Tensor", (F(4, 6), 2.0), "a b -> a b | linear {0}"),
    Case("aten.div.Tensor_mode", (F(4, 6), 2.0), "a b -> a b", {"rounding_mode": "floor"}),
    Case("aten.div.Tensor_mode", (F(4, 6), 2.0), "a b -> a b | linear {0}", {"rounding_mode": None}),
    Case("aten.div.Scalar_mode", (F(4, 6), 2.0), "a b -> a b", {"rounding_mode": "floor"}),
    Case("aten.addcmul.default", (F(4, 6), F(4, 6), F(6)), "a b, a b, b -> a b | linear {0 1} {0 2}", {"value": 0.5}),
    Case("aten.addcdiv.default", (F(4, 6), F(4, 6), P(6)), "a b, a b, b -> a b | linear {0 1}", {"value": 0.5}),
    Case("aten.lerp.Scalar", (F(4, 6), F(4, 6), 0.3), "a b, a b -> a b | linear {0 1}"),
    Case("aten.lerp.Tensor", (F(4, 6), F(4, 6), F(4, 6)), "a b, a b, a b -> a b | linear {0 1}"),
    Case("aten.where.self", (B(4, 6), F(4, 6), F()), "a b, a b, () -> a b | linear {1 2}"),
    Case("aten.where.ScalarOther", (B(4, 6), F(4, 6), 1.0), "a b, a b -> a b"),
    Case("aten.where.ScalarSelf", (B(4, 6), 1.0, F(4, 6)), "a b, a b -> a b"),
    Case("aten.where.Scalar", (B(4, 6), 1.0, 0.0), "a b -> a b"),
    Case("aten.masked_fill.Scalar", (F(4, 6), B(4, 1), 0), "a b, a 1 -> a b | linear {0}"),
    Case("aten.masked_fill.Scalar", (F(4, 6), B(4, 6), 1.5), "a b, a b -> a b"),
    Case("aten.masked_fill.Tensor", (F(4, 6), B(4, 6), F()), "a b, a b, () -> a b | linear {0 2}"),
    Case("aten.pow.Tensor_Scalar", (F(4, 6), 2), "a b -> a b"),
    Case("aten.maximum.default", (F(4, 6), F(6)), "a b, b -> a b"),
    Case("aten.eq.Tensor", (I(2, 4, 6), I(2, 6)), "a b, b -> a b"),
    Case("aten.bitwise_and.Tensor", (B(4, 6), B(4, 6)), "a b, a b -> a b"),
    Case("aten.clamp.default", (F(4, 6), -0.5, 0.5), "a b -> a b"),
    *(Case(f"aten.{name}.default", (P(4, 6),), "a b -> a b | linear {0}") for name in ("neg", "clone", "detach", "alias")),
    *(Case(f"aten.{name}.default", (P(4, 6),), "a b -> a b") for name in ("exp", "silu")),
    Case("aten.threshold_backward.default", (F(4, 6), F(4, 6), 0), "a b, a b -> a b | linear {0}"),
    *(
        Case(f"aten.{name}.default", (F(4, 6), F(4, 6)), "a b, a b -> a b | linear {0}")
        for name in ("gelu_backward", "silu_backward", "tanh_backward", "sigmoid_backward")
    ),
    Case("aten.mse_loss.default", (F(4, 6), F(4, 6), 0), "a b, a b -> a b"),
    *(Case(f"aten.{name}_loss.default", (F(4, 6), F(4, 6), 0, 0.5), "a b, a b -> a b") for name in ("smooth_l1", "huber")),
    Case("aten.mse_loss_backward.default", (F(4, 6), F(4, 6), F(4, 6), 0), "a b, a b, a b -> a b | linear {0}"),
    *(
        Case(f"aten.{name}_loss_backward.default", (F(4, 6), F(4, 6), F(4, 6), 0, 0.5), "a b, a b, a b -> a b | linear {0}")
        for name in ("smooth_l1", "huber")
    ),
    Case("aten.leaky_relu_backward.default", (F(4, 6), F(4, 6), 0.1, False), "a b, a b -> a b | linear {0}"),
    Case("aten.hardtanh_backward.default", (F(4, 6), F(4, 6), -1.0, 1.0), "a b, a b -> a b | linear {0}"),
    Case("aten.softplus_backward.default", (F(4, 6), F(4, 6), 1.0, 20.0), "a b, a b -> a b | linear {0}"),
    Case("aten.native_dropout_backward.default", dropout_backward, "a b, a b -> a b | linear {0}"),
    Case("aten._to_copy.default", (F(4, 6),), "a b -> a b", {"dtype": torch.float32}),
    Case("aten._to_copy.default", (F32(4, 6),), "a b -> a b | linear {0}", {"dtype": torch.float64}),
    Case("aten._to_copy.default", (I(9, 4, 6),), "a b -> a b", {"dtype": torch.float64}),
    Case("aten._to_copy.default", (F(4, 6),), "a b -> a b | linear {0}", {"dtype": torch.float64}),
    *LINEAR_ALGEBRA,
    Case("aten._cdist_forward.default", (F(2, 4, 3), F(2, 6, 3), 2.0, None), "a m _, a n _ -> a m n"),
    Case("aten._cdist_backward.default", cdist_backward(2, 2), "a m n, a m _, a n _, a m n -> a m _ +n | linear {0}"),
    Case("aten._cdist_backward.default", cdist_backward(6), "a m n, m _, a n _, a m n -> a m _ +n | linear {0}"),
    Case("autopar.expert_contract.default", experts(F(4, 2, 4), F(4, 4, 6), "e j k, e k n, e j -> e j n"),
         "e j k, e k n, e j -> e j n +k | linear {0} {1}"),
    Case("autopar.expert_contract.default", experts(F(4, 2, 4), F(4, 2, 6, 4), "e j k, e g n k, e j -> e j g n"),
         "e j k, e g n k, e j -> e j g n +k | linear {0} {1}"),
    Case("autopar.expert_contract.default", experts(F(4, 2, 2, 6), F(4, 2, 6, 4), "e j g n, e g n k, e j -> e j k"),
         "e j g n, e g n k, e j -> e j k +g +n | linear {0} {1}"),
    Case("autopar.expert_contract.default", experts(F(4, 2, 4), F(4, 2, 2, 6), "e j k, e j g n, e j -> e g n k"),
         "e j k, e j g n, e j -> e g n k +j | linear {0} {1}"),
    Case("autopar.grouped_mm.default", grouped(8, 4, 6), "s k, e k n, _ -> s n +k +e | linear {0} {1}"),
    Case("autopar.grouped_outer.default", grouped_outer(8, 4, 6), "s k, s n, _ -> e k n +s | linear {0} {1}"),
    Case("aten.histc.default", (F(4, 6), 8, -2, 2), "a b -> _ +a +b"),
    Case("aten.histc.default", (F(4, 6), 8), "a! b! -> _"),
    Case("aten.bucketize.Tensor", (F(4, 6), F(1)), "a b, 1 -> a b"),
    Case("autopar.dropout.default", (F(4, 6), 0.5, 3), "a b -> a b, a b", random=True),
    Case("autopar.uniform.default", (F(4, 6), 3), "a b -> a b", random=True),
    Case("autopar.normal.default", (F(4, 6), 3), "a b -> a b", random=True),
    Case("aten.polar.default", (P(4, 6), F(4, 6)), "a b, a b -> a b"),
    Case("aten._conj.default", (C(4, 6),), "a b -> a b | linear {0}"),
    Case("aten._neg_view.default", (F(4, 6),), "a b -> a b | linear {0}"),
    Case("aten.zero.default", (F(4, 6),), "a b -> a b | linear {} {0}"),
    Case("aten.norm.ScalarOpt_dim", (F(4, 6), 2, [1]), "a d -> a ~d | inner d: sum(a)"),
    Case("aten.unsafe_split.Tensor", (F(4, 6), 2, 1), "a _ -> a _, a _, a _ | linear {0}"),
    Case("aten.unsafe_split_with_sizes.default", (F(4, 6), [2, 4], 1), "a _ -> a _, a _ | linear {0}"),
    Case("aten._weight_norm_interface.default", (F(4, 6), F(4, 1), 0), "a _, a 1 -> a _, a 1"),
    Case("aten._weight_norm_interface.default", (F(4, 6), F(1, 6), 1), "_ a, 1 a -> _ a, 1 a"),
    Case(
        "aten._weight_norm_interface_backward.default",
        (F(4, 6), F(4, 6), P(4, 1), P(4, 1), 0),
        "a _, a _, a 1, a 1 -> a _, a 1 | linear {0}",
    ),
    Case("autopar.contract.default", (F(4, 6), F(4, 6), "b s, b s -> ()"), "b s, b s -> () +b +s | linear {0} {1}"),
    Case("autopar.contract.default", (F(), F(4, 6), "(), b s -> b s"), "(), b s -> b s | linear {0} {1}"),
    Case("aten.copy.default", (F(4, 6), F(6)), "a b, b -> a b | linear {1}"),
    Case("aten.copy.default", (F(4, 6), F32(6)), "a b, b -> a b | linear {1}"),
    Case("aten.copy.default", (F32(4, 6), F(6)), "a b, b -> a b"),
    Case("aten.copy.default", (I(9, 4, 6), F(6)), "a b, b -> a b"),
    Case("aten._prelu_kernel_backward.default", (F(4, 6), F(4, 6), F(4, 6)), "a b, a b, a b -> a b, a b | linear {0}"),
    Case("aten.rrelu_with_noise_backward.default", (F(4, 6), F(4, 6), P(4, 6), 0.1, 0.3, True, False), "a b, a b, a b -> a b | linear {0}"),
    # contraction
    Case("autopar.contract.default", (F(2, 6, 4), F(8, 4), "b s k, n k -> b s n"), "b s k, n k -> b s n +k | linear {0} {1}"),
    Case("autopar.contract.default", (F(2, 4, 6), F(2, 4, 8), "b s k, b s n -> n k"), "b s k, b s n -> n k +b +s | linear {0} {1}"),
    Case("aten.mm.default", (F(4, 6), F(6, 8)), "m k, k n -> m n +k | linear {0} {1}"),
    Case("aten.bmm.default", (F(2, 4, 6), F(2, 6, 8)), "b m k, b k n -> b m n +k | linear {0} {1}"),
    Case("aten.mv.default", (F(4, 6), F(6)), "m k, k -> m +k | linear {0} {1}"),
    Case("aten.dot.default", (F(8), F(8)), "k, k -> () +k | linear {0} {1}"),
    Case("aten.addmm.default", (F(8), F(4, 6), F(6, 8)), "n +k, m k, k n -> m n +k | linear {0 1} {0 2}"),
    Case("aten.addmm.default", (F(4, 8), F(4, 6), F(6, 8)), "m n +k, m k, k n -> m n +k | linear {0 1} {0 2}"),
    Case("aten.addmm.default", (F(), F(4, 6), F(6, 8)), "() +k, m k, k n -> m n +k | linear {0 1} {0 2}"),
    Case("aten.baddbmm.default", (F(2, 1, 8), F(2, 4, 6), F(2, 6, 8)), "b 1 n +k, b m k, b k n -> b m n +k | linear {0 1} {0 2}"),
    # convolution
    Case("autopar.convolution.default", (F(4, 6, 5, 5), F(8, 6, 3, 3), *CONV, 1), "n i _ _, o i _ _ -> n o _ _ +i | linear {0} {1}"),
    Case(
        "autopar.convolution.default", (F(2, 8, 5, 5), F(8, 2, 3, 3), *CONV, 4),
        "n (g i) _ _, (g o) i _ _ -> n (g o) _ _ +i | linear {0} {1}",
    ),
    Case("autopar.convolution.default", (F(2, 4, 5, 5), F(8, 1, 3, 3), *CONV, 4), "n g _ _, (g o) 1 _ _ -> n (g o) _ _ | linear {0} {1}"),
    Case("autopar.convolution.default", (F(2, 4, 9), F(6, 4, 3), [2], [1], [1], 1), "n i _, o i _ -> n o _ +i | linear {0} {1}"),
    Case(
        "autopar.convolution_input_gradient.default", (F(4, 8, 5, 5), F(8, 6, 3, 3), [4, 6, 5, 5], *CONV, 1),
        "n o _ _, o i _ _ -> n i _ _ +o | linear {0} {1}",
    ),
    Case(
        "autopar.convolution_input_gradient.default", (F(2, 8, 5, 5), F(8, 2, 3, 3), [2, 8, 5, 5], *CONV, 4),
        "n (g o) _ _, (g o) i _ _ -> n (g i) _ _ +o | linear {0} {1}",
    ),
    Case(
        "autopar.convolution_weight_gradient.default", (F(4, 8, 5, 5), F(4, 6, 5, 5), [8, 6, 3, 3], *CONV, 1),
        "n o _ _, n i _ _ -> o i _ _ +n | linear {0} {1}",
    ),
    Case(
        "autopar.convolution_weight_gradient.default", (F(2, 8, 5, 5), F(2, 8, 5, 5), [8, 2, 3, 3], *CONV, 4),
        "n (g o) _ _, n (g i) _ _ -> (g o) i _ _ +n | linear {0} {1}",
    ),
    Case(
        "aten.convolution.default", (F(4, 6, 5, 5), F(8, 6, 3, 3), None, *CONV, False, [0, 0], 1),
        "n i _ _, o i _ _ -> n o _ _ +i | linear {0} {1}",
    ),
    Case(
        "aten.convolution.default", (F(2, 8, 5, 5), F(8, 4, 3, 3), F(8), *CONV, False, [0, 0], 2),
        "n (g i) _ _, (g o) i _ _, (g o) +i -> n (g o) _ _ +i | linear {0 2} {1 2}",
    ),
    Case(
        "aten.convolution.default", (F(2, 8, 5, 5), F(8, 4, 3, 3), F(8), *CONV, True, [0, 0], 2),
        "n (g i) _ _, (g i) o _ _, (g o) +i -> n (g o) _ _ +i | linear {0 2} {1 2}",
    ),
    Case(
        "aten.convolution_backward.default",
        (F(4, 8, 5, 5), F(4, 6, 5, 5), F(8, 6, 3, 3), [8], *CONV, False, [0, 0], 1, [True, True, True]),
        "n o _ _, n i _ _, o i _ _ -> n i _ _ +o, o i _ _ +n, o +n ~i | linear {0}",
    ),
    Case(
        "aten.convolution_backward.default",
        (F(2, 8, 5, 5), F(2, 8, 5, 5), F(8, 4, 3, 3), None, *CONV, True, [0, 0], 2, [True, True, False]),
        "n (g o) _ _, n (g i) _ _, (g i) o _ _ -> n (g i) _ _ +o, (g i) o _ _ +n | linear {0}",
    ),
    Case("aten.im2col.default", (F(4, 6, 4, 4), [2, 2], [1, 1], [0, 0], [2, 2]), "n c _ _ -> n (c _) _ | linear {0}"),
    Case("aten.col2im.default", (F(4, 24, 4), [4, 4], [2, 2], [1, 1], [0, 0], [2, 2]), "n (c _) _ -> n c _ _ | linear {0}"),
    Case("aten.col2im.default", (F(4, 24, 9), [4, 4], [2, 2], [1, 1], [0, 0], [1, 1]), "n (c _) _ -> n c _ _ | linear {0}"),
    # attention
    Case(
        "autopar.attention.default", (F(2, 4, 6, 4), F(2, 4, 6, 4), F(2, 4, 6, 4), None, False, 0.5, 0.0, 0),
        "b h s d!, b h t! d!, b h t! e! -> b h s e!, b h s | ring s t: {1 2}",
    ),
    Case(
        "autopar.attention.default", (F(2, 8, 8, 4), F(2, 2, 8, 4), F(2, 2, 8, 4), None, True, 0.5, 0.0, 0),
        "b (h g) s d!, b h t! d!, b h t! e! -> b (h g) s e!, b (h g) s | triangle s | mirror s: {0} {3} {4} | ring s t: {1 2}",
    ),
    Case(
        "autopar.attention.default", (F(2, 8, 6, 4), F(2, 4, 6, 4), F(2, 4, 6, 4), F(2, 1, 6, 6), False, 0.5, 0.0, 0),
        "b (h g) s d!, b h t! d!, b h t! e!, b 1 s t! -> b (h g) s e!, b (h g) s",
    ),
    Case(
        "autopar.attention.default", (F(2, 4, 6, 4), F(2, 4, 6, 4), F(2, 4, 6, 4), F(6, 6), False, 0.5, 0.0, 0),
        "b h s d!, b h t! d!, b h t! e!, s t! -> b h s e!, b h s",
    ),
    Case(
        "autopar.attention.default", (F(2, 4, 6, 4), F(2, 4, 6, 4), F(2, 4, 6, 4), F(4, 1, 6), False, 0.5, 0.0, 0),
        "b h s d!, b h t! d!, b h t! e!, h 1 t! -> b h s e!, b h s",
    ),
    Case(
        "autopar.attention.default", (F(2, 4, 6, 4), F(2, 4, 6, 4), F(2, 4, 6, 4), F(6, 6), True, 0.5, 0.0, 0),
        "b h s d!, b h t! d!, b h t! e!, s t! -> b h s e!, b h s | triangle s",
    ),
    Case(
        "autopar.attention_backward.default", attention_backward(4, 4, None, False),
        "b h s e!, b h s d!, b h t! d!, b h t! e!, b h s e!, b h s -> b h s d!, b h t! d! +s, b h t! e! +s | linear {0} | ring s t: {2 3}",
    ),
    Case(
        "autopar.attention_backward.default", attention_backward(8, 2, None, True, rows=8),
        "b (h g) s e!, b (h g) s d!, b h t! d!, b h t! e!, b (h g) s e!, b (h g) s"
        " -> b (h g) s d!, b h t! d! +g +s, b h t! e! +g +s | linear {0} | triangle s | mirror s: {0 1 4} {5} {6}"
        " | ring s t: {2 3}",
    ),
    Case(
        "autopar.attention_backward.default", attention_backward(4, 4, F(6, 6), True),
        "b h s e!, b h s d!, b h t! d!, b h t! e!, b h s e!, b h s, s t!"
        " -> b h s d!, b h t! d! +s, b h t! e! +s | linear {0} | triangle s",
    ),
    Case(
        "autopar.attention_backward.default", attention_backward(4, 2, F(2, 1, 6, 6), False),
        "b (h g) s e!, b (h g) s d!, b h t! d!, b h t! e!, b (h g) s e!, b (h g) s, b 1 s t!"
        " -> b (h g) s d!, b h t! d! +g +s, b h t! e! +g +s | linear {0}",
    ),
    # reduction
    Case("aten.sum.default", (F(4, 6),), "d0 d1 -> () +d0 +d1 | linear {0}"),
    Case("aten.sum.dim_IntList", (F(4, 6, 8), [0, 2]), "d0 a d1 -> a +d0 +d1 | linear {0}"),
    Case("aten.sum.dim_IntList", (F(4, 6, 8), [-1], True), "a b d -> a b 1 +d | linear {0}"),
    Case("aten.sum.dim_IntList", (F(4, 6), []), "d0 d1 -> () +d0 +d1 | linear {0}"),
    Case("aten.sum.dim_IntList", (F32(4, 6), [0]), "d a -> a +d | linear {0}", {"dtype": torch.float64}),
    Case("aten.sum.dim_IntList", (P(4, 6), [0]), "d a -> a +d", {"dtype": torch.int64}),
    Case("aten.sum.dim_IntList", (I(9, 4, 6), [0]), "d a -> a +d | linear {0}"),
    Case("aten.mean.dim", (F(4, 6, 8), [-1], True), "a b d! -> a b 1 | linear {0}"),
    Case("aten.mean.default", (F(4, 6),), "d0! d1! -> () | linear {0}"),
    Case("aten.amax.default", (F(4, 6, 8), [1]), "a d b -> a b +d:max"),
    Case("aten.amax.default", (F(4, 6),), "d0 d1 -> () +d0:max +d1:max"),
    Case("aten.amin.default", (F(4, 6, 8), [1, 2], True), "a d0 d1 -> a 1 1 +d0:min +d1:min"),
    Case("aten.any.dim", (B(4, 6), 1), "a d -> a +d:max"),
    Case("aten.any.default", (B(4, 6),), "d0 d1 -> () +d0:max +d1:max"),
    Case("aten.all.dim", (B(4, 6), 0, True), "d a -> 1 a +d:min"),
    Case("aten.max.default", (F(4, 6),), "a b -> () +a:max +b:max"),
    Case("aten.min.default", (F(4, 6),), "a b -> () +a:min +b:min"),
    Case("aten.max.dim", (F(4, 6), 1), "a d! -> a, a"),
    Case("aten.min.dim", (F(4, 6), 0, True), "d! a -> 1 a, 1 a"),
    Case("aten.median.dim", (F(4, 6), 0), "d! a -> a, a"),
    Case("aten.prod.dim_int", (F(4, 6), 1), "a d -> a +d:product"),
    Case("aten.prod.dim_int", (I(3, 4, 6), 0, True), "d a -> 1 a +d:product"),
    Case("aten.prod.dim_int", (C(4, 6), 1), "a d! -> a"),
    Case("aten.prod.default", (F(4, 6),), "d0 d1 -> () +d0:product +d1:product"),
    Case("aten.var.correction", (F(4, 6), [1]), "a d -> a 1 ~d | inner d: sum(a) sum(a)", {"correction": 0, "keepdim": True}),
    Case("aten.var_mean.correction", (F(4, 6), [0]), "d a -> a ~d, a ~d | inner d: sum(a) sum(a)", {"correction": 1}),
    Case("aten.std_mean.correction", (F(4, 6), None), "d0 d1 -> () ~d0 ~d1, () ~d0 ~d1 | inner d0 d1: sum() sum()"),
    Case("aten.std.correction", (F(4, 6),), "d0 d1 -> () ~d0 ~d1 | inner d0 d1: sum() sum()"),
    Case("aten.std.correction", (F(4, 6, 8), [0, 2]), "d0 a d1 -> a ~d0 ~d1 | inner d0 d1: sum(a) sum(a)", {"correction": 0}),
    Case("aten.var.correction", (C(4, 6), [1]), "a d! -> a"),
    Case("aten.median.default", (F(4, 6),), "a! b! -> ()"),
    Case("aten.argmax.default", (F(4, 6), -1), "a d! -> a"),
    Case("aten.argmax.default", (F(4, 6),), "d0! d1! -> ()"),
    Case("aten.argmin.default", (F(4, 6), 0, True), "d! a -> 1 a"),
    Case("autopar.extreme.default", (F(4, 6), 1, False, True, 0), "a d -> a ~d, a ~d | inner d: max(a) min(a)"),
    Case("autopar.extreme.default", (F(4, 6), 0, True, False, 0), "d a -> 1 a ~d, 1 a ~d | inner d: min(a) min(a)"),
    Case("autopar.extreme.default", (I(3, 4, 6), 1, False, True, 0), "a d -> a ~d, a ~d | inner d: max(a) min(a)"),
    Case("autopar.extreme.default", (F32(4, 6), 1, True, True, 0), "a d -> a 1 ~d, a 1 ~d | inner d: max(a) min(a)"),
    Case("autopar.ctc_loss.default", ctc, "_ n _, n _, n, n -> n"),
    Case("autopar.ctc_loss_backward.default", lambda: (F(4).tensor(), *ctc()), "n, _ n _, n _, n, n -> _ n _ | linear {0}"),
    *(
        Case("autopar.recurrence.default", lambda shape=shape: recurrence(*shape), f"t! b m!, {n} b k!, m! k!, m! -> {n} t! b k!")
        for *shape, n in CELLS
    ),
    *(
        Case("autopar.recurrence_backward.default", lambda shape=shape: recurrence_backward(*shape),
             f"{n} t! b k!, t! b m!, {n} t! b k!, {n} b k!, m! k!, m! -> t! b m!, {n} b k!, m! k! +b, m! +b | linear {{0}}")
        for *shape, n in CELLS
    ),
    Case("aten.logsumexp.default", (F(4, 6), [1]), "a d -> a ~d | inner d: max(a) sum(a)"),
    Case("aten.logsumexp.default", (F(4, 6), [0, 1], True), "d0 d1 -> 1 1 ~d0 ~d1 | inner d0 d1: max() sum()"),
    Case("aten.linalg_vector_norm.default", (F(4, 6), 2, [1]), "a d -> a ~d | inner d: sum(a)"),
    Case("aten.linalg_vector_norm.default", (F(4, 6), 3.0, None, True), "d0 d1 -> 1 1 ~d0 ~d1 | inner d0 d1: sum()"),
    Case("aten.linalg_vector_norm.default", (F(4, 6), float("inf"), [1]), "a d -> a +d:max"),
    Case("aten.linalg_vector_norm.default", (F(4, 6), float("-inf"), [1]), "a d -> a +d:min"),
    Case("aten.linalg_vector_norm.default", (F(4, 6), 0, [1]), "a d -> a ~d | inner d: sum(a)"),
    Case("aten.norm.Scalar", (F(4, 6), 3), "a b -> () ~a ~b | inner a b: sum()"),
    Case("aten.count_nonzero.dim_IntList", (I(2, 4, 6), [1]), "a d -> a +d"),
)
