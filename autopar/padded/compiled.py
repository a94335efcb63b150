"""A module whose calls are padded to planned lengths, on this rank."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autopar.cost_models import Execution
from autopar.errors import UsageError
from autopar.options import user_errors
from autopar.padded.planning import Padded, load_padded
from autopar.recording import machine_of
from autopar.rows import Outputs
from autopar.runtime import ShardedModule
from autopar.runtime.module.compiling import (
    check_mesh,
    check_parameters,
    check_torch,
    compile_schedule,
    execution_of,
    rebuild,
    shared_plans,
    start_process_group,
)
from autopar.runtime.ranks.agreement import everyones, together
from autopar.runtime.ranks.groups import team_of
from autopar.runtime.weights.sharding import Initialise


def compile_padded(
    model: nn.Module,
    padded: Padded | str | os.PathLike[str] | None,
    *,
    loss: Callable[..., Any] | None = None,
    mesh: DeviceMesh | None = None,
    outputs: Outputs = "placed",
    device: str | torch.device | None = None,
    init: Initialise | None = None,
    seed: int = 0,
    execute: Execution | None = None,
) -> ShardedModule:
    """The model as planned, on this rank, for batches of any length up to the longest. Every rank of the mesh calls it.

    A call is padded at its end to the next planned length, and outputs are cut back. Before the first padded call it is seen whether
    padding changes the result (``runtime.programs.padding``).

    Args:
        padded: the plans or their folder, the same on all ranks; None where another rank's are to be received.
        model, loss, mesh, outputs, device, init, seed, execute: as of ``compile``.

    Raises:
        MismatchError: the plans were made for another model, mesh or torch, or ranks differ.
    """
    if isinstance(padded, str | os.PathLike):
        padded = load_padded(padded)
    if padded is not None and not isinstance(padded, Padded):
        raise UsageError(f"a {type(padded).__name__} is no plans of lengths", "pass what plan_padded or load_padded returns, or a folder")
    with user_errors():
        plans = shared_plans(padded.plans if padded is not None else None, mesh, device)
        machine = machine_of(next(iter(plans.values())))
        if mesh is None:
            start_process_group(machine.mesh)
        else:
            check_mesh(mesh, machine.mesh)
        team = team_of(mesh)
        given = everyones(None if padded is None else (dict(padded.values), padded.dim), team)
        values, dim = next(item for item in given if item is not None)
        made = Padded(plans, values, dim)
        first = next(iter(plans.values()))
        loss = loss or first.loss
        steps = together(lambda: [_rebuilt(model, plan, loss) for plan in plans.values()], team)
        (captured, schedule), *others = steps
        module = compile_schedule(
            model, schedule, captured.constants, plan=first, loss=loss, mesh=mesh, inputs=first.model.inputs or "global", outputs=outputs,
            device=device, init=init, seed=seed, execute=execute or execution_of(first), also=others, left=captured.left,
            result=captured.result, read=captured.read,
        )  # fmt: skip
    module.pad_calls(replace(made.padding, checked=frozenset()))
    return module


def _rebuilt(model: nn.Module, plan: Any, loss: Callable[..., Any] | None) -> Any:
    check_torch(plan)
    check_parameters(model, plan)
    return rebuild(model, plan, loss=loss)
