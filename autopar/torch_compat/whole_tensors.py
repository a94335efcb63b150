"""Operators of DTensors that are done with whole tensors, on all ranks alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from autopar.torch_compat.tensors import draws, leaves_of, map_tensors


def before(prepare: Callable[[tuple[Any, ...]], None], *operators: Any) -> None:
    """Has these operators of DTensors ``prepare`` their arguments, after what prepares them so far; torch does the rest."""
    from torch.distributed.tensor import DTensor

    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers

    def run(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for one in _PREPARING[operator]:
            one(args)
        return as_torch_does(operator, args, kwargs)

    for operator in operators:
        if handlers.setdefault(operator, run) is run:
            _PREPARING[operator] = []
        if operator in _PREPARING:
            _PREPARING[operator].append(prepare)


_PREPARING: dict[Any, list[Callable[[tuple[Any, ...]], None]]] = {}
"""What prepares the arguments of an operator, in order."""


def as_torch_does(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What DTensor's dispatcher does of an operator that has a handler, without it."""
    from torch.distributed.tensor import DTensor

    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    handler = handlers.pop(operator)
    try:
        return operator(*args, **kwargs)
    finally:
        handlers[operator] = handler


def reduce_partial(tensor: Any) -> None:
    """Reduces a DTensor over ranks where it is still to be, in its place."""
    from torch.distributed.tensor import DTensor, Replicate

    if isinstance(tensor, DTensor) and any(placement.is_partial() for placement in tensor.placements):
        whole = tensor.redistribute(placements=[Replicate() if item.is_partial() else item for item in tensor.placements])
        tensor._local_tensor, tensor._spec = whole._local_tensor, whole._spec


def whole_of(tensor: torch.Tensor) -> torch.Tensor:
    """Of a DTensor all of it. Collective."""
    from torch.distributed.tensor import DTensor

    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def cut_into(tensor: Any, whole: torch.Tensor) -> None:
    """Writes into a DTensor what all ranks hold whole."""
    made = on_all(whole, tensor.device_mesh)
    if any(placement.is_partial() for placement in tensor.placements):
        tensor._local_tensor, tensor._spec = made._local_tensor, made._spec
    else:
        tensor._local_tensor.copy_(made.redistribute(placements=tensor.placements)._local_tensor)


def on_all(tensor: torch.Tensor, mesh: Any) -> Any:
    """A DTensor of what all ranks hold whole."""
    from torch.distributed.tensor import DTensor, Replicate

    return DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)


@torch.no_grad()
def in_whole(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs an operator on whole tensors, on all ranks alike; what it writes to is cut again. Numbers that it draws are the first rank's."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._collective_utils import mesh_broadcast

    given = [item for item in leaves_of((args, kwargs)) if isinstance(item, DTensor)]
    wholes = {id(item): whole_of(item).clone() for item in given}
    taken_args, taken = map_tensors(lambda item: wholes.get(id(item), item), (args, kwargs))
    made, mesh = operator(*taken_args, **taken), given[0].device_mesh
    if draws(operator):
        for tensor in {id(one): one for one in (*leaves_of(made), *wholes.values()) if isinstance(one, torch.Tensor)}.values():
            for axis in range(mesh.ndim):
                mesh_broadcast(tensor, mesh, axis)
    own = {id(wholes[id(item)]): item for item in given}
    for index, argument in enumerate(operator._schema.arguments):
        if argument.alias_info and argument.alias_info.is_write:
            for tensor in leaves_of(args[index] if index < len(args) else kwargs.get(argument.name)):
                if id(tensor) in wholes:  # a plain one, a count of steps, is written to as it is
                    cut_into(tensor, wholes[id(tensor)])
    return map_tensors(lambda item: own[id(item)] if id(item) in own else on_all(item, mesh), made)


def is_view(operator: Any) -> bool:
    """Whether what an operator gives shares memory with what it is given."""
    return any(item.alias_info and not item.alias_info.is_write for item in operator._schema.returns)


def argument_of(operator: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], otherwise: Any) -> Any:
    """The argument of an operator's call with this name; ``otherwise`` where the operator has none of it."""
    for index, argument in enumerate(operator._schema.arguments):
        if argument.name == name:
            return args[index] if index < len(args) else kwargs.get(name, argument.default_value)
    return otherwise
