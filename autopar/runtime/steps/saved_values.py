"""What a step keeps from its forward for its backward."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from autopar.runtime.ranks.collectives import Values
from autopar.torch_compat import versions_of


class Unchanged:
    """Tensors of the user that are read again, each by a name, as they are now."""

    def __init__(self, names: Sequence[str] = (), tensors: Sequence[torch.Tensor] = ()) -> None:
        self._names, self._tensors = names, tensors
        self._versions = versions_of(tensors)

    def find_changed(self) -> str | None:
        """The first of them that was changed in place since."""
        versions = versions_of(self._tensors)
        if versions == self._versions:
            return None
        return next(name for name, now, before in zip(self._names, versions, self._versions, strict=True) if now != before)


def changed_in_place(name: str) -> RuntimeError:
    """What says so of a tensor."""
    return RuntimeError(f"{name} was changed in place between the forward and the backward pass of this step")


class Saved:
    """What the backward pass needs from the forward pass; emptied as the backward pass uses it."""

    def __init__(self, values: Values, owners: Unchanged | None = None) -> None:
        self._values: Values | None = values
        self._owners = owners or Unchanged()

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
        changed = self._owners.find_changed()
        if changed is not None:
            raise changed_in_place(changed)
        found = self._values
        self._values = dict(found) if keep else None
        return found
