"""``autopar.on_axes``: a value that lies over some axes of the mesh as the model says. It computes nothing, and the planner offers no other
layout.

So lie the parts that go into a ``local_map`` region of the model's, and those that come out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopar.dialect.library import define


def _on_axes(x: Tensor, over: str) -> Tensor:
    return torch.ops.aten.alias.default(x)


def _shapes(x: Tensor, over: str) -> Tensor:
    return torch.empty_like(x)


def _gradient(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
    return gradient, None


define("on_axes(Tensor x, str over) -> Tensor", _on_axes, _shapes, _gradient)
"""``over``: see ``autopar.sharding.AxisLayout``. The gradient is free."""
