"""``autopar.shard``: a value that the model says itself how to split. It computes nothing; the planner reads the spec as a pin."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopar.dialect.library import define


def _shard(x: Tensor, spec: str) -> Tensor:
    return torch.ops.aten.alias.default(x)


def _shard_shapes(x: Tensor, spec: str) -> Tensor:
    return torch.empty_like(x)


def _gradient(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
    return gradient, None


define("shard(Tensor x, str spec) -> Tensor", _shard, _shard_shapes, _gradient)
