"""THE table: for each operator, how it can be cut, and all else that is known of it. One row an operator.

The rule's notation is that of ``autopar.rules.notation``, the other columns are those of ``autopar.rules.signature.Row``:

    m k, k n -> m n     a factor that is not on the right is summed there        d!      whole on every rank
    +d:max              reduced by max instead of a sum                          ~d      does not depend on it
    _, _...             a dim, or any, that is never split                       (g c)   one dim of two factors
    | linear {0} {1}    the inputs that may be partial sums

Every row is checked by execution in ``tests/rules``: the operator run on parts equals the operator run whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from autopar.rules import computed, computed_indexing, computed_layout
from autopar.rules.signature import LooksUp, OperatorCall, Row, WritesOver


def _rows(
    family: str, operators: str, rule: str | tuple[str, ...] | Callable[[OperatorCall], str], arguments: str = "", **more: Any
) -> tuple[Row, ...]:
    """One row for each operator of a list, all with one rule and one signature."""
    return tuple(Row(family, f"aten.{name}" + (f"({arguments})" if arguments else ""), rule, **more) for name in operators.split())


_NONLINEAR = """
    abs acos acosh angle asin asinh atan atan2 atanh bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift
    bitwise_xor ceil celu clamp clamp_max clamp_min copysign cos cosh digamma elu eq erf erfc erfinv exp exp2 expm1 float_power
    floor floor_divide fmax fmin fmod frac ge gelu gt hardshrink hardsigmoid hardswish hardtanh heaviside hypot i0 isfinite isinf
    isnan igamma igammac isneginf isposinf le leaky_relu lgamma log log10 log1p log2 logaddexp logaddexp2 logical_and logical_not
    logical_or logical_xor logit lt max.other maximum min.other minimum mish nan_to_num ne nextafter polygamma pow _prelu_kernel
    reciprocal relu relu6 remainder round rsqrt selu sgn sigmoid sign signbit silu sin sinc sinh softplus softshrink
    special_airy_ai special_bessel_j0 special_bessel_j1 special_bessel_y0 special_bessel_y1 special_entr special_erfcx special_i0e
    special_i1 special_i1e special_log_ndtr special_ndtri special_xlog1py special_zeta sqrt square polar tan tanh threshold trunc
    xlogy fill __lshift__ __rshift__"""
_LINEAR = """
    neg deg2rad rad2deg hardtanh_backward hardswish_backward hardsigmoid_backward hardshrink_backward elu_backward softplus_backward
    softshrink_backward logit_backward mish_backward log_sigmoid_backward native_dropout_backward"""

_UNSET: Any = {"once": "what it makes does not follow from the graph: it gives memory as it is", "reads": "shape", "issues": 0}
_CHANGING: Any = {"once": "it changes what it reads", "stores": True, "work": "none"}
_SEED: Any = {"local": (("seed", "seed output 0"),)}
_OVER_EITHER: Any = {"over": WritesOver("Tensor", (0, 1), "out")}
_OVER_GRADIENT: Any = {"over": WritesOver("default", (0,), "grad_input")}
_SIZE: Any = {"local": (("size", "shape output 0"),)}
_INPUT_SIZES: Any = {"local": (("input_sizes", "shape output 0"),)}
_AT_DIM: Any = {"at": "dim"}
_ALONG_DIM = LooksUp(dim="dim")
_REDUCING: Any = {"at": "dim", "keep": "keepdim"}
_LAST: Any = {"at": "last:normalized_shape"}
_REDUCED = "x, dim=None, keepdim=False"
_VARIANCE = "inner d: sum(...) sum(...)"
_CONVOLUTION = "stride=, padding=, dilation=, groups="
_GROUP_NORM = (("N", "extent n"), ("C", "extent g c"), ("group", "extent g"))
_ALONG = (("row", "shift -r"), ("column", "shift k -c"))
_SOFTMAX = "... d -> ... d | inner d: max(...) sum(...)"
_SOFTMAX_BACKWARD = "... d, ... d -> ... d | linear {0} | inner d: sum(...)"

POINTWISE: tuple[Row, ...] = (
    *_rows("pointwise", _NONLINEAR, "... * -> ..."),
    *_rows("pointwise", "mvlgamma", "... * -> ...", lies="in order"),
    *_rows("pointwise", _LINEAR, "... * -> ... | linear {0}"),
    *_rows("pointwise", "leaky_relu_backward rrelu_with_noise_backward", "... * -> ... | linear {0}", lies="operands 1 0"),
    *_rows("pointwise", "threshold_backward", "... * -> ... | linear {0}", **_OVER_GRADIENT, lies="operands 1 0"),
    *_rows("pointwise", "gelu_backward silu_backward tanh_backward sigmoid_backward", "... * -> ... | linear {0}", **_OVER_GRADIENT),
    *_rows("pointwise", "mse_loss smooth_l1_loss huber_loss", "..., ... -> ..."),
    *_rows("pointwise", "mse_loss_backward smooth_l1_loss_backward huber_loss_backward", "..., ..., ... -> ... | linear {0}",
           lies="in order"),
    *_rows("pointwise", "div", "... * -> ... | linear {0}", number="divides", **_OVER_EITHER),
    *_rows("pointwise", "mul", "... * -> ... | linear {0} {1}", number="multiplies", **_OVER_EITHER),
    *_rows("pointwise", "add sub", "... * -> ... | linear {0 1}", number="adds", **_OVER_EITHER),
    *_rows("pointwise", "rsub", "... * -> ...", number="adds"),
    *_rows("pointwise", "addcdiv lerp complex", "... * -> ... | linear {0 1}"),
    *_rows("pointwise", "addcmul", "... * -> ... | linear {0 1} {0 2}"),
    *_rows("pointwise", "where.self", "... * -> ... | linear {1 2}"),
    *_rows("pointwise", "where.ScalarOther where.ScalarSelf", "... * -> ... | linear {1 2}", issues=2),
    *_rows("pointwise", "where.Scalar", "... * -> ... | linear {1 2}", issues=3),
    *_rows("pointwise", "masked_fill.Tensor", "... * -> ... | linear {0 2}", lies="in order"),
    *_rows("pointwise", "masked_fill.Scalar", computed.masked_fill, "x, mask, value=", lies="in order"),
    *_rows("pointwise", "div.Tensor_mode div.Scalar_mode", computed.divide),
    *_rows("pointwise", "_to_copy", computed.convert, "x", work="none"),
    *_rows("pointwise", "clone lift_fresh_copy", "... -> ... | linear {0}", work="none", lies="in order"),
    *_rows("pointwise", "alias detach lift_fresh", "... -> ... | linear {0}", alias=True),
    *_rows("pointwise", "zeros_like zero", "... -> ... | linear {} {0}", reads="shape"),
    *_rows("pointwise", "ones_like full_like", "... * -> ...", reads="shape"),
    *_rows("pointwise", "_conj _neg_view", computed.conjugate),
    *_rows("pointwise", "copy", "..., ... -> ... | linear {1}", work="none", lies="in order"),
    *_rows("pointwise", "_prelu_kernel_backward", "... * -> ..., ... | linear {0}", lies="operands 1 0"),
    *_rows("pointwise", "log_sigmoid_forward frexp", "... * -> ..., ..."),
    *_rows("pointwise", "bucketize.Tensor isin.Tensor_Tensor", "..., _... -> ...", lies="in order"),
    *_rows("pointwise", "isin.Tensor_Scalar", "... -> ...", lies="in order"),
    *_rows("pointwise", "searchsorted.Tensor", computed_indexing.searched, "sorted, x", lies="in order"),
    *_rows("factory", "empty_like", "... -> ...", **_UNSET, lies="operands 0"),
    Row("random", "autopar.dropout(x, p=, seed=)", "... -> ..., ...", **_SEED, issues=4, lies="operands 0; in order"),
    Row("random", "autopar.uniform(x, seed=)", "... -> ...", **_SEED),
    Row("random", "autopar.normal(x, seed=)", "... -> ...", **_SEED),
)  # fmt: skip

# a scale and a zero for the whole tensor, or one for each entry of a dim; where they are learned, their gradients are sums
QUANTISATION: tuple[Row, ...] = (
    *_rows("quantisation", "fake_quantize_per_tensor_affine_cachemask", "... -> ..., ..."),
    *_rows("quantisation", "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams", "..., _..., _..., _... -> ..., ..."),
    *_rows("quantisation", "fake_quantize_per_channel_affine_cachemask", "... c, c, c -> ... c, ... c", "x, scale, zero, axis=", at="axis"),
    *_rows("quantisation", "_fake_quantize_learnable_per_tensor_affine", "..., _..., _... -> ..."),
    *_rows("quantisation", "_fake_quantize_learnable_per_tensor_affine_backward", "..., ..., _, _ -> ..., _ +..., _ +... | linear {0}",
           lies="as given"),
    *_rows("quantisation", "_fake_quantize_learnable_per_channel_affine", "... c, c, c -> ... c", "x, scale, zero, axis=", at="axis"),
    *_rows("quantisation", "_fake_quantize_learnable_per_channel_affine_backward",
           "... c, ... c, c, c -> ... c, c +..., c +... | linear {0}", "grad, x, scale, zero, axis=", at="axis", lies="as given"),
)  # fmt: skip

CONTRACTION: tuple[Row, ...] = (
    Row("contraction", "autopar.contract(a, b, equation=)", computed.contract, work="contraction"),
    Row("contraction", "autopar.expert_contract(a, b, ids, equation=, experts=, first_expert=)", computed.contract,
        local=(("experts", "extent e"), ("first_expert", "start e")), work="experts", issues="expert contract"),
    Row("dispatch", "autopar.dispatch(x, ids, experts=, first_expert=, columns=)",
        "[t x] ..., [t x] -> [y x] [t] ... | linear {0} | exchange x: all_to_all rows y",
        local=(("experts", "extent y"), ("first_expert", "start y"), ("columns", "size output 0 1")), work="none", reads="results",
        issues="dispatch"),
    Row("dispatch", "autopar.dispatch_ids(ids, experts=, first_expert=, columns=)",
        "[t x] -> [y x] [t] | exchange x: all_to_all counts y",
        local=(("experts", "extent y"), ("first_expert", "start y"), ("columns", "size output 0 1")), work="none", reads="results",
        issues="dispatch ids"),
    Row("dispatch", "autopar.combine(rows, ids, weights?, experts=, first_expert=, choices=, dtype=)",
        "[y x] [t] ..., [t x], [t x] -> [t x] ... | linear {0} | exchange x: all_to_all rows y",
        local=(("experts", "extent y"), ("first_expert", "start y")), work="none", issues="combine", reads="terms"),
    Row("contraction", "autopar.grouped_mm(x, w, ends, first_row=, first_expert=)", "s k, e k n, _ -> s n | linear {0} {1}",
        local=(("first_row", "start s"), ("first_expert", "start e")), work="grouped", issues="grouped mm"),
    Row("contraction", "autopar.grouped_outer(x, grad, ends, experts=, first_row=, first_expert=)", "s k, s n, _ -> e k n | linear {0} {1}",
        local=(("experts", "extent e"), ("first_row", "start s"), ("first_expert", "start e")), work="grouped", issues="grouped outer"),
    *_rows("contraction", "mm", "m k, k n -> m n | linear {0} {1}", work="contraction"),
    *_rows("contraction", "bmm", "b m k, b k n -> b m n | linear {0} {1}", work="contraction"),
    *_rows("distance", "_cdist_forward", "... m _, ... n _ -> ... m n"),
    *_rows("distance", "_euclidean_dist", "... m k!, ... n k! -> ... m n", work="contraction"),
    *_rows("distance", "_cdist_backward", "... m n, ... m _, ... n _, ... m n -> ... m _ | linear {0}"),
    *_rows("distance", "_pdist_forward", "_ _ -> _"),
    *_rows("distance", "_pdist_backward", "_, _ _, _ -> _ _ | linear {0}"),
    *_rows("contraction", "mv", "m k, k -> m | linear {0} {1}", work="contraction"),
    *_rows("contraction", "dot", "k, k -> () | linear {0} {1}", work="contraction"),
    *_rows("contraction", "addmm", computed.add_product, "bias, a, b", work="contraction"),
    *_rows("contraction", "baddbmm", "b? m? n? +k, b m k, b k n -> b m n | linear {0 1} {0 2}", work="contraction"),
)  # fmt: skip

# batches of matrices; a factorisation that was not asked for a part of its results gives that part empty
LINEAR_ALGEBRA: tuple[Row, ...] = (
    *_rows("linear algebra", "linalg_matrix_exp cholesky cholesky_inverse", "... _ _ -> ... _ _", work="matrices"),
    *_rows("linear algebra", "linalg_inv_ex linalg_cholesky_ex", "... _ _ -> ... _ _, ...", work="matrices"),
    *_rows("linear algebra", "linalg_lu_factor_ex linalg_ldl_factor_ex", "... _ _ -> ... _ _, ... _, ...", work="matrices"),
    *_rows("linear algebra", "linalg_lu", "... _ _ -> ... _ _, ... _ _, ... _ _", work="matrices"),
    *_rows("linear algebra", "_linalg_det", "... _ _ -> ..., ... _ _, ... _", work="matrices"),
    *_rows("linear algebra", "_linalg_slogdet", "... _ _ -> ..., ..., ... _ _, ... _", work="matrices"),
    *_rows("linear algebra", "_linalg_eigh linalg_eig", ("... _ _ -> ... _, ... _ _", "... _ _ -> ... _, _ ~..."), work="matrices"),
    *_rows("linear algebra", "linalg_eigvals", "... _ _ -> ... _", work="matrices"),
    *_rows("linear algebra", "_linalg_svd", ("... _ _ -> ... _ _, ... _, ... _ _", "... _ _ -> _ ~..., ... _, _ ~..."), work="matrices"),
    *_rows("linear algebra", "linalg_qr", ("... _ _ -> ... _ _, ... _ _", "... _ _ -> _ ~..., ... _ _"), work="matrices"),
    *_rows("linear algebra", "linalg_pinv.atol_rtol_tensor", computed.pseudo_inverse, "x, atol?, rtol?", work="matrices"),
    *_rows("linear algebra", "_linalg_solve_ex", computed.solve, "a, b", work="matrices"),
    *_rows("linear algebra", "linalg_solve_triangular cholesky_solve", "... _ _, ... _ _ -> ... _ _", work="matrices"),
    *_rows("linear algebra", "linalg_lu_solve", "... _ _, ... _, ... _ _ -> ... _ _", work="matrices"),
    *_rows("linear algebra", "lu_unpack", "... _ _, ... _ -> ... _ _, ... _ _, ... _ _"),
    *_rows("linear algebra", "linalg_cross", "... _, ... _ -> ... _ | linear {0} {1}", "a, b, dim=-1", **_AT_DIM),
)

# n batch, g groups, i and o channels of a group
CONVOLUTION: tuple[Row, ...] = (
    Row("convolution", f"autopar.convolution(x, w, {_CONVOLUTION})", "n (g i) _..., (g o) i _... -> n (g o) _... | linear {0} {1}",
        local=(("groups", "extent g"),), work="convolution"),
    Row("convolution", f"autopar.convolution_input_gradient(grad, w, input_size=, {_CONVOLUTION})",
        "n (g o) _..., (g o) i _... -> n (g i) _... | linear {0} {1}",
        local=(("input_size", "shape output 0"), ("groups", "extent g")), work="convolution"),
    Row("convolution", f"autopar.convolution_weight_gradient(grad, x, weight_size=, {_CONVOLUTION})",
        "n (g o) _..., n (g i) _... -> (g o) i _... | linear {0} {1}",
        local=(("weight_size", "shape output 0"), ("groups", "extent g")), work="convolution"),
    Row("convolution", "aten.convolution(x, w, bias?, stride=, padding=, dilation=, transposed=, output_padding=, groups=)",
        computed.convolution, local=(("groups", "extent g"),), work="convolution"),
    *_rows("convolution", "convolution_backward", computed.convolution_backward,
           "grad, x, w, bias_sizes=, stride=, padding=, dilation=, transposed=, output_padding=, groups=, output_mask=",
           local=(("bias_sizes", "extent g o"), ("groups", "extent g")), mask="output_mask", work="convolution"),
    *_rows("convolution", "im2col", "n c _ _ -> n (c _) _ | linear {0}"),
    *_rows("convolution", "col2im", "n (c _) _ -> n c _ _ | linear {0}", equal="all"),
)  # fmt: skip

# b batch, h key heads, g query heads of a key head, s queries, t keys
ATTENTION: tuple[Row, ...] = (
    Row("attention", "autopar.attention(q, k, v, mask?, causal=, scale=, dropout=, offset=)", computed.attention,
        local=(("offset", "start s"),), work="attention", issues="attention", lies="0 2 1 3; in order"),
    Row("attention", "autopar.attention_backward(grad, q, k, v, out, lse, mask?, causal=, scale=, dropout=, offset=)",
        computed.attention_backward, local=(("offset", "start s"),), work="attention_backward", issues="attention backward",
        lies="0 2 1 3"),
)  # fmt: skip

# t steps, b batch, m gates, k units, n states of a unit
RECURRENCE: tuple[Row, ...] = (
    Row("recurrence", "autopar.recurrence(gates, state, weight, bias?, cell=)", "t! b m!, n! b k!, m! k!, m! -> n! t! b k!",
        work="recurrence", kernels=(("lstm", 10), ("gru", 9), ("tanh", 4), ("relu", 4)), issues="recurrence"),
    Row("recurrence", "autopar.recurrence_backward(grad, gates, states, state, weight, bias?, cell=)",
        "n! t! b k!, t! b m!, n! t! b k!, n! b k!, m! k!, m! -> t! b m!, n! b k!, m! k!, m! | linear {0}", work="recurrence_backward",
        kernels=(("lstm", 28), ("gru", 20), ("tanh", 7), ("relu", 6)), issues="recurrence backward"),
)  # fmt: skip

REDUCTION: tuple[Row, ...] = (
    *_rows("reduction", "sum", "... d -> ... | linear {0}", _REDUCED, **_REDUCING),
    *_rows("reduction", "mean", "... d! -> ... | linear {0}", _REDUCED, **_REDUCING),  # captured as a sum over a count
    *_rows("reduction", "amax any", "... d -> ... +d:max", _REDUCED, **_REDUCING),
    *_rows("reduction", "amin all", "... d -> ... +d:min", _REDUCED, **_REDUCING),
    *_rows("reduction", "max.default", "... -> () +...:max"),
    *_rows("reduction", "min.default", "... -> () +...:min"),
    *_rows("reduction", "nansum", "... d -> ...", _REDUCED, **_REDUCING),
    *_rows("reduction", "median.default nanmedian.default", "...! -> ()", "x"),
    *_rows("reduction", "prod", "... d -> ... +d:product", _REDUCED, **_REDUCING),
    *_rows("reduction", "kthvalue", "... d! -> ..., ...", "x, k=, dim=-1, keepdim=False", **_REDUCING),
    *_rows("reduction", "mode", "... d! -> ..., ...", "x, dim=-1, keepdim=False", **_REDUCING),
    *_rows("reduction", "argmax argmin", "... d! -> ...", _REDUCED, **_REDUCING),
    Row("reduction", "autopar.extreme(x, dim=, keepdim=, largest=, offset=)", computed.extreme,
        local=(("offset", "start d"),), **_REDUCING, issues=2),
    *_rows("reduction", "max.dim min.dim median.dim nanmedian.dim", "... d! -> ..., ...", _REDUCED, **_REDUCING),
    *_rows("reduction", "var.correction std.correction", f"... d -> ... ~d | {_VARIANCE}", _REDUCED, **_REDUCING, equal="inner"),
    *_rows("reduction", "var_mean.correction std_mean.correction", f"... d -> ... ~d, ... ~d | {_VARIANCE}", _REDUCED, **_REDUCING,
           equal="inner"),
    *_rows("reduction", "logsumexp", "... d -> ... ~d | inner d: max(...) sum(...)", _REDUCED, **_REDUCING),
    *_rows("reduction", "linalg_vector_norm", computed.norm, "x, ord=2, dim=None, keepdim=False", **_REDUCING),
    *_rows("reduction", "norm.ScalarOpt_dim", computed.norm, "x, ord=, dim=, keepdim=False", **_REDUCING),
    *_rows("reduction", "norm.Scalar", "... -> () ~... | inner ...: sum()", "x, ord=2"),
    *_rows("reduction", "count_nonzero", "... d -> ...", "x, dim=None", **_AT_DIM),
)  # fmt: skip

VIEW: tuple[Row, ...] = (
    Row("view", "autopar.shard(x, spec=)", "... -> ... | linear {0}", alias=True),
    Row("view", "autopar.on_axes(x, over=)", "... -> ... | linear {0}", alias=True, layout="over"),
    *_rows("view", "view _unsafe_view reshape", computed_layout.view, "x, size=", alias=True, **_SIZE),
    *_rows("view", "view_copy", computed_layout.view, "x, size=", work="none", **_SIZE),
    *_rows("view", "view.dtype", "_... -> _...", alias=True),
    *_rows("view", "permute", computed_layout.permute, "x, dims=", alias=True),
    *_rows("view", "transpose", computed_layout.transpose, "x, dim0=, dim1=", alias=True),
    *_rows("view", "t", computed_layout.turned, "x", alias=True),
    *_rows("view", "unsqueeze", "... -> ... 1 | linear {0}", "x, dim=", alias=True, **_AT_DIM),
    *_rows("view", "squeeze.default", computed_layout.squeeze, "x", alias=True),
    *_rows("view", "squeeze", computed_layout.squeeze, "x, dim=", alias=True),
    *_rows("view", "expand", computed_layout.expand, "x, size=", alias=True, **_SIZE),
    *_rows("view", "repeat", computed_layout.repeat, "x, repeats=", local=(("repeats", "ratio"),), work="none"),
    *_rows("view", "unfold", computed_layout.unfold, "x, dimension=, size=, step=", alias=True),
    *_rows("view", "unfold_backward", computed_layout.unfold_backward, "grad, input_sizes=, dim=, size=, step=", **_INPUT_SIZES),
    *_rows("view", "pixel_shuffle", "... (c p! q!) h w -> ... c (h p!) (w q!) | linear {0}", work="none", equal="all"),
    *_rows("view", "pixel_unshuffle", "... c (h p!) (w q!) -> ... (c p! q!) h w | linear {0}", work="none", equal="all"),
    *_rows("view", "view_as_real", "... -> ... _ | linear {0}", alias=True),
    *_rows("view", "view_as_complex", "... _ -> ... | linear {0}", alias=True),
)

SLICE: tuple[Row, ...] = (
    *_rows("slice", "slice", computed_layout.slice_dim, "x, dim=0, start=None, end=None, step=1", alias=True),
    *_rows("slice", "slice_backward", "... _ -> ... _ | linear {0}", "grad, input_sizes=, dim=, start=, end=, step=",
           **_AT_DIM, **_INPUT_SIZES),
    *_rows("slice", "select", "... _ -> ... | linear {0}", "x, dim=, index=", alias=True, **_AT_DIM),
    *_rows("slice", "select_backward", "... -> ... _ | linear {0}", "grad, input_sizes=, dim=, index=", **_AT_DIM, **_INPUT_SIZES),
    *_rows("slice", "slice_scatter", "... _, ... _ -> ... _ | linear {0 1}", "x, src, dim=0, start=None, end=None, step=1", **_AT_DIM,
           issues=2),
    *_rows("slice", "select_scatter", "... _, ... -> ... _ | linear {0 1}", "x, src, dim=, index=", **_AT_DIM, issues=2),
    *_rows("slice", "split split_with_sizes unsafe_split unsafe_split_with_sizes chunk", "... _ -> ... _ * | linear {0}",
           "x, size=, dim=0", alias=True, **_AT_DIM),
    *_rows("slice", "unbind", "... _ -> ... * | linear {0}", "x, dim=0", alias=True, **_AT_DIM),
    *_rows("slice", "cat", "... _ * -> ... _ | linear {all}", "tensors*, dim=0", work="none", **_AT_DIM),
    *_rows("slice", "stack", "... * -> ... _ | linear {all}", "tensors*, dim=0", work="none", **_AT_DIM),
    *_rows("slice", "constant_pad_nd", computed_layout.pad, "x, pad=, value=0", work="none"),
    *_rows("slice", "flip", "... d! -> ... d! | linear {0}", "x, dims=", at="dims", work="none", lies="operands 0"),
    *_rows("slice", "roll", computed_layout.roll, "x, shifts=, dims=()", work="none"),
    *_rows("slice", "rot90", "... _ -> ... _ | linear {0}", "x, k=1, dims=(0, 1)", at="dims", work="none",
           lies="untold"),
    *_rows("fft", "_fft_c2c _fft_r2c _fft_c2r", "... _ -> ... _ | linear {0}", "x, dim=", **_AT_DIM),
    *_rows("slice", "glu", "... _ -> ... _", "x, dim=-1", **_AT_DIM, lies="operands 0"),
    *_rows("slice", "glu_backward", "... _, ... _ -> ... _ | linear {0}", "grad, x, dim=", **_AT_DIM),
    *_rows("slice", "tril triu", "... r c -> ... r c | linear {0}", "x, diagonal=0", local=(("diagonal", "shift r -c"),)),
    Row("slice", "autopar.diagonal(x, length=, row=, column=, dim1=, dim2=)", computed_layout.diagonal,
        local=(("length", "extent k l"), *_ALONG), work="none", reads="results", issues="diagonal"),
    Row("slice", "autopar.along_diagonal(values, rows=, columns=, row=, column=, dim1=, dim2=)", computed_layout.along_diagonal,
        local=(("rows", "extent k r"), ("columns", "extent c"), *_ALONG), work="none", issues=2),
    Row("slice", "autopar.on_diagonal(x, values, row=, column=, dim1=, dim2=)", computed_layout.on_diagonal, local=_ALONG, work="none",
        issues=2),
)  # fmt: skip

NORMALISATION: tuple[Row, ...] = (
    *_rows("normalisation", "native_layer_norm", "... d!, d!, d! -> ... d!, ... 1, ... 1",
           "x, normalized_shape=, weight?, bias?, eps=", **_LAST),
    *_rows("normalisation", "native_layer_norm_backward", "... d!, ... d!, ... 1, ... 1, d!, d! -> ... d!, d!, d! | linear {0}",
           "grad, x, normalized_shape=, mean, rstd, weight?, bias?, output_mask=", mask="output_mask", **_LAST),
    *_rows("normalisation", "_fused_rms_norm", "... d!, d! -> ... d!, ... 1", "x, normalized_shape=, weight?, eps=None", **_LAST),
    *_rows("normalisation", "_fused_rms_norm_backward", "... d!, ... d!, ... 1, d! -> ... d!, d! | linear {0}",
           "grad, x, normalized_shape=, rstd, weight?, output_mask=", mask="output_mask", **_LAST),
    Row("normalisation", "autopar.rms_norm(x, normalized_shape=, weight?, eps=)",
        "... d!, d! -> ... d!, ... 1", **_LAST, issues="rms norm", lies="operands 0; in order"),
    Row("normalisation", "autopar.rms_norm_backward(grad, x, normalized_shape=, rstd, weight?)",
        "... d!, ... d!, ... 1, d! -> ... d!, d! | linear {0}", **_LAST, issues="rms norm backward", lies="as given"),
    *_rows("normalisation", "native_group_norm", "n (g c!) _..., (g c!), (g c!) -> n (g c!) _..., n g, n g",
           "x, weight?, bias?, N=, C=, HxW=, group=, eps=", local=_GROUP_NORM),
    *_rows("normalisation", "native_group_norm_backward",
           "n (g c!) _..., n (g c!) _..., n g, n g, (g c!) -> n (g c!) _..., (g c!), (g c!) | linear {0}",
           "grad, x, mean, rstd, weight?, N=, C=, HxW=, group=, output_mask=", mask="output_mask", local=_GROUP_NORM),
    Row("normalisation", "autopar.batch_norm(x, weight?, bias?, running_mean?, running_var?, momentum=, eps=)",
        "n c _..., c, c, c, c -> n c _..., c ~n, c ~n, c ~n, c ~n | inner n: sum(c) sum(c)", equal="inner",
        issues="batch norm"),
    Row("normalisation", "autopar.batch_norm_backward(grad, x, weight?, mean, invstd)",
        "n c _..., n c _..., c, c, c -> n c _..., c ~n, c ~n | linear {0} | inner n: sum(2 c)", equal="inner",
        issues="batch norm backward"),
    *_rows("normalisation", "_native_batch_norm_legit.no_stats", "n! c _..., c, c -> n! c _..., c, c", "x, weight?, bias?"),
    *_rows("normalisation", "_native_batch_norm_legit_no_training", "n c _..., c, c, c, c -> n c _..., _ ~n ~c, _ ~n ~c",
           "x, weight?, bias?, running_mean, running_var"),
    *_rows("normalisation", "_native_batch_norm_legit_functional", "n! c _..., c, c, c, c -> n! c _..., c, c, c, c",
           "x, weight?, bias?, running_mean, running_var"),
    *_rows("normalisation", "native_batch_norm_backward", "n! c _..., n! c _..., c, c, c, c, c -> n! c _..., c, c | linear {0}",
           "grad, x, weight?, running_mean?, running_var?, save_mean?, save_invstd?, train=, eps=, output_mask=", mask="output_mask"),
    *_rows("normalisation", "renorm", computed.renormalised, "x, p=, dim=, maxnorm="),
    *_rows("normalisation", "_weight_norm_interface", computed.weight_norm, "v, g, dim=0", lies="as given"),
    *_rows("normalisation", "_weight_norm_interface_backward", computed.weight_norm, "grad, v, g, norms, dim="),
    *_rows("softmax", "_softmax _log_softmax", _SOFTMAX, "x, dim=, half_to_float=False", **_AT_DIM),
    *_rows("softmax", "_softmax_backward_data _log_softmax_backward_data", _SOFTMAX_BACKWARD, "grad, out, dim=, input_dtype=", **_AT_DIM),
)  # fmt: skip

_POOL_1D = "avg_pool1d adaptive_avg_pool1d upsample_nearest1d _upsample_nearest_exact1d reflection_pad1d replication_pad1d"
_POOL_2D = """avg_pool2d adaptive_avg_pool2d _adaptive_avg_pool2d upsample_nearest2d _upsample_nearest_exact2d upsample_bilinear2d
    upsample_bicubic2d _upsample_bilinear2d_aa _upsample_bicubic2d_aa reflection_pad2d replication_pad2d"""
_POOL_3D = """avg_pool3d adaptive_avg_pool3d _adaptive_avg_pool3d upsample_nearest3d _upsample_nearest_exact3d reflection_pad3d
    replication_pad3d"""
_POOL_1D_BACKWARD = "reflection_pad1d_backward replication_pad1d_backward"
_POOL_2D_BACKWARD = """avg_pool2d_backward _adaptive_avg_pool2d_backward reflection_pad2d_backward
    replication_pad2d_backward"""
_POOL_3D_BACKWARD = """avg_pool3d_backward _adaptive_avg_pool3d_backward reflection_pad3d_backward
    replication_pad3d_backward"""
_UPSAMPLED = """upsample_nearest2d_backward _upsample_nearest_exact2d_backward upsample_bilinear2d_backward
    upsample_bicubic2d_backward _upsample_bilinear2d_aa_backward _upsample_bicubic2d_aa_backward"""

POOLING: tuple[Row, ...] = (
    *_rows("pooling", _POOL_1D, "... _ -> ... _ | linear {0}"),
    *_rows("pooling", _POOL_2D, "... _ _ -> ... _ _ | linear {0}"),
    *_rows("pooling", _POOL_3D, "... _ _ _ -> ... _ _ _ | linear {0}"),
    *_rows("pooling", _POOL_1D_BACKWARD, "... _, ... _ -> ... _ | linear {0}"),
    *_rows("pooling", _POOL_2D_BACKWARD, "... _ _, ... _ _ -> ... _ _ | linear {0}"),
    *_rows("pooling", _POOL_3D_BACKWARD, "... _ _ _, ... _ _ _ -> ... _ _ _ | linear {0}"),
    *_rows("pooling", "max_pool2d_with_indices adaptive_max_pool2d", "... _ _ -> ... _ _, ... _ _"),
    *_rows("pooling", "max_pool3d_with_indices", "... _ _ _ -> ... _ _ _, ... _ _ _"),
    *_rows("pooling", "adaptive_max_pool3d", "... _ _ _ -> ... _ _ _, ... _ _ _", equal="all"),
    *_rows("pooling", "max_unpool2d", "... _ _, ... _ _ -> ... _ _ | linear {0}", equal="all"),
    *_rows("pooling", "max_unpool3d", "... _ _ _, ... _ _ _ -> ... _ _ _ | linear {0}", equal="all"),
    *_rows("pooling", "fractional_max_pool2d", "n c _ _, n c _ -> n c _ _, n c _ _", "x, kernel_size=, output_size=, samples", equal="all"),
    *_rows("pooling", "fractional_max_pool2d_backward", "n c _ _, n c _ _, n c _ _ -> n c _ _ | linear {0}",
           "grad, x, kernel_size=, output_size=, indices", equal="all"),
    *_rows("pooling", "max_pool2d_with_indices_backward adaptive_max_pool2d_backward", "... _ _, ... _ _, ... _ _ -> ... _ _ | linear {0}"),
    *_rows("pooling", "max_pool3d_with_indices_backward", "... _ _ _, ... _ _ _, ... _ _ _ -> ... _ _ _ | linear {0}"),
    *_rows("pooling", "adaptive_max_pool3d_backward", "... _ _ _, ... _ _ _, ... _ _ _ -> ... _ _ _ | linear {0}", equal="all"),
    *_rows("pooling", "grid_sampler_2d", "n c _ _, n h w _ -> n c h w | linear {0}"),
    *_rows("pooling", "grid_sampler_2d_backward", "n c h w, n c _ _, n h w _ -> n c _ _, n h w _ | linear {0}",
           "grad, x, grid, interpolation_mode=, padding_mode=, align_corners=, output_mask=", mask="output_mask"),
    *_rows("pooling", _UPSAMPLED, "... _ _ -> ... _ _ | linear {0}", "grad, output_size=, input_size=",
           local=(("input_size", "shape output 0"),)),
)  # fmt: skip

GATHER: tuple[Row, ...] = (
    Row("gather", "autopar.embedding(weight, indices, offset=)", "v k, ... -> ... k | linear {0}", local=(("offset", "start v"),),
        looks_up=LooksUp(entries="rows"), issues="embedding"),
    Row("gather", "autopar.embedding_backward(grad, indices, rows=, offset=, padding_idx=)", "... k, ... -> v k | linear {0}",
        local=(("rows", "extent v"), ("offset", "start v")), looks_up=LooksUp(size="rows"), issues="embedding backward"),
    *_rows("gather", "embedding", "_ k, ... -> ... k | linear {0}", looks_up=LooksUp()),
    *_rows("gather", "embedding_dense_backward", computed_indexing.embedding_backward,
           "grad, indices, num_weights=, padding_idx=, scale_grad_by_freq="),
    *_rows("gather", "gather", computed_indexing.gather, "x, dim=, index", looks_up=_ALONG_DIM),
    *_rows("gather", "scatter.src", computed_indexing.scatter, "x, dim=, index, src", looks_up=_ALONG_DIM),
    *_rows("gather", "scatter.value", computed_indexing.scatter, "x, dim=, index", looks_up=_ALONG_DIM),
    *_rows("gather", "scatter_add", computed_indexing.scatter_add, "x, dim=, index, src", looks_up=_ALONG_DIM),
    *_rows("gather", "scatter_reduce", computed_indexing.scatter_reduce, "x, dim=, index, src, reduce=, include_self=True"),
    *_rows("gather", "index_reduce", computed_indexing.index_reduce, "x, dim=, index, source, reduce=, include_self=True"),
    *_rows("gather", "index_select", "... _, i -> ... i | linear {0}", "x, dim=, index", looks_up=_ALONG_DIM, **_AT_DIM),
    *_rows("gather", "index_add", "... _ +i, i, ... i -> ... _ +i | linear {0 2}", "x, dim=, index, source", looks_up=_ALONG_DIM,
           **_AT_DIM),
    *_rows("gather", "index_copy", "... _, i!, ... i! -> ... _", "x, dim=, index, source", **_AT_DIM),
    *_rows("gather", "index_copy_", "... _, i!, ... i! -> ... _", "x, dim=, index, source", **_AT_DIM, **_CHANGING),
    *_rows("gather", "index_fill.int_Scalar", "... _, _ -> ... _", "x, dim=, index", **_AT_DIM, lies="operands 0"),
    *_rows("gather", "index _unsafe_index", computed_indexing.index, "x, indices*", looks_up=LooksUp(dim="indices"), lies="as given"),
    *_rows("gather", "index_put _unsafe_index_put", computed_indexing.index_put, "x, indices*, values, accumulate=False",
           lies="operands 0"),
    *_rows("gather", "index_put_", computed_indexing.index_put, "x, indices*, values, accumulate=False", **_CHANGING),
    *_rows("gather", "one_hot", "... -> ... _", "x, num_classes=", looks_up=LooksUp(numbers=0, size="num_classes"), issues=2),
    Row("cross-entropy", "autopar.nll_loss(logp, target, ignore_index=, offset=)", "... c, ... -> ... | linear {0}",
        local=(("offset", "start c"),), looks_up=LooksUp(dim=-1, entries="classes", ignored="ignore_index"), issues="nll loss"),
    Row("cross-entropy", "autopar.nll_loss_backward(grad, target, classes=, ignore_index=, offset=)", "..., ... -> ... c | linear {0}",
        local=(("classes", "extent c"), ("offset", "start c")), looks_up=LooksUp(size="classes"), issues="nll loss backward"),
    Row("cross-entropy", "autopar.ctc_loss(logp, targets, input_lengths, target_lengths, blank=, zero_infinity=)", "_ n _, n _, n, n -> n",
        equal="all", looks_up=LooksUp(dim=-1)),
    Row("cross-entropy", "autopar.ctc_loss_backward(grad, logp, targets, input_lengths, target_lengths, blank=, zero_infinity=)",
        "n, _ n _, n _, n, n -> _ n _ | linear {0}", equal="all", issues=2),
    *_rows("cross-entropy", "nll_loss_forward", computed_indexing.negative_log_likelihood, "x, target, weight?, reduction=, ignore_index="),
)  # fmt: skip

FACTORY: tuple[Row, ...] = (
    *_rows("factory", "zeros", "-> ... | linear {}", "size=", **_SIZE),
    *_rows("factory", "full", computed.full, "size=, fill_value=", **_SIZE),
    *_rows("factory", "ones", "-> ...", "size=", **_SIZE),
    *_rows("factory", "empty", "-> ...", "size=", **_SIZE, **_UNSET),
    *_rows("factory", "new_zeros", computed.new_zeros, "x, size=", reads="shape", **_SIZE),
    *_rows("factory", "new_ones", computed.new, "x, size=", reads="shape", **_SIZE),
    *_rows("factory", "new_empty", computed.new, "x, size=", **_SIZE, **_UNSET),
    *_rows("factory", "new_full", computed.new_full, "x, size=, fill_value=", reads="shape", **_SIZE),
    *_rows("factory", "arange linspace logspace eye tril_indices triu_indices scalar_tensor", "-> _..."),
    *_rows("factory", "bartlett_window blackman_window hamming_window hann_window kaiser_window", "-> _"),
)

SCAN: tuple[Row, ...] = (
    *_rows("scan", "cumsum", "... d! -> ... d! | linear {0}", "x, dim=", **_AT_DIM),
    *_rows("scan", "cumprod logcumsumexp", "... d! -> ... d!", "x, dim=", **_AT_DIM),
    *_rows("reduction", "histc", computed.histogram, "x, bins=100, min=0, max=0"),
    *_rows("scan", "cummax cummin", "... d! -> ... d!, ... d!", "x, dim=", **_AT_DIM),
    *_rows("sort", "sort.default", "... d! -> ... d!, ... d!", "x, dim=-1", **_AT_DIM),
    *_rows("sort", "sort.stable", "... d! -> ... d!, ... d!", "x, stable=None, dim=-1", **_AT_DIM),
    *_rows("sort", "argsort.default", "... d! -> ... d!", "x, dim=-1", **_AT_DIM),
    *_rows("sort", "topk", "... _ -> ... _, ... _", "x, k=, dim=-1", **_AT_DIM, lies="in order"),
)

# the ranks are dim 0; a collective sends and receives beside what kernels read and write
_OVER_AXES: Any = {"layout": "over", "equal": "all", "work": "none"}
COLLECTIVE: tuple[Row, ...] = (
    Row("collective", "autopar.all_gather(x, over=)", "n ... -> _ ... ~n | exchange n: all_gather", **_OVER_AXES),
    Row("collective", "autopar.all_reduce(x, over=, reduction=)", computed.all_reduce, **_OVER_AXES),
    Row("collective", "autopar.reduce_scatter(x, over=)", "n _ ... -> n ... | exchange n: reduce_scatter sum", **_OVER_AXES),
    Row("collective", "autopar.all_to_all(x, over=)", "n _ ... -> n _ ... | exchange n: all_to_all", **_OVER_AXES),
)

ROWS: tuple[Row, ...] = (
    *POINTWISE, *QUANTISATION, *CONTRACTION, *LINEAR_ALGEBRA, *CONVOLUTION, *ATTENTION, *RECURRENCE, *REDUCTION, *VIEW, *SLICE,
    *NORMALISATION, *POOLING, *GATHER, *FACTORY, *SCAN, *COLLECTIVE,
)  # fmt: skip
