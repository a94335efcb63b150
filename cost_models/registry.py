"""The cost models by name."""

from __future__ import annotations

from collections.abc import Mapping

from cost_models.communication import Communication
from cost_models.model import CostModel
from cost_models.roofline import Roofline

COST_MODELS: Mapping[str, CostModel] = {"roofline": Roofline(), "communication": Communication()}
