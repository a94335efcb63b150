"""Saving and loading of a compiled module and its parts: the model's own names, hooks, extra state and methods, weights as they lie."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.errors import UsageError
from autopar.runtime.programs.programs import Programs
from autopar.runtime.ranks.agreement import everyones
from autopar.runtime.weights.sharding import as_placed
from autopar.torch_compat import STATE_HOOKS, values_of

_ITSELF = "autopar"
"""The key of the hooks that lay what is loaded, and look at it."""


class OwnStates(nn.Module):
    """Saves and loads as the ``tree`` does, a module of the model's own class with the same weights and the same hooks."""

    tree: nn.Module

    def adopt_states(self, programs: Programs) -> None:
        """From now on what is loaded into the tree, or into a part of it by itself, may be whole or lie in any way.

        A buffer that is a constant of a program stays what it is.
        """
        self.__dict__.update({kind: self.tree.__dict__[kind] for kind in STATE_HOOKS})
        paths: dict[nn.Module, list[str]] = {}
        for path, part in self.tree.named_modules(remove_duplicate=False):
            paths.setdefault(part, []).append(path)
        for part, named in paths.items():
            hooks, handle = part._load_state_dict_pre_hooks, part.register_load_state_dict_pre_hook(partial(_lay, programs))
            hooks[_ITSELF] = hooks.pop(handle.id)
            after, handle = part._load_state_dict_post_hooks, part.register_load_state_dict_post_hook(partial(_check, programs, named))
            after[_ITSELF] = after.pop(handle.id)

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


def save_pretrained(module: Any, save_directory: str | os.PathLike[str], **options: Any) -> None:
    """What stands for the method of transformers: whole weights, written by the first process. Every rank calls it.

    Args:
        module: a compiled model of transformers.
        options: of the model's own method; ``state_dict`` may hold DTensors.

    Raises:
        RuntimeError: the writing process could not; says what it said.
    """
    given = options.pop("state_dict", None)
    state, wholes = module.tree.state_dict(keep_vars=True) if given is None else given, dict[int, torch.Tensor]()
    writes = options.pop("is_main_process", dist.get_rank() == 0)
    for tensor in state.values():  # a tied one once, so that it is known as such
        if isinstance(tensor, torch.Tensor) and id(tensor) not in wholes:
            whole = tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()
            wholes[id(tensor)] = whole.cpu() if writes else whole[:0] if whole.dim() else whole
    failure: Exception | None = None
    if writes:
        try:
            whole_state = {name: wholes.get(id(value), value) for name, value in state.items()}
            module.tree.save_pretrained(save_directory, state_dict=whole_state, **options)
        except Exception as error:  # the others wait to hear of it
            failure = error
    said = everyones(None if failure is None else f"{type(failure).__name__}: {failure}", module.place.team)
    if failure is not None:
        raise failure
    for rank, words in enumerate(said):
        if words is not None:
            raise RuntimeError(f"rank {rank} could not save the model: {words}")


IN_PLACE_OF = {"save_pretrained": save_pretrained}
"""Methods of a model's own class that are others where it is compiled."""


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


def _check(programs: Programs, paths: Sequence[str], module: nn.Module, *_: Any) -> None:
    """Called after a part was loaded, which has these paths.

    Raises:
        UsageError: a buffer of it has another value than the one that is a constant of a program.
    """
    for step in (programs.main, *programs.made.values()):
        for name, value in step.read.items():
            path, last = name.rpartition(".")[::2]
            buffer = module._buffers.get(last) if path in paths else None
            now = None if buffer is None else values_of(buffer)
            if now is not None and not torch.equal(now.cpu(), value):
                what = f"the buffer {name} becomes another one, and forward reads its sizes or numbers"
                hint = "load it into the model before that is planned and compiled"
                raise UsageError(f"{what}: they are constants of the program", hint)


def _lies_as(value: torch.Tensor, tensor: DTensor) -> bool:
    alike = isinstance(value, DTensor) and value.placements == tensor.placements and value.device_mesh == tensor.device_mesh
    return alike and value.shape == tensor.shape
