"""THE table: for each operator, how it can be cut. One row an operator; the notation is that of ``autopar.rules.notation``.

Every row is checked by execution in ``tests/rules``: the operator run on parts equals the operator run whole.
"""

from __future__ import annotations

from autopar.rules import computed
from autopar.rules.signature import Row

P = "pointwise"
_ELEMENTWISE = {
    "... * -> ...": """
        abs acos acosh angle asin asinh atan atan2 atanh bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor
        ceil celu clamp clamp_max clamp_min clamp_min.Tensor copysign cos cosh digamma elu eq erf erfc erfinv exp exp2 expm1 float_power
        floor floor_divide fmax fmin fmod frac ge gelu gt hardshrink hardsigmoid hardswish hardtanh heaviside hypot isfinite isinf isnan
        isneginf isposinf le leaky_relu lgamma log log10 log1p log2 log_sigmoid logaddexp logaddexp2 logical_and logical_not logical_or logical_xor
        logit lt maximum minimum mish nan_to_num ne nextafter polygamma pow prelu _prelu_kernel reciprocal relu relu6 remainder round rsqrt
        rsub selu sgn sigmoid sign signbit silu sin sinc sinh softplus softshrink special_entr special_xlog1py special_log_ndtr special_ndtri
        special_i0e special_i1 special_i1e special_erfcx special_zeta i0 sqrt square tan tanh threshold trunc xlogy mse_loss.none
        bernoulli rand_like randn_like randint_like full_like ones_like empty_like fill""",
    "... * -> ... | linear {0}": """
        neg positive deg2rad rad2deg threshold_backward gelu_backward silu_backward tanh_backward sigmoid_backward hardtanh_backward
        hardswish_backward hardsigmoid_backward hardshrink_backward leaky_relu_backward elu_backward softplus_backward
        softshrink_backward logit_backward mish_backward log_sigmoid_backward native_dropout_backward conj_physical _conj""",
    "... * -> ... | linear {0} {1}": "mul",
    "... * -> ... | linear {0 1}": "add sub lerp.Scalar",
    "... * -> ... | linear {0 1} {0 2}": "addcmul",
    "... * -> ... | linear {0 1}  ": "addcdiv lerp.Tensor",
    "... * -> ... | linear {1 2}": "where",
    "... * -> ... | linear {0 2}": "masked_fill.Tensor",
    "... -> ... | linear {0}": "clone alias detach lift_fresh lift_fresh_copy contiguous",
    "... * -> ..., ...": "native_dropout log_sigmoid_forward frexp",
}  # fmt: skip
_ALIASES = frozenset({"alias", "detach", "lift_fresh"})


def _elementwise() -> tuple[Row, ...]:
    return tuple(Row(P, f"aten.{name}", rule.strip(), alias=name in _ALIASES) for rule, names in _ELEMENTWISE.items() for name in names.split())


_SIZE = (("size", "shape output 0"),)
_SOFTMAX = "... d -> ... d | inner d: max(...) sum(...)"
_SOFTMAX_BACKWARD = "... d, ... d -> ... d | linear {0} | inner d: sum(...)"
_REDUCED = "x, dim=None, keepdim=False"
_CONVOLUTION = "stride=, padding=, dilation=, groups="
_GROUP_NORM = (("N", "extent n"), ("C", "extent g c"), ("group", "extent g"))

ROWS: tuple[Row, ...] = (
    *_elementwise(),
    Row(P, "aten.div", "... * -> ... | linear {0}"),
    Row(P, "aten.div.Tensor_mode", computed.divide),
    Row(P, "aten.div.Scalar_mode", computed.divide),
    Row(P, "aten.masked_fill(x, mask, value=)", computed.masked_fill),
    Row(P, "aten._to_copy(x)", computed.convert, work="none"),
    Row(P, "autopar.dropout(x, p=, seed=)", "... -> ..., ...", local=(("seed", "seed output 0"),)),
    # -- contraction: a factor that is not in the output is summed
    Row("contraction", "autopar.contract(a, b, equation=)", computed.contract, work="contraction"),
    Row("contraction", "aten.mm", "m k, k n -> m n | linear {0} {1}", work="contraction"),
    Row("contraction", "aten.bmm", "b m k, b k n -> b m n | linear {0} {1}", work="contraction"),
    Row("contraction", "aten.mv", "m k, k -> m | linear {0} {1}", work="contraction"),
    Row("contraction", "aten.dot", "k, k -> () | linear {0} {1}", work="contraction"),
    Row(
        "contraction", "aten.addmm",
        tuple(f"{bias} +k, m k, k n -> m n | linear {{0 1}} {{0 2}}" for bias in ("m? n?", "n?")), work="contraction",
    ),
    Row("contraction", "aten.baddbmm", "b? m? n? +k, b m k, b k n -> b m n | linear {0 1} {0 2}", work="contraction"),
    # -- convolution: n batch, g groups, i and o channels of a group
    Row(
        "convolution", f"autopar.convolution(x, w, {_CONVOLUTION})", "n (g i) _..., (g o) i _... -> n (g o) _... | linear {0} {1}",
        local=(("groups", "extent g"),), work="convolution",
    ),
    Row(
        "convolution", f"autopar.convolution_input_gradient(grad, w, input_size=, {_CONVOLUTION})",
        "n (g o) _..., (g o) i _... -> n (g i) _... | linear {0} {1}",
        local=(("input_size", "shape output 0"), ("groups", "extent g")), work="convolution",
    ),
    Row(
        "convolution", f"autopar.convolution_weight_gradient(grad, x, weight_size=, {_CONVOLUTION})",
        "n (g o) _..., n (g i) _... -> (g o) i _... | linear {0} {1}",
        local=(("weight_size", "shape output 0"), ("groups", "extent g")), work="convolution",
    ),
    Row(
        "convolution", "aten.convolution(x, w, bias?, stride=, padding=, dilation=, transposed=, output_padding=, groups=)",
        computed.convolution, local=(("groups", "extent g"),), work="convolution",
    ),
    # -- attention: b batch, h key heads, g query heads of a key head, s queries, t keys
    Row("attention", "autopar.attention(q, k, v, mask?, causal=, scale=, dropout=)", computed.attention, work="attention"),
    Row(
        "attention", "autopar.attention_backward(grad, q, k, v, out, lse, mask?, causal=, scale=, dropout=)",
        computed.attention_backward, work="attention_backward",
    ),
    # -- reduction
    Row("reduction", f"aten.sum({_REDUCED})", "... d -> ... | linear {0}", at="dim", keep="keepdim"),
    Row("reduction", "autopar.mean(x, dim=, keepdim=, count=)", "... d -> ... | linear {0}", at="dim", keep="keepdim"),
    Row("reduction", f"aten.mean({_REDUCED})", "... d! -> ... | linear {0}", at="dim", keep="keepdim"),
    Row("reduction", f"aten.amax({_REDUCED})", "... d -> ... +d:max", at="dim", keep="keepdim"),
    Row("reduction", f"aten.amin({_REDUCED})", "... d -> ... +d:min", at="dim", keep="keepdim"),
    Row("reduction", f"aten.any({_REDUCED})", "... d -> ... +d:max", at="dim", keep="keepdim"),
    Row("reduction", f"aten.all({_REDUCED})", "... d -> ... +d:min", at="dim", keep="keepdim"),
    Row("reduction", "aten.max.default(x)", "... -> () +...:max"),
    Row("reduction", "aten.min.default(x)", "... -> () +...:min"),
    Row("reduction", "aten.prod.default(x)", "...! -> ()"),
    *(
        Row("reduction", f"aten.{name}({_REDUCED})", "... d! -> ...", at="dim", keep="keepdim")
        for name in ("prod", "var", "std", "argmax", "argmin", "logsumexp")
    ),
    *(Row("reduction", f"aten.{name}({_REDUCED})", "... d! -> ..., ...", at="dim", keep="keepdim") for name in ("max.dim", "min.dim", "median.dim")),
    Row("reduction", f"aten.var_mean({_REDUCED})", "... d! -> ..., ...", at="dim", keep="keepdim"),
    Row("reduction", "aten.std.dim(x, dim=None, unbiased=True, keepdim=False)", "... d! -> ...", at="dim", keep="keepdim"),
    Row("reduction", "aten.var.dim(x, dim=None, unbiased=True, keepdim=False)", "... d! -> ...", at="dim", keep="keepdim"),
    Row("reduction", "aten.linalg_vector_norm(x, ord=2, dim=None, keepdim=False)", "... d! -> ...", at="dim", keep="keepdim"),
    Row("reduction", "aten.count_nonzero(x, dim=None)", "... d -> ...", at="dim"),
    # -- view, permute, expand
    *(Row("view", f"aten.{name}(x, size=)", computed.view, local=_SIZE, alias=True) for name in ("view", "_unsafe_view", "reshape", "view_copy")),
    Row("view", "aten.view.dtype", "...! -> ...!"),
    Row("view", "aten.permute(x, dims=)", computed.permute, alias=True),
    Row("view", "aten.transpose(x, dim0=, dim1=)", computed.transpose, alias=True),
    Row("view", "aten.t", ("a b -> b a | linear {0}", "a -> a | linear {0}", "() -> () | linear {0}"), alias=True),
    Row("view", "aten.unsqueeze(x, dim=)", "... -> ... 1 | linear {0}", at="dim", alias=True),
    Row("view", "aten.squeeze.default(x)", computed.squeeze, alias=True),
    Row("view", "aten.squeeze(x, dim=)", computed.squeeze, alias=True),
    Row("view", "aten.expand(x, size=)", computed.expand, local=_SIZE, alias=True),
    Row("view", "aten.repeat(x, repeats=)", computed.repeat, local=(("repeats", "ratio"),)),
    Row("view", "aten.unfold(x, dimension=, size=, step=)", computed.unfold, alias=True),
    Row("view", "aten.diagonal(x, offset=0, dim1=0, dim2=1)", computed.diagonal, alias=True),
    Row("view", "aten.pixel_shuffle", "... (c p q) h w -> ... c (h p) (w q) | linear {0}"),
    # -- slice, cat, pad
    Row("slice", "aten.slice(x, dim=0, start=None, end=None, step=1)", computed.slice_dim, alias=True),
    Row("slice", "aten.slice_backward(grad, input_sizes=, dim=, start=, end=, step=)", "... _ -> ... _ | linear {0}",
        at="dim", local=(("input_sizes", "shape output 0"),)),
    Row("slice", "aten.select(x, dim=, index=)", "... _ -> ... | linear {0}", at="dim", alias=True),
    Row("slice", "aten.select_backward(grad, input_sizes=, dim=, index=)", "... -> ... _ | linear {0}",
        at="dim", local=(("input_sizes", "shape output 0"),)),
    Row("slice", "aten.slice_scatter(x, src, dim=0, start=None, end=None, step=1)", "... _, ... _ -> ... _ | linear {0 1}", at="dim"),
    Row("slice", "aten.select_scatter(x, src, dim=, index=)", "... _, ... -> ... _ | linear {0 1}", at="dim"),
    *(
        Row("slice", f"aten.{name}", "... _ -> ... _ * | linear {0}", at="dim", alias=True)
        for name in ("split(x, split_size=, dim=0)", "split_with_sizes(x, split_sizes=, dim=0)", "chunk(x, chunks=, dim=0)")
    ),
    Row("slice", "aten.unbind(x, dim=0)", "... _ -> ... * | linear {0}", at="dim", alias=True),
    Row("slice", "aten.cat(tensors*, dim=0)", "... _ * -> ... _ | linear {all}", at="dim"),
    Row("slice", "aten.stack(tensors*, dim=0)", "... * -> ... _ | linear {all}", at="dim"),
    Row("slice", "aten.constant_pad_nd(x, pad=, value=0)", computed.pad),
    Row("slice", "aten.flip(x, dims=)", "... d! -> ... d! | linear {0}", at="dims"),
    Row("slice", "aten.roll(x, shifts=, dims=())", computed.roll),
    Row("slice", "aten.tril", "... _ _ -> ... _ _ | linear {0}"),
    Row("slice", "aten.triu", "... _ _ -> ... _ _ | linear {0}"),
    Row("slice", "aten.unfold_backward(grad, input_sizes=, dim=, size=, step=)", computed.unfold_backward, local=(("input_sizes", "shape output 0"),)),
    # -- normalisation
    Row("normalisation", "aten.native_layer_norm(x, normalized_shape=, weight?, bias?, eps=)", "... d!, d!, d! -> ... d!, ... 1, ... 1",
        at="last:normalized_shape"),
    Row("normalisation", "aten.native_layer_norm_backward(grad, x, normalized_shape=, mean, rstd, weight?, bias?, output_mask=)",
        "... d!, ... d!, ... 1, ... 1, d!, d! -> ... d!, d!, d! | linear {0}", at="last:normalized_shape", mask="output_mask"),
    Row("normalisation", "aten._fused_rms_norm(x, normalized_shape=, weight?, eps=None)", "... d!, d! -> ... d!, ... 1", at="last:normalized_shape"),
    Row("normalisation", "aten._fused_rms_norm_backward(grad, x, normalized_shape=, rstd, weight?, output_mask=)",
        "... d!, ... d!, ... 1, d! -> ... d!, d! | linear {0}", at="last:normalized_shape", mask="output_mask"),
    Row("normalisation", "aten.native_group_norm(x, weight?, bias?, N=, C=, HxW=, group=, eps=)",
        "n (g c!) _..., (g c!), (g c!) -> n (g c!) _..., n g, n g", local=_GROUP_NORM),
    Row("normalisation", "aten.native_group_norm_backward(grad, x, mean, rstd, weight?, N=, C=, HxW=, group=, output_mask=)",
        "n (g c!) _..., n (g c!) _..., n g, n g, (g c!) -> n (g c!) _..., (g c!), (g c!) | linear {0}", mask="output_mask", local=_GROUP_NORM),
    Row("normalisation", "autopar.batch_norm(x, weight?, bias?, running_mean?, running_var?, momentum=, eps=)",
        "n c _..., c, c, c, c -> n c _..., c ~n, c ~n, c ~n, c ~n | inner n: sum(c) sum(c)"),
    Row("normalisation", "autopar.batch_norm_backward(grad, x, weight?, mean, invstd)",
        "n c _..., n c _..., c, c, c -> n c _..., c ~n, c ~n | linear {0} | inner n: sum(2 c)"),
    # -- softmax
    Row("softmax", "aten._softmax(x, dim=, half_to_float=False)", _SOFTMAX, at="dim"),
    Row("softmax", "aten._log_softmax(x, dim=, half_to_float=False)", _SOFTMAX, at="dim"),
    Row("softmax", "aten._softmax_backward_data(grad, out, dim=, input_dtype=)", _SOFTMAX_BACKWARD, at="dim"),
    Row("softmax", "aten._log_softmax_backward_data(grad, out, dim=, input_dtype=)", _SOFTMAX_BACKWARD, at="dim"),
    # -- pooling and resampling
    *(
        Row("pooling", f"aten.{name}{dims}d(x)", f"... {' _' * dims} -> ... {' _' * dims} | linear {{0}}")
        for name in ("avg_pool", "_adaptive_avg_pool", "adaptive_avg_pool", "upsample_nearest", "_upsample_nearest_exact")
        for dims in (1, 2, 3) if not (name == "_adaptive_avg_pool" and dims == 1)
    ),
    *(Row("pooling", f"aten.{name}(x)", "... _ _ -> ... _ _ | linear {0}") for name in ("upsample_bilinear2d", "upsample_bicubic2d")),
    Row("pooling", "aten.avg_pool2d_backward", "... _ _, ... _ _ -> ... _ _ | linear {0}"),
    Row("pooling", "aten._adaptive_avg_pool2d_backward", "... _ _, ... _ _ -> ... _ _ | linear {0}"),
    Row("pooling", "aten.max_pool2d_with_indices", "... _ _ -> ... _ _, ... _ _"),
    Row("pooling", "aten.max_pool2d_with_indices_backward", "... _ _, ... _ _, ... _ _ -> ... _ _ | linear {0}"),
    *(
        Row("pooling", f"aten.{name}(grad, output_size=, input_size=)", "... _ _ -> ... _ _ | linear {0}", local=(("input_size", "shape output 0"),))
        for name in ("upsample_nearest2d_backward", "_upsample_nearest_exact2d_backward", "upsample_bilinear2d_backward", "upsample_bicubic2d_backward")
    ),
    # -- embedding, gather, scatter
    Row("gather", "autopar.embedding(weight, indices, offset=)", "v k, ... -> ... k | linear {0}", local=(("offset", "start v"),)),
    Row("gather", "autopar.embedding_backward(grad, indices, rows=, offset=, padding_idx=)", "... k, ... -> v k | linear {0}",
        local=(("rows", "extent v"), ("offset", "start v"))),
    Row("gather", "aten.embedding(weight, indices)", "_ k, ... -> ... k | linear {0}"),
    Row("gather", "aten.embedding_dense_backward(grad, indices, num_weights=, padding_idx=, scale_grad_by_freq=)", computed.embedding_backward),
    Row("gather", "aten.gather(x, dim=, index)", computed.gather),
    *(Row("gather", f"aten.scatter.{overload}(x, dim=, index, src)", computed.scatter) for overload in ("src", "reduce")),
    *(Row("gather", f"aten.scatter.{overload}(x, dim=, index)", computed.scatter) for overload in ("value", "value_reduce")),
    Row("gather", "aten.scatter_add(x, dim=, index, src)", computed.scatter_add),
    Row("gather", "aten.scatter_reduce(x, dim=, index, src)", computed.scatter_reduce),
    Row("gather", "aten.index_select(x, dim=, index)", "... _, i -> ... i | linear {0}", at="dim"),
    Row("gather", "aten.index_add(x, dim=, index, source)", "... _ +i, i, ... i -> ... _ +i | linear {0 2}", at="dim"),
    Row("gather", "aten.index_copy(x, dim=, index, source)", "... _, i!, ... i! -> ... _", at="dim"),
    Row("gather", "aten.index_fill(x, dim=, index)", "... _, _ -> ... _", at="dim"),
    *(Row("gather", f"aten.{name}(x, indices*)", computed.index) for name in ("index", "_unsafe_index")),
    *(Row("gather", f"aten.{name}(x, indices*, values, accumulate=False)", computed.index_put) for name in ("index_put", "_unsafe_index_put")),
    Row("gather", "aten.one_hot", "... -> ... _"),
    # -- cross-entropy: rows and classes
    Row("cross-entropy", "autopar.nll_loss(logp, target, ignore_index=, offset=)", "... c, ... -> ... | linear {0}", local=(("offset", "start c"),)),
    Row("cross-entropy", "autopar.nll_loss_backward(grad, target, classes=, ignore_index=, offset=)", "..., ... -> ... c | linear {0}",
        local=(("classes", "extent c"), ("offset", "start c"))),
    Row("cross-entropy", "aten.nll_loss_forward(x, target, weight?, reduction=, ignore_index=)", computed.negative_log_likelihood),
    # -- factory
    *(Row("factory", f"aten.{name}(size=)", computed.full, local=_SIZE) for name in ("zeros", "empty")),
    Row("factory", "aten.full(size=, fill_value=)", computed.full, local=_SIZE),
    *(Row("factory", f"aten.{name}(size=)", "-> ...", local=_SIZE) for name in ("ones", "rand", "randn")),
    Row("factory", "aten.randint(high=, size=)", "-> ...", local=_SIZE),
    Row("factory", "aten.randint.low(low=, high=, size=)", "-> ...", local=_SIZE),
    Row("factory", "aten.new_zeros(x, size=)", computed.new_full, local=_SIZE),
    Row("factory", "aten.new_empty(x, size=)", computed.new_full, local=_SIZE),
    Row("factory", "aten.new_ones(x, size=, fill_value=1)", computed.new_full, local=_SIZE),
    Row("factory", "aten.new_full(x, size=, fill_value=)", computed.new_full, local=_SIZE),
    Row("factory", "aten.zeros_like", "... -> ... | linear {} {0}"),
    *(Row("factory", f"aten.{name}", "-> _...") for name in ("arange", "linspace", "eye", "tril_indices", "triu_indices", "scalar_tensor", "randperm")),
    # -- random
    Row("random", "aten.normal_functional", "... -> ..."),
    Row("random", "aten.multinomial", "_... -> _..."),
    # -- scan, sort, topk
    Row("scan", "aten.cumsum(x, dim=)", "... d! -> ... d! | linear {0}", at="dim"),
    *(Row("scan", f"aten.{name}(x, dim=)", "... d! -> ... d!", at="dim") for name in ("cumprod", "logcumsumexp")),
    *(Row("scan", f"aten.{name}(x, dim=)", "... d! -> ... d!, ... d!", at="dim") for name in ("cummax", "cummin")),
    Row("sort", "aten.sort(x, dim=-1)", "... d! -> ... d!, ... d!", at="dim"),
    Row("sort", "aten.sort.stable(x, stable=None, dim=-1)", "... d! -> ... d!, ... d!", at="dim"),
    Row("sort", "aten.argsort(x, dim=-1)", "... d! -> ... d!", at="dim"),
    Row("sort", "aten.topk(x, k=, dim=-1)", "... _ -> ... _, ... _", at="dim"),
)  # fmt: skip
