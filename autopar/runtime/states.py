"""Saving and loading of a compiled module and its parts: the model's own names, hooks, extra state and methods, weights as they lie."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.runtime.programs import Programs
from autopar.runtime.weights import as_placed
from autopar.torch_compat import STATE_HOOKS

_ITSELF = "autopar"
"""The key of the hook that lays what is loaded."""


class OwnStates(nn.Module):
    """Saves and loads as the ``tree`` does, a module of the model's own class with the same weights and the same hooks."""

    tree: nn.Module

    def adopt_states(self, programs: Programs) -> None:
        """From now on what is loaded into the tree, or into a part of it by itself, may be whole or lie in any way."""
        self.__dict__.update({kind: self.tree.__dict__[kind] for kind in STATE_HOOKS})
        for part in self.tree.modules():
            hooks, handle = part._load_state_dict_pre_hooks, part.register_load_state_dict_pre_hook(partial(_lay, programs))
            hooks[_ITSELF] = hooks.pop(handle.id)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own, of DTensors."""
        return self.tree.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own; takes whole tensors and DTensors in any placements, also of buffers that are not persistent, by name."""
        result = self.tree.load_state_dict(*args, **kwargs)
        self.check_loaded()
        return result

    def check_loaded(self) -> None:
        """Called after a state dict was loaded."""

    def _save_to_state_dict(self, *args: Any) -> None:
        self.tree._save_to_state_dict(*args)

    def _load_from_state_dict(self, *args: Any) -> None:
        self.tree._load_from_state_dict(*args)


def _lay(programs: Programs, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Mapping[str, Any], *_: Any) -> None:
    """Whole tensors and DTensors in other placements become DTensors placed as the part's; what is tied stays so with ``assign``.

    Buffers that are not persistent are written to here: torch would call them unexpected.
    """
    replaces, assigned = metadata.get("assign_to_params_buffers", False), dict[int, nn.Parameter]()
    for name, tensor in (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)):
        value = state.get(prefix + name)
        becomes = nn.Parameter if replaces and isinstance(tensor, nn.Parameter) else torch.Tensor
        if not isinstance(tensor, DTensor) or not isinstance(value, torch.Tensor):
            continue
        if not (isinstance(value, becomes) and _lies_as(value, tensor)):  # the whole, of which this is a part, has laid it
            placed: torch.Tensor = as_placed(value, tensor, name, programs.main.place)
            if becomes is nn.Parameter:
                placed = assigned.setdefault(id(tensor), nn.Parameter(placed, tensor.requires_grad))
            state[prefix + name] = placed
    for name in module._non_persistent_buffers_set:
        value, buffer = state.get(prefix + name), module._buffers.get(name)
        if isinstance(value, torch.Tensor) and isinstance(buffer, DTensor):
            del state[prefix + name]
            with torch.no_grad():
                buffer.copy_(as_placed(value, buffer, name, programs.main.place))


def _lies_as(value: torch.Tensor, tensor: DTensor) -> bool:
    alike = isinstance(value, DTensor) and value.placements == tensor.placements and value.device_mesh == tensor.device_mesh
    return alike and value.shape == tensor.shape
