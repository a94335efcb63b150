"""The dialect: operators of ours that stay whole in captured graphs, registered with torch as ``autopar::*``.

Importing this package registers them; ``torch.ops.autopar.contract`` and the others then exist. Each exists because its
torch counterparts hide what can be split (linears flatten their batch), differ by device (attention kernels), or fuse
parts that split differently (both gradients of a convolution in one operator).

contraction, convolution, attention, lookup, extreme, diagonal, ctc, experts, dispatch, grouped, batch_norm, rms_norm, recurrence, dropout,
noise, shard, on_axes, collectives: the operators.
attention_kernels: what attention runs.
library: how one is declared.
"""

from __future__ import annotations

from autopar.dialect import (
    attention,
    batch_norm,
    collectives,
    contraction,
    convolution,
    ctc,
    diagonal,
    dispatch,
    dropout,
    experts,
    extreme,
    grouped,
    lookup,
    noise,
    on_axes,
    recurrence,
    rms_norm,
    shard,
)
from autopar.dialect.dropout import random_step

__all__ = [
    "attention", "batch_norm", "collectives", "contraction", "convolution", "ctc", "diagonal", "dispatch", "dropout", "experts", "extreme",
    "grouped", "lookup", "noise", "on_axes", "random_step", "recurrence", "rms_norm", "shard",
]  # fmt: skip
