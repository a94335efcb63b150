"""What a step keeps from its forward for its backward."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from autopar.runtime.collectives import Values


class Saved:
    """What the backward pass needs from the forward pass; emptied as the backward pass uses it."""

    def __init__(self, values: Values, owners: Iterable[tuple[str, torch.Tensor]] = ()) -> None:
        self._values: Values | None = values
        self._owners = [(name, tensor, tensor._version) for name, tensor in owners]

    @property
    def kept(self) -> bool:
        """Whether the values are still held, for another backward pass."""
        return self._values is not None

    def take(self, *, keep: bool) -> Values:
        """The values by name.

        Raises:
            RuntimeError: already taken, or a parameter, buffer, input or output was changed in place since the forward pass.
        """
        if self._values is None:
            raise RuntimeError("backward through this step a second time: its saved values are freed; use retain_graph=True the first time")
        for name, owner, version in self._owners:
            if owner._version != version:
                raise RuntimeError(f"{name} was changed in place between the forward and the backward pass of this step")
        found = self._values
        self._values = dict(found) if keep else None
        return found
