"""``autopar.uniform`` and ``autopar.normal``: random numbers that are a function of a seed in the graph and of the step.

What a model draws (``randn_like``, ``bernoulli``, ``normal_``, ...) is captured as arithmetic on these two, for the reason that
dropout has a seed of its own: replicas agree and shards differ, whatever state the ranks' own generators are in.
"""

from __future__ import annotations

import torch
from torch import Tensor

from autopar.dialect.dropout import generator
from autopar.dialect.library import define

ALPHA = 1.7580993408473766
"""SELU's scale times its alpha: alpha dropout puts minus this in place of a dropped element."""


def _uniform(like: Tensor, seed: int) -> Tensor:
    """Numbers in [0, 1), of the tensor's shape and dtype."""
    return torch.rand(like.shape, dtype=like.dtype, device=like.device, generator=generator(like.device, seed))


def _normal(like: Tensor, seed: int) -> Tensor:
    """Numbers of mean 0 and variance 1, of the tensor's shape and dtype."""
    return torch.randn(like.shape, dtype=like.dtype, device=like.device, generator=generator(like.device, seed))


def _shapes(like: Tensor, seed: int) -> Tensor:
    return like.new_empty(like.shape)


define("uniform(Tensor like, int seed) -> Tensor", _uniform, _shapes)
define("normal(Tensor like, int seed) -> Tensor", _normal, _shapes)
