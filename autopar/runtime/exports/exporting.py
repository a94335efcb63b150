"""Programs in a folder: what each rank runs and the shards of its weights, to be run without the model's code or a capture.

    plan.json                  the plan; its schedule is the program, the same on all ranks. A pipeline's has one a stage, and the timetable
    rank-00000.safetensors     one file a rank: its parts of parameters, buffers and constants; in the metadata, what each is

Every file names the hash of the plan that it belongs to, so that a folder in which one was changed is refused. A rank of a pipeline has
the parameters that its stages read, and all buffers. Each of its files names the hash of the whole too, of the plan and all ranks' parts.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from autopar.cost_models import Mesh
from autopar.errors import FileError, MismatchError, UsageError
from autopar.files import umask
from autopar.pipeline_plan import PipelinePlan
from autopar.plan import Plan
from autopar.runtime.module.compiling import check_parameters, check_torch, rebuild
from autopar.runtime.module.sharded_module import ShardedModule
from autopar.runtime.pipelines.module import capture_pipeline
from autopar.runtime.ranks.agreement import hash_of
from autopar.runtime.ranks.placement import from_placements, local_part
from autopar.runtime.weights.sharding import has_no_values, own_specs, own_tensors
from autopar.schedule import Schedule
from autopar.sharding import ShardingSpec

SCHEMA = "autopar.program/1"
PLAN = "plan.json"
AGAIN = "write the folder again with autopar export"
CONSTANT = "constant:"
"""What the name of a constant begins with, in files whose other names are the model's."""
Part = Callable[[ShardingSpec, int], torch.Tensor]
"""A tensor's part by spec and rank."""


@dataclass
class Share:
    """What the ranks of one stage hold, or those of all stages at one position: each tensor in words, and its part by rank.

    Args:
        mesh: of these ranks.
    """

    mesh: Mesh
    described: dict[str, dict[str, Any]] = field(default_factory=dict)
    parts: dict[str, Part] = field(default_factory=dict)

    def of(self, rank: int) -> Iterator[tuple[str, torch.Tensor]]:
        """The parts of a rank of ``mesh``, by name, each made or read as it is asked for."""
        return ((name, part(ShardingSpec.parse(self.described[name]["spec"]), rank)) for name, part in self.parts.items())


def export_program(
    plan: Plan | PipelinePlan, model: nn.Module, folder: str | os.PathLike[str], *, loss: Callable[..., Any] | None = None,
    weights: Sequence[Path] = (),
) -> None:  # fmt: skip
    """Writes the plan and every rank's shards into ``folder``, whole or not at all. No processes are started.

    Args:
        plan: of a pipeline too.
        model: the planned model; where it has no values, ``weights`` must have them.
        loss: as planned.
        weights: safetensors files by the model's names, read block by block, so that a large model is never whole in memory.

    Raises:
        UsageError: the folder holds something, or a weight has no values.
        MismatchError: the plan is not for this model.
    """
    target = Path(folder)
    _check_free(target)
    check_torch(plan)
    shares = _share_out(plan, model, loss or plan.loss, _Stored(weights))
    ranks = [(share, rank) for share in shares for rank in range(share.mesh.ranks)]
    made = Path(tempfile.mkdtemp(dir=target if target.is_dir() else _parent(target), prefix=f".{target.name}."))
    try:
        plan.save(made / PLAN)
        metadata = {"schema": SCHEMA, "plan_sha256": sha256_of(made / PLAN)}
        if isinstance(plan, PipelinePlan):
            metadata["program_sha256"] = _hash_whole(metadata["plan_sha256"], ranks)
        for rank, (share, place) in enumerate(ranks):
            described = json.dumps(share.described)
            save_file(dict(share.of(place)), made / shard_name(rank), {**metadata, "tensors": described, "rank": str(rank)})
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


def _share_out(plan: Plan | PipelinePlan, model: nn.Module, loss: Callable[..., Any] | None, stored: _Stored) -> list[Share]:
    """What ranks hold, for each position along the axis of stages; of a plan without stages there is one."""
    if isinstance(plan, PipelinePlan):
        captured, replayed = capture_pipeline(model, plan, loss)
        stages = [replayed.stages.at(position) for position in range(plan.positions)]
        own = [{stage_prefix(stage): replayed.schedules[stage] for stage in mine} for mine in stages]
        return [_share_of(model, schedules, captured.constants, stored, plan.model_names()) for schedules in own]
    check_parameters(model, plan)
    captured, schedule = rebuild(model, plan, loss=loss)
    return [_share_of(model, {"": schedule}, captured.constants, stored)]


def _share_of(
    model: nn.Module, schedules: Mapping[str, Schedule], constants: Mapping[str, torch.Tensor], stored: _Stored,
    staged: Set[str] = frozenset(),
) -> Share:  # fmt: skip
    """What the ranks that run these schedules hold.

    Args:
        schedules: by what the names of their constants begin with.
        staged: the names of weights that stages read. Parameters among them that none of these schedules reads are of other ranks.
    """
    share, specs = Share(next(iter(schedules.values())).machine.mesh), own_specs(schedules.values())
    named: dict[int, list[str]] = {}
    for name, _, _, tensor in sorted(own_tensors(model), key=lambda item: item[0] not in specs):
        named.setdefault(id(tensor), []).append(name)
    for name, owner, last, tensor in own_tensors(model):
        is_parameter = isinstance(tensor, nn.Parameter)
        if name != named[id(tensor)][0] or (is_parameter and name in staged and name not in specs):
            continue
        file = next((other for other in named[id(tensor)] if other in stored), None)
        spec = specs.get(name, ShardingSpec.replicated(tensor.dim()))
        share.described[name] = {
            "kind": "parameter" if is_parameter else "buffer", "trained": tensor.requires_grad, "aliases": named[id(tensor)][1:],
            "shape": list(tensor.shape), "spec": str(spec), "persistent": last not in owner._non_persistent_buffers_set,
        }  # fmt: skip
        share.parts[name] = _of(name, tensor, share.mesh) if file is None else stored.part(file, tensor, share.mesh)
    for prefix, schedule in schedules.items():
        for item in schedule.graph.of_kind("constant"):
            name, tensor, spec = f"{prefix}{CONSTANT}{item.tensor}", constants[item.name], schedule.specs[item.tensor]
            share.described[name] = {"kind": "constant", "shape": list(tensor.shape), "spec": str(spec)}
            share.parts[name] = _of(item.name, tensor, share.mesh)
    return share


def stage_prefix(stage: int) -> str:
    """What the names of a stage's constants begin with in a rank's file, which has those of several stages.

    >>> stage_prefix(2) + CONSTANT + "mask"
    'stage 2 constant:mask'
    """
    return f"stage {stage} "


def _hash_whole(plan: str, ranks: Sequence[tuple[Share, int]]) -> str:
    """A hash of the plan, by its own, and of all ranks' parts: that of each tensor, one at a time."""
    found = hashlib.sha256(plan.encode())
    for share, rank in ranks:
        found.update(json.dumps(share.described).encode())
        for _, part in share.of(rank):
            found.update(hash_of(part).encode())
    return found.hexdigest()


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
            opened = open_shards(file)
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


def open_shards(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (OSError, SafetensorError) as error:
        raise FileError(f"cannot read the weights {file}: {error}", "give a safetensors file") from error


def shard_name(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def sha256_of(file: Path) -> str:
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
