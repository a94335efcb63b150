"""Plan -> ShardedModule: the model is captured again, held against the plan, and its schedule bound to this rank."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from itertools import count
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.rendezvous import rendezvous

from autopar.cost_models import EXECUTIONS, Execution, Mesh
from autopar.errors import CaptureError, MismatchError, UsageError
from autopar.importer import Capture, capture, cut_call
from autopar.importer.arguments.containers import Kind
from autopar.pipeline_plan import PipelinePlan
from autopar.plan import Plan
from autopar.recording import machine_of, replay
from autopar.rows import Inputs, Outputs
from autopar.rules import splits_experts
from autopar.runtime.execution.binding import bind
from autopar.runtime.execution.cuda_graphs import find_recorder
from autopar.runtime.execution.emission import Graphs, emit
from autopar.runtime.execution.executable import Executable
from autopar.runtime.execution.read_back import check_recordable
from autopar.runtime.execution.replaying import replayed
from autopar.runtime.module.sharded_module import ShardedModule
from autopar.runtime.optimizers.matrix_steps import make_each_orthogonal
from autopar.runtime.programs.programs import Programs
from autopar.runtime.programs.settings import Settings, held_by
from autopar.runtime.ranks.agreement import check_agreement, everyones, fetch, find_sources, together
from autopar.runtime.ranks.backends import Backend, ProcessRanks, TracedRanks
from autopar.runtime.ranks.groups import groups_needed, team_of
from autopar.runtime.ranks.lent_buffers import pause_at_end
from autopar.runtime.steps.calls import CallTree, is_leaf, read_plain
from autopar.runtime.steps.step import Step, check_gradient_specs
from autopar.runtime.weights.checkpoints import chunks, part_of
from autopar.runtime.weights.sharding import Initialise, Place, copy_tree, has_no_values, initialise, own_specs, own_tensors, shard_weights
from autopar.schedule import Schedule
from autopar.seeds import check_seed
from autopar.torch_compat import checkpoint_in_chunks, flatten_axes, forward_of, lay_by_parts, step_whole_matrices, teach_dtensors

_STARTS = count()
"""Process groups that `join_launched` has started in this process: equal on all ranks."""

Example = tuple[tuple[Any, ...], Mapping[str, Any], tuple[Any, ...]]
"""Arguments, keyword arguments, loss arguments."""


def compile_plan(
    model: nn.Module,
    plan: Plan,
    *,
    loss: Callable[..., Any] | None = None,
    inputs: Inputs | None = None,
    outputs: Outputs = "placed",
    device: str | torch.device | None = None,
    init: Initialise | None = None,
    seed: int = 0,
    mesh: DeviceMesh | None = None,
    execute: Execution | None = None,
    example: Example | None = None,
) -> ShardedModule:
    """The model as the plan splits it, on this rank. Every rank of the mesh calls it.

    Args:
        model: the model that was planned; its loaded weights are kept, and it is not changed. Where ranks hold different weights, those
            of the first rank that has values count.
        plan: the same on all ranks (see ``shared_plan``).
        loss: the loss it was planned with.
        inputs: ``global``: plain tensors in calls are whole and equal on all ranks; ``local``: they are each rank's own part. By default as
            planned.
        outputs: ``placed``: results that the plan splits are DTensors; ``full``: they are gathered on every rank, as plain tensors.
        device: where this rank computes. By default the GPU that torch has current when the process group uses NCCL, else the CPU. A single
            process takes the device of the model's weights; for weights on ``meta`` the GPU where there is one.
        init: given the whole model on the device, when it has meta weights; without it submodules' ``reset_parameters`` is used, and
            what that leaves must be loaded with ``load_state_dict`` before the first call.
        seed: of the initialisation, the same on all ranks.
        mesh: the plan's mesh as a DeviceMesh, which may be a part of a larger one: each part then runs a replica, and data parallelism
            around it (``fully_shard``, DistributedDataParallel, averaged gradients) is the caller's. All processes when not given.
        execute: ``eager``: operator by operator; ``graph``: as two ``torch.fx.GraphModule``s; ``compiled``: those by ``torch.compile``;
            ``cuda_graph``: as ``eager``, captured in CUDA graphs at the first call and replayed (see ``execution.replaying``). By default
            what the plan was priced for, else ``eager``.
        example: (args, kwargs, loss_args) to capture with, where the plan's record of the call does not do: arguments of its own classes.

    Raises:
        MismatchError: the plan was made for another model, mesh or torch; the first difference is named.
    """
    if inputs is not None:
        check_one_of("inputs", inputs, get_args(Inputs))
    check_one_of("outputs", outputs, get_args(Outputs))
    check_seed(seed)
    join_launched()
    check_torch(plan)
    loss = loss or plan.loss
    if mesh is None:
        start_process_group(machine_of(plan).mesh)
    else:
        check_mesh(mesh, machine_of(plan).mesh)
    execute, inputs = execute or execution_of(plan), inputs or plan.model.inputs or "global"
    if execute == "cuda_graph":
        find_recorder(find_device(device, model))  # before the model is captured
    captured, schedule = together(lambda: _rebuilt(model, plan, loss, example), team_of(mesh))
    return compile_schedule(
        model, schedule, captured.constants, plan=plan, loss=loss, mesh=mesh, inputs=inputs, outputs=outputs, device=device, init=init,
        seed=seed, execute=execute, left=captured.left, result=captured.result, read=captured.read,
    )  # fmt: skip


def check_one_of(what: str, given: str, known: tuple[str, ...]) -> None:
    """Raises UsageError: the kind of inputs or outputs is none of those known."""
    if given not in known:
        raise UsageError(f"unknown kind of {what} {given!r}", f"use one of {', '.join(known)}")


def execution_of(plan: Plan) -> Execution:
    """The way of execution that a plan was priced for, else ``eager``."""
    return plan.created_by.execution or "eager"


def join_launched() -> None:
    """Starts torch.distributed where a launcher, such as torchrun, started this process, unless it runs already.

    Raises:
        UsageError: the environment lacks a part of what a launcher says.
    """
    if not dist.is_initialized() and "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        try:
            store, rank, ranks = next(rendezvous("env://"))
            # A prefix for each start: torchrun's store outlives a group, and keys of an ended group name ports that nobody listens on.
            store = dist.PrefixStore(f"autopar/{next(_STARTS)}", store)
            dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo", store=store, rank=rank, world_size=ranks)
        except ValueError as error:
            hint = "start the script with torchrun, which sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or set all of them"
            raise UsageError(f"torch.distributed cannot be started from the environment: {error}", hint) from error


def shared_plan(
    plan: Plan | PipelinePlan | None, mesh: DeviceMesh | None, device: str | torch.device | None
) -> Plan | PipelinePlan:  # fmt: skip
    """The plan, or that of the first rank that has one. Collective.

    Args:
        device: of this rank, which NCCL must know before the first exchange.

    Raises:
        UsageError: it is no plan, or no rank has one.
    """
    if plan is not None and not isinstance(plan, Plan | PipelinePlan):
        raise UsageError(f"a {type(plan).__name__} is not a plan", "pass what autopar.plan or autopar.load returns, or a file's path")
    join_launched()
    if dist.is_initialized() and dist.get_world_size() > 1:
        find_device(device)
        team = team_of(mesh)
        holding = everyones(plan is not None, team)
        if any(holding) and not all(holding):
            source = holding.index(True)
            box: list[Any] = [(type(plan), plan.to_json()) if plan is not None and team.rank == source else None]
            dist.broadcast_object_list(box, team.members[source], team.group)
            kind, text = box[0]
            plan = plan or kind.from_json(text, f"the plan of rank {source}")
    if plan is None:
        raise UsageError("there is no plan", "plan on one rank and pass None on the others, or the same plan on all")
    return plan


def shared_plans(plans: Mapping[Any, Plan] | None, mesh: DeviceMesh | None, device: str | torch.device | None) -> dict[Any, Plan]:
    """Several plans by what they are for, or those of the first rank that has some. Collective.

    Raises:
        UsageError: no rank has any. MismatchError: ranks have plans for other calls.
    """
    calls = list(plans) if plans is not None else None
    first = shared_plan(next(iter(plans.values())) if plans is not None else None, mesh, device)
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return dict(plans or {})
    everyone = everyones(calls, team_of(mesh))
    known: list[Any] = next(item for item in everyone if item is not None)
    if any(item not in (None, known) for item in everyone):
        raise MismatchError("ranks have plans of other lengths", "plan on one rank and pass None on the others, or the same plans on all")
    found = {known[0]: first, **{call: shared_plan(plans[call] if plans is not None else None, mesh, device) for call in known[1:]}}
    return {call: plan for call, plan in found.items() if isinstance(plan, Plan)}


def _rebuilt(model: nn.Module, plan: Plan, loss: Callable[..., Any] | None, example: Example | None) -> tuple[Capture, Schedule]:
    check_parameters(model, plan)
    return rebuild(model, plan, loss=loss, example=example)


def rebuild(
    model: nn.Module,
    plan: Plan,
    *,
    loss: Callable[..., Any] | None = None,
    example: Example | None = None,
) -> tuple[Capture, Schedule]:
    """The model captured again, and the plan's schedule on it.

    Raises:
        MismatchError: when the plan is not for this model.
    """
    captured = recapture(model, plan, loss=loss, example=example)
    schedule = replay(plan, captured.graph)
    return replace(captured, graph=schedule.graph), schedule


def recapture(
    model: nn.Module, plan: Plan, *, loss: Callable[..., Any] | None = None, example: Example | None = None
) -> Capture:  # fmt: skip
    """The model captured as it was for the plan. Raises MismatchError: a loss is missing."""
    args, kwargs, loss_args = cut_call(example, plan.microbatches) if example is not None else example_call(plan)
    if loss is None and loss_args:
        hint = "pass the loss that the model was planned with: compile(model, plan, loss=...)"
        raise MismatchError(f"the plan was made with a loss that takes {len(loss_args)} arguments, none is given", hint)
    compute_dtype = plan.model.arguments.get("compute_dtype")
    plain = {name: frozenset(range(len(row.shape))) for name, row in plan.parameters.items() if row.blocks is None}
    try:
        return capture(
            model, args, kwargs, mode=plan.model.mode, loss=loss, loss_args=loss_args, compute_dtype=compute_dtype, plain=plain,
        )  # fmt: skip
    except CaptureError as error:
        if example is None and any(isinstance(value, dict) for value in (*args, *kwargs.values())):
            hint = "a plan knows no classes: for arguments of their own, or keys that are no text, pass example=(args, kwargs, loss_args)"
            raise CaptureError(error.message, hint) from error
        raise


def compile_schedule(
    model: nn.Module,
    schedule: Schedule,
    constants: Mapping[str, torch.Tensor],
    *,
    plan: Plan | None = None,
    loss: Callable[..., Any] | None = None,
    mesh: DeviceMesh | None = None,
    inputs: Inputs = "global",
    outputs: Outputs = "placed",
    device: str | torch.device | None = None,
    init: Initialise | None = None,
    seed: int = 0,
    dropout: bool = True,
    execute: Execution = "eager",
    also: Sequence[tuple[Capture, Schedule]] = (),
    left: tuple[str, ...] = (),
    read: Mapping[str, torch.Tensor] | None = None,
    result: Kind | None = None,
) -> ShardedModule:
    """The model with its weights placed as the schedule wants them and its forward running it; see ``compile_plan``.

    Args:
        also: captures and schedules of further calls, with all weights in the same specs: they are run as planned, not planned anew.
        left: the attributes in which the model's own forward leaves tensors.
        read: the buffers whose values are constants of the schedule, by name.
        result: the classes of what it gives.
        dropout: False keeps every element, scaled as if some were dropped, so that runs can be compared (see ``bind``).
    """
    if execute not in EXECUTIONS:
        raise UsageError(f"unknown way to execute {execute!r}", f"use one of {', '.join(EXECUTIONS)}")
    team, where, machine, graph = team_of(mesh), find_device(device, model), schedule.machine, schedule.graph
    place = Place(machine.mesh, device_mesh_of(machine.mesh, where) if mesh is None else mesh, team, where)

    def bound(captured: Capture, schedule: Schedule) -> Step:
        check_agreement(schedule, team)
        mine = own_constants(schedule, captured.constants, place)
        call = CallTree(captured.graph.arguments, forward_of(model), loss, captured.result)
        made = bind_step(schedule, mine, call, place, inputs, dropout, execute)
        return replace(made, left=captured.left, read=captured.read, outputs=outputs)

    step = bound(Capture(graph, constants, left, result, read or {}), schedule)
    sharded, empty = shard_weights(model, own_specs([schedule]), place)
    initialise(model, sharded, empty, init, seed, place)
    still = {name for name, _, _, tensor in own_tensors(model) if id(tensor) in empty}
    tree = copy_tree(model, sharded)
    if graph.mode == "inference":
        tree.eval()
    hosted = 0 if plan is None else plan.predicted.memory.optimizer_on_host or 0  # further calls are planned with them on the device
    programs = Programs(
        step, tuple(part.training for part in tree.modules()), loss,
        optimizer=plan.model.optimizer if plan is not None else "none",
        memory_limit=machine.hardware.usable_bytes if plan is None else plan.memory_limit_bytes_per_rank + hosted,
        states_bytes=0 if plan is None else plan.predicted.memory.optimizer + hosted,
        bind=bound,
    )  # fmt: skip
    for further, planned in also:
        programs.add(bound(further, planned), tuple(tree.parameters()))
    module = ShardedModule(tree, programs, plan, still)
    programs.settings = Settings(module.parts, held_by(loss, model))
    return module


def bind_step(
    schedule: Schedule, constants: Mapping[str, torch.Tensor], call: CallTree, place: Place, inputs: Inputs, dropout: bool,
    execute: Execution, *, split: bool = False,
) -> Step:  # fmt: skip
    """A schedule bound to this rank. Collective.

    Args:
        constants: this rank's parts, by the graph's names.
        split: whether backward runs in two parts.

    Raises:
        MismatchError: a gradient that does not lie as its parameter. UsageError: CUDA graphs cannot hold the program.
    """
    teach_dtensors()
    checkpoint_in_chunks(chunks)
    lay_by_parts(part_of)
    step_whole_matrices(make_each_orthogonal)
    make_recorder = find_recorder(place.device) if execute == "cuda_graph" else None
    if make_recorder is not None:
        check_recordable(schedule, place.device)
    traced = execute in ("graph", "compiled")
    if execute != "eager":
        check_fixed_sizes(schedule, execute)
    backend: Backend = (TracedRanks if traced else ProcessRanks)(place.mesh, groups_needed(schedule), place.team)
    bound = bind(schedule, backend, place.device, dropout=dropout, in_place=not traced, split=split)
    executable: Executable | Graphs = bound if make_recorder is None else replayed(bound, make_recorder)
    if traced:
        graphs = emit(bound, place.device)
        executable = graphs.compiled() if execute == "compiled" else graphs
    step = Step(executable, place, inputs, call, constants)
    check_gradient_specs(step)
    return step


def check_fixed_sizes(schedule: Schedule, execute: Execution) -> None:
    """Raises UsageError: experts are split among ranks, which have as many rows as chose them; at the model's line."""
    split = next((item.op for item in schedule.operations.values() if splits_experts(item.op, item.strategy)), None)
    if split is not None:
        message = f"{split.location}: experts are split among ranks, to which other numbers of rows go in each call"
        hint = f"plan with execute={execute!r}, which keeps experts whole on a rank, or compile with execute='eager'"
        raise UsageError(f"{message}; {execute!r} execution has fixed sizes", hint)


def own_constants(schedule: Schedule, constants: Mapping[str, torch.Tensor], place: Place) -> dict[str, torch.Tensor]:
    """This rank's parts of the tensors baked into the model, by the graph's names; where ranks differ, of the first rank's. Collective.

    Raises:
        UsageError: a constant without values.
    """
    for name, tensor in constants.items():
        if has_no_values(tensor):
            hint = "register it as a buffer and pass init=, or build the model with real values for it"
            raise UsageError(f"the model's tensor {name} is on meta and is neither a parameter nor a buffer", hint)
    sources, found = find_sources(constants, place.team), {}
    for item in schedule.graph.of_kind("constant"):
        whole = constants[item.name]
        if item.name in sources:
            whole = fetch(whole, sources[item.name], place.team, place.device)
        found[item.tensor] = place.own_part(whole, schedule.specs[item.tensor])
    return found


def check_parameters(model: nn.Module, plan: Plan) -> None:
    """Says what differs in names and shapes before the model is captured. Raises MismatchError."""
    hint = "plan this model, or build it with the sizes it was planned with"
    aliases = {other: name for name, row in plan.parameters.items() for other in row.aliases or ()}
    given = {aliases.get(name, name): value for name, value in model.named_parameters()}
    for name, row in plan.parameters.items():
        if name not in given:
            raise MismatchError(f"the plan has a parameter {name}, the model none of that name", hint)
        here, there = (tuple(given[name].shape), str(given[name].dtype).removeprefix("torch.")), (row.shape, row.dtype)
        if here != there:
            shown = [f"{dtype}{list(shape)}" for shape, dtype in (here, there)]
            raise MismatchError(f"parameter {name} is {shown[0]} in the model, {shown[1]} in the plan", hint)


def check_torch(plan: Plan | PipelinePlan) -> None:
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
        if mesh.ranks == 1:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        else:
            hint = f"start the script with: torchrun --nproc-per-node {mesh.ranks} script.py"
            raise UsageError(f"the plan is for the mesh {mesh} of {mesh.ranks} ranks, and this is a single process", hint)
    if dist.get_world_size() != mesh.ranks:
        hint = f"start {mesh.ranks} processes, plan for a mesh of {dist.get_world_size()} ranks, or pass mesh=, a part of your DeviceMesh"
        raise MismatchError(f"the plan is for the mesh {mesh} of {mesh.ranks} ranks, {dist.get_world_size()} processes are running", hint)
    pause_at_end()


def check_mesh(given: DeviceMesh, planned: Mesh) -> None:
    """Raises MismatchError: the DeviceMesh has other sizes than the plan's mesh."""
    if tuple(given.shape) != planned.sizes:
        hint = f"pass the part of your mesh that the plan was made for, e.g. mesh[{', '.join(map(repr, planned.names))}]"
        raise MismatchError(f"the plan is for the mesh {planned}, the given one has the sizes {list(given.shape)}", hint)


def find_device(device: str | torch.device | None, model: nn.Module | None = None) -> torch.device:
    """The device this rank computes on: the given one, else that of ``pick_device``, which becomes torch's current one.

    A process without a chosen GPU takes that of its place on the machine (``LOCAL_RANK``), if it sees one there.
    """
    if device is not None:
        return torch.device(device)
    current = torch.cuda.current_device() if torch.cuda.is_available() else None
    place = int(os.environ.get("LOCAL_RANK", 0))
    if current == 0 and place < torch.cuda.device_count():
        current = place
    picked = pick_device(current, str(dist.get_backend()), dist.get_world_size(), None if model is None else weights_device(model))
    if picked.type == "cuda":
        torch.cuda.set_device(picked)
    return picked


def pick_device(gpu: int | None, backend: str, ranks: int, weights: torch.device | None) -> torch.device:
    """Where a rank computes when the user does not say.

    Args:
        gpu: the rank's own; None without CUDA.
        backend: of the default process group. NCCL moves tensors of GPUs alone.
        ranks: of the default process group. A single one needs no backend, so its weights decide.
        weights: the device of the model's weights; None for a model whose weights have no values yet.
    """
    if ranks == 1 and weights is not None and backend != "nccl":
        return weights
    if gpu is not None and (ranks == 1 or "nccl" in backend):
        return torch.device("cuda", gpu)
    return torch.device("cpu")


def weights_device(model: nn.Module) -> torch.device | None:
    """The device of the model's first weight that has values."""
    return next((tensor.device for _, _, _, tensor in own_tensors(model) if not has_no_values(tensor)), None)


def device_mesh_of(mesh: Mesh, device: torch.device) -> DeviceMesh:
    """The mesh as torch's DeviceMesh over the default process group, with its flattened ones. Collective."""
    made = share_device_mesh(mesh, device)
    flatten_axes(made)
    return made


_DEVICE_MESHES: dict[tuple[int, dist.ProcessGroup, str, Mesh], DeviceMesh] = {}
"""By process id, default process group, kind of device and mesh. torch keeps a DeviceMesh's process groups to the end, so modules share it.
"""


def share_device_mesh(mesh: Mesh, device: torch.device) -> DeviceMesh:
    """The one DeviceMesh of these axes over the default process group. Collective.

    Meshes of a default group that was destroyed are dropped, but not those that a forked process has from its parent: freeing their
    groups would wait for threads that only the parent has.
    """
    world, process = dist.group.WORLD, os.getpid()
    assert world is not None
    for known in [known for known in _DEVICE_MESHES if known[0] == process and known[1] is not world]:
        del _DEVICE_MESHES[known]
    key = process, world, device.type, mesh
    if key not in _DEVICE_MESHES:
        _DEVICE_MESHES[key] = init_device_mesh(device.type, mesh.sizes, mesh_dim_names=mesh.names)
    return _DEVICE_MESHES[key]


def example_call(plan: Plan) -> tuple[tuple[Any, ...], dict[str, Any], tuple[Any, ...]]:
    """Arguments of the planned shapes, without values, to capture the model with: (args, kwargs, loss_args)."""
    taken = {*plan.parameters, *plan.buffers}
    return example_of(plan.model.arguments, plan.inputs, {row.name for row in plan.gradients if row.name not in taken})


def example_of(
    arguments: Mapping[str, Any], inputs: Mapping[str, Any], with_gradient: Set[str] = frozenset()
) -> tuple[tuple[Any, ...], dict[str, Any], tuple[Any, ...]]:
    """Arguments without values, as a call's record says it.

    Args:
        arguments: ``Graph.arguments``.
        inputs: rows with ``shape`` and ``dtype`` by input name.
        with_gradient: names of inputs that require grad.
    """

    def build(tree: Any) -> Any:
        tree = read_plain(tree)
        if is_leaf(tree):
            name = tree["tensor"]
            if name not in inputs:
                raise MismatchError(f"the call takes {name}, which is none of the plan's inputs", "undo the edit, or plan again")
            row = inputs[name]
            tensor = torch.empty(row.shape, dtype=getattr(torch, row.dtype), device="meta")
            return tensor.requires_grad_(not with_gradient.isdisjoint((name, f"input:{name}")))
        if isinstance(tree, Mapping):
            return {key: build(child) for key, child in tree.items()}
        if isinstance(tree, (list, tuple)):
            return tuple(build(child) for child in tree)
        return tree

    args, loss_args = (tuple(build(item) for item in arguments.get(key, ())) for key in ("args", "loss_args"))
    return args, {key: build(item) for key, item in arguments.get("kwargs", {}).items()}, loss_args
