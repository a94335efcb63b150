"""An optimizer on float32 copies of half-precision parameters, as ``adamw-mixed`` is priced."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

FULL = torch.float32


class MasterWeights:
    """Steps float32 copies of the parameters and writes them back, so that small updates are not lost to rounding.

    Parameters of float32 and more are stepped themselves. A gradient is given up as soon as it was copied; clip before ``step``. What is
    written into a parameter (a state dict, a bound on weights) is what its copy becomes. A learning rate scheduler takes ``inner``.

    Args:
        parameters: of the module, or groups of them with options of their own, as optimizers take them; those that do not require grad are
            left out.
        make: an optimizer class, called with the copies and ``options``.

    >>> module = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    >>> optimizer = MasterWeights(module.parameters(), torch.optim.SGD, lr=1e-4)
    >>> optimizer.masters[0].dtype
    torch.float32
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter] | Iterable[dict[str, Any]], make: Callable[..., torch.optim.Optimizer], **options: Any
    ) -> None:  # fmt: skip
        self.parameters: list[nn.Parameter] = []
        self.masters: list[nn.Parameter] = []
        given = list(parameters)
        grouped = bool(given) and isinstance(given[0], dict)
        groups: list[Any] = given if grouped else [{"params": given}]
        self.inner = make([{**group, "params": self._copied(group["params"])} for group in groups], **options)

    def _copied(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """What is stepped for each of a group."""
        begin = len(self.masters)
        for parameter in parameters:
            if parameter.requires_grad:
                half = parameter.element_size() < FULL.itemsize
                self.parameters.append(parameter)
                self.masters.append(nn.Parameter(parameter.detach().to(FULL)) if half else parameter)
        return self.masters[begin:]

    @torch.no_grad()
    def step(self) -> None:
        """One step from the gradients that the parameters hold."""
        pairs = [(parameter, master) for parameter, master in zip(self.parameters, self.masters, strict=True) if parameter is not master]
        for parameter, master in pairs:
            master.copy_(torch.where(parameter == master.to(parameter.dtype), master, parameter))  # what was written into it since
            master.grad = None if parameter.grad is None else parameter.grad.to(FULL)
            parameter.grad = None
        self.inner.step()
        for parameter, master in pairs:
            parameter.copy_(master)
            master.grad = None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the parameters' gradients, or makes them zero."""
        for parameter in self.parameters:
            if set_to_none or parameter.grad is None:
                parameter.grad = None
            else:
                parameter.grad.zero_()

    @property
    def state(self) -> Mapping[Any, Mapping[str, Any]]:
        """What is kept for each copy, the copy itself with it."""
        own = {id(parameter) for parameter in self.parameters}
        return {
            master: {**self.inner.state.get(master, {}), **({} if id(master) in own else {"master": master})} for master in self.masters
        }  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's, and the copies by place; DTensors, as ``torch.distributed.checkpoint`` takes them."""
        return {"inner": self.inner.state_dict(), "masters": {str(index): master.detach() for index, master in enumerate(self.masters)}}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """What ``state_dict`` gave. The parameters become what the copies say."""
        self.inner.load_state_dict(state["inner"])
        for index, (parameter, master) in enumerate(zip(self.parameters, self.masters, strict=True)):
            master.copy_(state["masters"][str(index)])
            if parameter is not master:
                parameter.copy_(master)
