"""The optimizers that plans name, as users run them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.cost_models import find_optimizer
from autopar.runtime.optimizers import MasterWeights

LEARNING_RATE = 2e-4
"""Small: where a gradient is zero but for rounding, AdamW takes whole steps of this size in directions that rounding chooses."""


class Own(torch.optim.SGD):
    """Stands for an optimizer that is known by the bytes it keeps alone."""

    def __init__(self, parameters: Any, state_bytes: int, **options: Any) -> None:
        super().__init__(parameters, **options)
        for group in self.param_groups:
            for parameter in group["params"]:
                local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                self.state[parameter]["own"] = torch.zeros(local.numel() * state_bytes, dtype=torch.uint8)


TRAINERS: Mapping[str, Callable[..., Any]] = {
    "adamw": torch.optim.AdamW,
    "adamw-mixed": lambda parameters, **options: MasterWeights(parameters, torch.optim.AdamW, **options),
    "sgd": torch.optim.SGD,
    "sgd-momentum": lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=0.9),
    "none": torch.optim.SGD,
}
"""The optimizers that plans name, as users run them. ``none`` keeps nothing, and a trial that never moves would show little."""


FUSED = ("adamw", "adamw-mixed")
"""Those that hardware files price by their fused step."""


def trainer(name: str, parameters: Any, *, fused: bool = False) -> Any:
    """The optimizer of a trial. A model without parameters gets one with nothing to do, since torch refuses an empty list.

    Args:
        fused: one kernel for all parameters, as steps are priced; of optimizers and parameters that torch has one for.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad] or [nn.Parameter(torch.empty(0))]
    if name in TRAINERS:
        fuses = fused and name in FUSED and all(parameter.is_floating_point() for parameter in trained)
        return TRAINERS[name](trained, lr=LEARNING_RATE, **({"fused": True} if fuses else {}))
    return Own(trained, find_optimizer(name).state_bytes, lr=LEARNING_RATE)
