"""Programs in a folder: what each rank runs and the shards of its weights, to be run without the model's code or a capture.

    plan.json                  the plan; its schedule is the program, the same on all ranks
    rank-00000.safetensors     one file a rank: its parts of parameters, buffers and constants; in the metadata, what each is

Every file names the hash of the plan that it belongs to, so that a folder in which one was changed is refused.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autopar.cost_models import Execution
from autopar.errors import FileError, MismatchError, UsageError
from autopar.files import check_path, umask
from autopar.plan import Plan
from autopar.recording import graph_of, load, machine_of, replay
from autopar.rows import Inputs, Outputs
from autopar.runtime.agreement import check_agreement, together
from autopar.runtime.calls import CallTree
from autopar.runtime.compiling import (
    bind_step,
    check_mesh,
    check_parameters,
    check_torch,
    device_mesh_of,
    find_device,
    join_launched,
    rebuild,
    start_process_group,
)
from autopar.runtime.groups import team_of
from autopar.runtime.module import ShardedModule
from autopar.runtime.placement import from_placements, local_part
from autopar.runtime.programs import Programs
from autopar.runtime.weights import Place, has_no_values, own_tensors
from autopar.schedule import Schedule
from autopar.sharding import ShardingSpec

SCHEMA = "autopar.program/1"
PLAN = "plan.json"
AGAIN = "write the folder again with autopar export"
Part = Callable[[ShardingSpec, int], torch.Tensor]
"""A tensor's part by spec and rank."""


def export_program(
    plan: Plan, model: nn.Module, folder: str | os.PathLike[str], *, loss: Callable[..., Any] | None = None, weights: Sequence[Path] = ()
) -> None:
    """Writes the plan and every rank's shards into ``folder``, whole or not at all. No processes are started.

    Args:
        model: the planned model; where it has no values, ``weights`` must have them.
        loss: as planned.
        weights: safetensors files by the model's names, read block by block, so that a large model is never whole in memory.

    Raises:
        UsageError: the folder holds something, or a weight has no values. MismatchError: the plan is not for this model.
    """
    target = Path(folder)
    _check_free(target)
    check_torch(plan)
    check_parameters(model, plan)
    captured, schedule = rebuild(model, plan, loss=loss or plan.loss)
    mesh, stored = machine_of(plan).mesh, _Stored(weights)
    specs = {name: ShardingSpec.parse(spec.spec) for kind, name, spec in plan.entering if kind in ("parameter", "buffer")}
    described: dict[str, dict[str, Any]] = {}
    parts: dict[str, Part] = {}
    named: dict[int, list[str]] = {}
    for name, _, _, tensor in sorted(own_tensors(model), key=lambda item: item[0] not in specs):
        named.setdefault(id(tensor), []).append(name)
    for name, owner, last, tensor in own_tensors(model):
        if name != named[id(tensor)][0]:
            continue
        file = next((other for other in named[id(tensor)] if other in stored), None)
        spec = specs.get(name, ShardingSpec.replicated(tensor.dim()))
        kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
        described[name] = {"kind": kind, "trained": tensor.requires_grad, "aliases": named[id(tensor)][1:]}
        described[name] |= {"shape": list(tensor.shape), "spec": str(spec), "persistent": last not in owner._non_persistent_buffers_set}
        parts[name] = _of(name, tensor, mesh) if file is None else stored.part(file, tensor, mesh)
    for item in schedule.graph.of_kind("constant"):
        tensor, spec = captured.constants[item.name], schedule.specs[item.tensor]
        described[f"constant:{item.tensor}"] = {"kind": "constant", "shape": list(tensor.shape), "spec": str(spec)}
        parts[f"constant:{item.tensor}"] = _of(item.name, tensor, mesh)
    made = Path(tempfile.mkdtemp(dir=target if target.is_dir() else _parent(target), prefix=f".{target.name}."))
    try:
        plan.save(made / PLAN)
        metadata = {"schema": SCHEMA, "plan_sha256": _sha256(made / PLAN), "tensors": json.dumps(described)}
        for rank in range(mesh.ranks):
            shards = {name: part(ShardingSpec.parse(described[name]["spec"]), rank) for name, part in parts.items()}
            save_file(shards, made / _shard(rank), {**metadata, "rank": str(rank)})
        for written in made.iterdir():
            written.chmod(0o666 & ~umask())
        if target.is_dir():
            for written in sorted(made.iterdir(), key=lambda one: one.name == PLAN):  # what has no plan is no program
                written.rename(target / written.name)
        else:
            made.chmod(0o777 & ~umask())
            made.rename(target)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise FileError(f"cannot write {target}: {reason}", "free some space, or choose another folder") from error
    finally:
        shutil.rmtree(made, ignore_errors=True)


EXPORTED = "give the folder that autopar export wrote"


def load_program(
    folder: str | os.PathLike[str],
    *,
    mesh: DeviceMesh | None = None,
    inputs: Inputs | None = None,
    outputs: Outputs = "placed",
    device: str | torch.device | None = None,
    execute: Execution = "eager",
) -> ShardedModule:
    """This rank's program from a folder that ``autopar export`` wrote: a module that runs the planned call, and trains if that was planned.

    Args:
        mesh, inputs, outputs, device, execute: as for ``compile_plan``.

    Raises:
        FileError: a file that is missing or not what was written. MismatchError: another torch or mesh, or files not of one export.
    """
    check_path(folder, "the program", EXPORTED)
    place_of = Path(folder)
    if not (place_of / PLAN).is_file():
        raise FileError(f"there is no program in {folder!s}: it has no {PLAN}", EXPORTED)
    plan = load(place_of / PLAN)
    check_torch(plan)
    join_launched()
    if mesh is None:
        start_process_group(machine_of(plan).mesh)
    else:
        check_mesh(mesh, machine_of(plan).mesh)
    team, where, planned = team_of(mesh), find_device(device), machine_of(plan).mesh
    place = Place(planned, device_mesh_of(planned, where) if mesh is None else mesh, team, where)
    schedule, tree, constants = together(lambda: _assembled(place_of, plan, place), team)
    check_agreement(schedule, team)
    call, inputs = CallTree(schedule.graph.arguments, None), inputs or plan.model.inputs or "global"
    step = bind_step(schedule, constants, call, place, inputs, True, execute)
    step = replace(step, outputs=outputs)
    return ShardedModule(tree, Programs(step, tuple(part.training for part in tree.modules())), plan)


def _assembled(folder: Path, plan: Plan, place: Place) -> tuple[Schedule, nn.Module, dict[str, torch.Tensor]]:
    """The schedule, a tree of plain modules that holds this rank's weights, and its constants."""
    schedule = replay(plan, graph_of(plan))
    described, shards = _read(folder, place)
    tree, constants = nn.Module(), {}
    for name, row in described.items():
        spec, local = ShardingSpec.parse(row["spec"]), shards[name]
        if row["kind"] == "constant":
            constants[name.removeprefix("constant:")] = local
            continue
        tensor: torch.Tensor = place.dtensor(local, spec, row["shape"])
        tensor = nn.Parameter(tensor, requires_grad=row["trained"]) if row["kind"] == "parameter" else tensor
        for path in (name, *row["aliases"]):
            _put(tree, path, tensor, row.get("persistent", True))
    tree.train(plan.model.mode == "train")
    return schedule, tree, constants


def load_safetensors(module: ShardedModule, files: Sequence[str | os.PathLike[str]]) -> list[str]:
    """Fills the module's weights from safetensors files of whole tensors; each rank reads its own blocks alone.

    Returns: names of the module's parameters and persistent buffers that no file has.

    Raises:
        FileError: a file that cannot be read. MismatchError: another shape.
    """
    stored, state, place = _Stored([Path(file) for file in files]), module.state_dict(), module.place
    found: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        if name in stored:
            spec = from_placements(tensor.placements, tensor.dim(), place.mesh.sizes)
            local = stored.part(name, tensor, place.mesh)(spec, place.rank).to(tensor.dtype)
            found[name] = place.dtensor(local.to(place.device), spec, tensor.shape)
    module.load_state_dict(found, strict=False)
    held = {id(tensor) for name, tensor in module.state_dict(keep_vars=True).items() if name in found}
    return [name for name, tensor in module.state_dict(keep_vars=True).items() if id(tensor) not in held]


class _Stored:
    """Tensors in safetensors files, by name."""

    def __init__(self, files: Sequence[Path]) -> None:
        self.files: dict[str, Any] = {}
        for file in files:
            opened = _opened(file)
            self.files.update(dict.fromkeys(opened.keys(), opened))

    def __contains__(self, name: str) -> bool:
        return name in self.files

    def part(self, name: str, like: torch.Tensor, mesh: Any) -> Part:
        """Reads a rank's block of a tensor, and no more. Raises MismatchError: it has another shape than ``like``."""
        stored = self.files[name].get_slice(name)
        if list(stored.get_shape()) != list(like.shape):
            raise MismatchError(
                f"the file holds {name} with shape {stored.get_shape()}, the model has {list(like.shape)}", "load weights of the same model"
            )

        def read(spec: ShardingSpec, rank: int) -> torch.Tensor:
            if not like.dim():
                return self.files[name].get_tensor(name).to(like.dtype)
            return _read_part(stored, like.shape, spec, mesh, rank).to(like.dtype).contiguous()

        return read


def _read_part(stored: Any, shape: Sequence[int], spec: ShardingSpec, mesh: Any, rank: int) -> torch.Tensor:
    """A rank's part of a stored tensor, the parts of its blocks one after another."""
    coordinates, pieces = mesh.coordinates(rank), [list[slice]()]
    counts = dict(spec.blocks)
    for dim, extent in enumerate(shape):
        size = extent // counts.get(dim, 1)
        start, length = spec.span(dim, size, mesh.sizes, coordinates)
        here = [slice(block + start, block + start + length) for block in range(0, extent, size)]
        pieces = [[*piece, place] for piece in pieces for place in here]
    read: list[torch.Tensor] = [stored[tuple(piece)] for piece in pieces]
    return torch.cat(read, spec.blocks[0][0]) if len(read) > 1 else read[0]


def _of(name: str, tensor: torch.Tensor, mesh: Any) -> Part:
    if has_no_values(tensor):
        raise UsageError(f"{name} is on meta and has no values to export", "give the files that hold its weights, with --weights")
    return lambda spec, rank: local_part(tensor.detach(), spec, mesh, rank).cpu().clone(memory_format=torch.contiguous_format)


def _opened(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (OSError, SafetensorError) as error:
        raise FileError(f"cannot read the weights {file}: {error}", "give a safetensors file") from error


def _read(folder: Path, place: Place) -> tuple[Mapping[str, Mapping[str, Any]], dict[str, torch.Tensor]]:
    """What the tensors are, and this rank's parts."""
    rank = place.rank
    opened = _opened(folder / _shard(rank))
    metadata = opened.metadata() or {}
    if metadata.get("schema") != SCHEMA or metadata.get("rank") != str(rank):
        raise FileError(f"{folder / _shard(rank)} is not the program of rank {rank}", AGAIN)
    if metadata.get("plan_sha256") != _sha256(folder / PLAN):
        raise MismatchError(f"the weights in {folder} were written for another plan than its {PLAN}", AGAIN)
    return json.loads(metadata["tensors"]), {name: opened.get_tensor(name).to(place.device) for name in opened.keys()}  # noqa: SIM118


def _put(tree: nn.Module, path: str, tensor: torch.Tensor, persistent: bool) -> None:
    *modules, name = path.split(".")
    for part in modules:
        if part not in tree._modules:
            tree.add_module(part, nn.Module())
        tree = tree.get_submodule(part)
    if isinstance(tensor, nn.Parameter):
        tree.register_parameter(name, tensor)
    else:
        tree.register_buffer(name, tensor, persistent)


def _shard(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _check_free(target: Path) -> None:
    """Raises UsageError: a program would be written among other files. FileError: nobody may look into the folder, or write there."""
    try:
        if not target.is_dir():
            taken = os.path.lexists(target)
        elif not os.access(target, os.W_OK):
            raise FileError(f"cannot write {target}: no permission in it", "choose another folder")
        else:
            taken = any(target.iterdir())
    except OSError as error:
        raise FileError(f"cannot write {target}: {error.strerror}", "choose another folder") from error
    if taken:
        raise UsageError(f"{target} exists{' and is not empty' if target.is_dir() else ''}", "give a new or an empty folder, or remove it")


def _parent(target: Path) -> Path:
    if not target.parent.is_dir():
        raise FileError(f"cannot write {target}: there is no folder {target.parent}", "make it first, or choose another path")
    return target.parent
