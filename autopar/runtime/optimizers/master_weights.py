"""An optimizer on float32 copies of half-precision parameters, as ``adamw-mixed`` is priced."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from autopar.runtime.optimizers.host_optimizer import HostOptimizer, Pair, is_hosted

FULL = torch.float32
MASTER = "master"
"""Name of the copy among a parameter's states."""


class MasterWeights(HostOptimizer):
    """Steps float32 copies of the parameters and writes them back, so that small updates are not lost to rounding.

    Parameters of float32 and more are stepped themselves. A gradient is given up as soon as it was copied; clip before ``step``. What is
    written into a parameter (a state dict, a bound on weights) is what its copy becomes. Copies are made in the first step. They lie where
    the parameter's states do: see ``HostOptimizer``.

    Args:
        parameters: of the module, or groups of them with options of their own, as optimizers take them; those that do not require grad are
            left out.
        make: an optimizer class, called with the parameters and ``options``.

    >>> module = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    >>> optimizer = MasterWeights(module.parameters(), torch.optim.SGD, lr=1e-4)
    >>> module(torch.ones(1, 1, dtype=torch.bfloat16)).sum().backward(); optimizer.step()
    >>> optimizer.state[module.weight]["master"].dtype
    torch.float32
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter] | Iterable[dict[str, Any]], make: Callable[..., torch.optim.Optimizer], **options: Any
    ) -> None:  # fmt: skip
        given = list(parameters)
        groups: list[Any] = given if given and isinstance(given[0], dict) else [{"params": given}]
        trained = [{**group, "params": [parameter for parameter in group["params"] if parameter.requires_grad]} for group in groups]
        super().__init__(trained, make, **options)

    def _step_together(self, pairs: Sequence[Pair]) -> None:
        """Where states lie on the host memory is short: float32 gradients are made of one parameter at a time, of as many as pass together.
        """
        short = any(is_hosted(parameter) for group in self.param_groups for parameter in group["params"])
        count = self.at_once if short else max(len(pairs), 1)
        for place in range(0, len(pairs), count):
            super()._step_together(pairs[place : place + count])

    def _begin(self, parameter: nn.Parameter) -> nn.Parameter:
        if self._dtype(parameter) is None:
            return parameter
        master = self.state[parameter].pop(MASTER, None)
        if master is None:
            master = parameter.detach().to(FULL)
        else:  # what was written into the parameter since
            master.copy_(torch.where(parameter == master.to(parameter.dtype), master, parameter))
        stepped = nn.Parameter(master)
        stepped.grad = parameter.grad.to(FULL) if parameter.grad is not None else None
        parameter.grad = None
        return stepped

    def _end(self, parameter: nn.Parameter, stepped: nn.Parameter) -> None:
        if stepped is not parameter:
            parameter.copy_(stepped)
            self.state[parameter][MASTER] = stepped.detach()

    def _dtype(self, parameter: nn.Parameter) -> torch.dtype | None:
        return FULL if parameter.element_size() < FULL.itemsize else None

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """What ``state_dict`` gave. The parameters become what the copies say."""
        super().load_state_dict(state_dict)
        for parameter, state in self.state.items():
            if MASTER in state:
                parameter.copy_(state[MASTER])
