"""Plan -> ShardedModule: the model is captured again, held against the plan, and its schedule bound to this rank."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autopar.errors import MismatchError, UsageError
from autopar.importer import Capture, capture
from autopar.recording import machine_of, replay
from autopar.runtime.agreement import check_agreement
from autopar.runtime.backends import ProcessRanks, TracedRanks
from autopar.runtime.calls import CallTree, is_leaf
from autopar.runtime.emission import emit
from autopar.runtime.execution import bind, groups_needed
from autopar.runtime.module import Inputs, ShardedModule, Step, check_gradient_specs
from autopar.runtime.weights import Initialise, Place, copy_tree, has_no_values, initialise, own_tensors, shard_weights
from autopar.schedule import Schedule
from cost_models import Mesh

if TYPE_CHECKING:
    from autopar.plan import Plan

Execute = Literal["eager", "graph", "compiled"]


def compile_plan(
    model: nn.Module,
    plan: Plan,
    *,
    loss: Callable[..., Any] | None = None,
    inputs: Inputs = "global",
    device: str | torch.device | None = None,
    init: Initialise | None = None,
    seed: int = 0,
    dropout: bool = True,
    execute: Execute = "eager",
    example: tuple[tuple[Any, ...], Mapping[str, Any], tuple[Any, ...]] | None = None,
) -> ShardedModule:
    """The model as the plan splits it, on this rank. Every rank of the mesh calls it with equal weights (or meta weights).

    Args:
        model: the model that was planned; its loaded weights are kept, and it is not changed.
        loss: the loss it was planned with.
        inputs: ``global``: plain tensors in calls are whole and equal on all ranks; ``local``: they are each rank's own part.
        device: where this rank computes; the GPU that torch has current when the process group uses NCCL, else the CPU.
        init: given the whole model on the device, when it has meta weights; without it submodules' ``reset_parameters`` is used, and
            what that leaves must be loaded with ``load_state_dict`` before the first call.
        seed: of the initialisation, the same on all ranks.
        dropout: False keeps every element (see ``runtime.execution.bind``).
        execute: ``eager``: operator by operator; ``graph``: as two ``torch.fx.GraphModule``s; ``compiled``: those by ``torch.compile``.
        example: (args, kwargs, loss_args) to capture with, where the plan's record of the call does not do: arguments of its own classes.

    Raises:
        MismatchError: the plan was made for another model, mesh or torch; the first difference is named.
    """
    check_torch(plan)
    if inputs not in get_args(Inputs):
        raise UsageError(f"unknown kind of inputs {inputs!r}", f"use one of {', '.join(get_args(Inputs))}")
    start_process_group(machine_of(plan).mesh)
    captured, schedule = rebuild(model, plan, loss=loss, example=example)
    return compile_schedule(
        model, schedule, captured.constants, plan=plan, inputs=inputs, device=device, init=init, seed=seed, dropout=dropout, execute=execute
    )  # fmt: skip


def rebuild(
    model: nn.Module,
    plan: Plan,
    *,
    loss: Callable[..., Any] | None = None,
    example: tuple[tuple[Any, ...], Mapping[str, Any], tuple[Any, ...]] | None = None,
) -> tuple[Capture, Schedule]:
    """The model captured again, and the plan's schedule on it.

    Raises:
        MismatchError: when the plan is not for this model.
    """
    args, kwargs, loss_args = example if example is not None else example_call(plan)
    if loss is None and loss_args:
        hint = "pass the loss that the model was planned with: compile(model, plan, loss=...)"
        raise MismatchError(f"the plan was made with a loss that takes {len(loss_args)} arguments, none is given", hint)
    captured = capture(model, args, kwargs, mode=plan.model.mode, loss=loss, loss_args=loss_args)
    return captured, replay(plan, captured.graph)


def compile_schedule(
    model: nn.Module,
    schedule: Schedule,
    constants: Mapping[str, torch.Tensor],
    *,
    plan: Plan | None = None,
    inputs: Inputs = "global",
    device: str | torch.device | None = None,
    init: Initialise | None = None,
    seed: int = 0,
    dropout: bool = True,
    execute: Execute = "eager",
) -> ShardedModule:
    """The model with its weights placed as the schedule wants them and its forward running it; see ``compile_plan``."""
    if execute not in get_args(Execute):
        raise UsageError(f"unknown way to execute {execute!r}", f"use one of {', '.join(get_args(Execute))}")
    check_agreement(schedule)
    mesh, graph = schedule.machine.mesh, schedule.graph
    where = find_device(device)
    place = Place(mesh, device_mesh_of(mesh, where), dist.get_rank(), where)
    backend = (ProcessRanks if execute == "eager" else TracedRanks)(mesh, groups_needed(schedule))
    executable = bind(schedule, backend, where, dropout=dropout, in_place=execute == "eager")
    if execute != "eager":
        graphs = emit(executable, where)
        executable = graphs.compiled() if execute == "compiled" else graphs
    step = Step(executable, place, inputs)
    check_gradient_specs(step)
    specs = {item.name: schedule.specs[item.tensor] for item in graph.inputs if item.kind in ("parameter", "buffer")}
    sharded, empty = shard_weights(model, specs, place)
    initialise(model, sharded, empty, init, seed, place)
    still = {name for name, _, _, tensor in own_tensors(model) if id(tensor) in empty}
    for item in graph.of_kind("constant"):
        if has_no_values(constants[item.name]):
            hint = "register it as a buffer and pass init=, or build the model with real values for it"
            raise UsageError(f"the model's tensor {item.name} is on meta and is neither a parameter nor a buffer", hint)
    own_constants = {
        item.tensor: place.own_part(constants[item.name], schedule.specs[item.tensor]) for item in graph.of_kind("constant")
    }  # fmt: skip
    call_tree = CallTree(graph.arguments, model.forward)
    return ShardedModule(copy_tree(model, sharded), step, call_tree, own_constants, plan, still)


def check_torch(plan: Plan) -> None:
    """Refuses a plan of another torch minor version: its operators may differ.

    Raises:
        MismatchError: naming both versions.
    """
    made, here = plan.created_by.torch.split("+")[0], torch.__version__.split("+")[0]
    if made.split(".")[:2] != here.split(".")[:2]:
        raise MismatchError(f"the plan was made with torch {made}, this is torch {here}", "plan the model again with this torch")


def start_process_group(mesh: Mesh) -> None:
    """Makes sure that torch.distributed runs with one process for each rank of the mesh.

    Raises:
        MismatchError: another number of processes. UsageError: no processes were started for a mesh of several ranks.
    """
    if not dist.is_initialized():
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
        elif mesh.ranks == 1:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        else:
            hint = f"start the script with: torchrun --nproc-per-node {mesh.ranks} script.py"
            raise UsageError(f"the plan is for the mesh {mesh} of {mesh.ranks} ranks, and this is a single process", hint)
    if dist.get_world_size() != mesh.ranks:
        hint = f"start {mesh.ranks} processes, or plan for a mesh of {dist.get_world_size()} ranks"
        raise MismatchError(f"the plan is for the mesh {mesh} of {mesh.ranks} ranks, {dist.get_world_size()} processes are running", hint)


def find_device(device: str | torch.device | None) -> torch.device:
    """The device this rank computes on."""
    if device is not None:
        return torch.device(device)
    if torch.cuda.is_available() and "nccl" in str(dist.get_backend()):
        local = int(os.environ.get("LOCAL_RANK", torch.cuda.current_device()))
        torch.cuda.set_device(local)
        return torch.device("cuda", local)
    return torch.device("cpu")


def device_mesh_of(mesh: Mesh, device: torch.device) -> DeviceMesh:
    """The mesh as torch's DeviceMesh over the default process group. Collective."""
    return init_device_mesh(device.type, mesh.sizes, mesh_dim_names=mesh.names)


def example_call(plan: Plan) -> tuple[tuple[Any, ...], dict[str, Any], tuple[Any, ...]]:
    """Arguments of the planned shapes, without values, to capture the model with: (args, kwargs, loss_args)."""
    with_gradient = {row.name for row in plan.gradients}

    def build(tree: Any) -> Any:
        if is_leaf(tree):
            name = tree["tensor"]
            row = plan.inputs[name]
            tensor = torch.empty(row.shape, dtype=getattr(torch, row.dtype), device="meta")
            return tensor.requires_grad_(name in with_gradient)
        if isinstance(tree, Mapping):
            return {key: build(child) for key, child in tree.items()}
        if isinstance(tree, (list, tuple)):
            return tuple(build(child) for child in tree)
        return tree

    arguments = plan.model.arguments
    args, loss_args = (tuple(build(item) for item in arguments.get(key, ())) for key in ("args", "loss_args"))
    return args, {key: build(item) for key, item in arguments.get("kwargs", {}).items()}, loss_args
