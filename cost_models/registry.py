"""The cost models by name."""

from __future__ import annotations

from collections.abc import Mapping

from .communication import Communication
from .model import CostModel
from .roofline import Roofline

COST_MODELS: Mapping[str, CostModel] = {"roofline": Roofline(), "communication": Communication()}
