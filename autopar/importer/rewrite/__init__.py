"""torch operators swapped for dialect compositions while the exported graph is traced again.

One table at the end: torch operator to a function of the same arguments. The functions run under the joint tracing, so
that what they call is what the graph holds, and autograd sees the dialect's own gradients.

contractions, convolutions, attentions, normalisation, losses, reductions, extremes, diagonals, recurrences, strides, selection,
bags, experts, concatenation, factorisations, statistics: the functions, by kind.
called: those that are swapped where the model calls them.
patterns: dialect operators that a model writes out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from autopar.dialect.noise import draws, seeded_source
from autopar.importer.rewrite.attentions import attention_replacement
from autopar.importer.rewrite.concatenation import cat
from autopar.importer.rewrite.contractions import addbmm, addmm, addr, bilinear, einsum, linear, matmul, uncast, vdot
from autopar.importer.rewrite.convolutions import convolution, convolve, convolve_steps
from autopar.importer.rewrite.diagonals import DIAGONALS, trace
from autopar.importer.rewrite.experts import registered
from autopar.importer.rewrite.extremes import aminmax, extreme, kth_value, place, ranked
from autopar.importer.rewrite.factorisations import cholesky, inverse, solve
from autopar.importer.rewrite.losses import (
    Flattened,
    binary_cross_entropy,
    binary_cross_entropy_with_logits,
    elementwise,
    embedding,
    multilabel_margin_loss,
    nll_loss,
    precise,
    soft_margin_loss,
)
from autopar.importer.rewrite.normalisation import batch_norm, rms_norm
from autopar.importer.rewrite.recurrences import recurrences
from autopar.importer.rewrite.reductions import DECOMPOSITIONS, mean, product
from autopar.importer.rewrite.selection import masked_scatter
from autopar.importer.rewrite.strides import STRIDED, adaptive_average, affine_grid, channel_shuffle, fill_diagonal

aten = torch.ops.aten
Replacement = Callable[..., Any]


def _nothing(*_: Any, **__: Any) -> None:
    """Checks: by values, which no program looks at, and export's own of what it recorded, which hold no longer where a replacement
    computes in another dtype."""


def seeded(next_seed: Callable[[], int]) -> dict[Any, Replacement]:
    """What is taken apart below autograd, wherever it stands: draws inside of torch's own operators and gradients, means, diagonals,
    what is read by strides, and checks of what was factorised."""
    return {**DECOMPOSITIONS, **DIAGONALS, **STRIDED, **draws(seeded_source(next_seed)), aten._linalg_check_errors.default: _nothing}


def replacements(next_seed: Callable[[], int]) -> dict[Any, Replacement]:
    """The table for one walk over one exported graph; ``next_seed`` numbers its draws."""
    flattened = Flattened()
    return {
        aten.linear.default: linear,
        aten.matmul.default: matmul,
        aten.mm.default: matmul,
        aten.bmm.default: matmul,
        aten.mv.default: uncast(matmul),
        aten.dot.default: uncast(matmul),
        aten.addmm.default: addmm,
        aten.baddbmm.default: addmm,
        aten.addmv.default: uncast(addmm),
        aten.addbmm.default: addbmm,
        aten.addr.default: addr,
        aten.einsum.default: einsum,
        aten.bilinear.default: uncast(bilinear),
        aten.vdot.default: uncast(vdot),
        aten.conv1d.default: convolve(1),
        aten.conv2d.default: convolve(2),
        aten.conv3d.default: convolve(3),
        aten.conv1d.padding: convolve(1),
        aten.conv2d.padding: convolve(2),
        aten.conv3d.padding: convolve(3),
        aten.conv_tbc.default: convolve_steps,
        aten.convolution.default: convolution,
        aten.scaled_dot_product_attention.default: attention_replacement(next_seed),
        aten.cat.default: cat,
        aten.embedding.default: embedding,
        aten.view.default: flattened.noting(aten.reshape.default),  # what lay in another order in memory may lie in this one here
        aten.reshape.default: flattened.noting(aten.reshape.default),
        aten.flatten.using_ints: flattened.noting(aten.flatten.using_ints),
        aten.cross_entropy_loss.default: flattened.cross_entropy,
        aten.nll_loss.default: precise(nll_loss),
        aten.nll_loss_nd.default: precise(nll_loss),
        aten.nll_loss2d.default: precise(nll_loss),
        aten.mse_loss.default: precise(elementwise(aten.mse_loss.default)),
        aten.smooth_l1_loss.default: precise(elementwise(aten.smooth_l1_loss.default)),
        aten.huber_loss.default: precise(elementwise(aten.huber_loss.default)),
        aten.multilabel_margin_loss.default: precise(multilabel_margin_loss),
        aten.soft_margin_loss.default: precise(soft_margin_loss),
        aten.binary_cross_entropy.default: precise(binary_cross_entropy),
        aten.binary_cross_entropy_with_logits.default: precise(binary_cross_entropy_with_logits),
        aten.batch_norm.default: batch_norm,
        aten.rms_norm.default: rms_norm,
        aten.max.dim: extreme(largest=True),
        aten.min.dim: extreme(largest=False),
        aten.argmax.default: place(largest=True),
        aten.argmin.default: place(largest=False),
        aten.aminmax.default: aminmax,
        aten.median.dim: ranked(aten.median.dim),
        aten.nanmedian.dim: ranked(aten.nanmedian.dim),
        aten.mode.default: ranked(aten.mode.default),
        aten.kthvalue.default: kth_value,
        aten.mean.default: mean,
        aten.mean.dim: mean,
        aten.prod.default: product,
        aten.prod.dim_int: product,
        aten.inverse.default: inverse,
        aten.linalg_inv.default: inverse,
        aten.linalg_cholesky.default: cholesky,
        aten.linalg_solve.default: precise(solve),
        aten.masked_scatter.default: masked_scatter,
        aten.trace.default: precise(trace),
        aten.channel_shuffle.default: channel_shuffle,
        aten.affine_grid_generator.default: affine_grid,
        **STRIDED,
        aten.fill_diagonal_.default: fill_diagonal,
        aten.adaptive_avg_pool1d.default: adaptive_average(aten.adaptive_avg_pool1d.default, aten.mean.dim, 1),
        aten.adaptive_avg_pool2d.default: adaptive_average(aten.adaptive_avg_pool2d.default, aten.mean.dim, 2),
        aten.adaptive_avg_pool3d.default: adaptive_average(aten.adaptive_avg_pool3d.default, aten.mean.dim, 3),
        aten._assert_tensor_metadata.default: _nothing,
        **registered(),
        **recurrences(next_seed),
        **draws(seeded_source(next_seed)),
    }
