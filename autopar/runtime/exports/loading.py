"""An exported program run: this rank's module, of the plan and the shards in the folder that ``exporting`` writes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autopar.cost_models import Execution
from autopar.errors import FileError, MismatchError, UsageError
from autopar.files import begins_with, check_path, read_text
from autopar.pipeline.timetable import stages_split
from autopar.pipeline_plan import PIPELINE_SCHEMA, PipelinePlan
from autopar.recording import graph_of, load, machine_of, replay
from autopar.recording.pipelines import recorded_pipeline
from autopar.rows import Inputs, Outputs
from autopar.runtime.exports.exporting import AGAIN, CONSTANT, PLAN, SCHEMA, open_shards, sha256_of, shard_name, stage_prefix
from autopar.runtime.module.compiling import (
    bind_step,
    check_mesh,
    check_torch,
    device_mesh_of,
    find_device,
    join_launched,
    start_process_group,
)
from autopar.runtime.module.sharded_module import ShardedModule
from autopar.runtime.pipelines.module import PipelineModule, place_ranks, run_stages, whole_mesh
from autopar.runtime.pipelines.programs import PipelinePrograms
from autopar.runtime.programs.programs import Programs
from autopar.runtime.ranks.agreement import check_agreement, everyones, together
from autopar.runtime.ranks.groups import Team, team_of
from autopar.runtime.steps.calls import CallTree
from autopar.runtime.steps.step import Step
from autopar.runtime.weights.sharding import Place
from autopar.sharding import ShardingSpec

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

    A pipeline's is a ``PipelineModule``, as of ``compile_pipeline``; it takes ``device`` alone.

    Args:
        mesh, inputs, outputs, device, execute: as for ``compile_plan``.

    Raises:
        FileError: a file that is missing or not what was written. MismatchError: another torch or mesh, or files not of one export.
        UsageError: an argument that pipelines do not take.
    """
    check_path(folder, "the program", EXPORTED)
    place_of = Path(folder)
    if not (place_of / PLAN).is_file():
        raise FileError(f"there is no program in {folder!s}: it has no {PLAN}", EXPORTED)
    if begins_with(place_of / PLAN, PIPELINE_SCHEMA):
        given = {"mesh": mesh is None, "inputs": inputs is None, "outputs": outputs == "placed", "execute": execute == "eager"}
        for name, is_left_out in given.items():
            if not is_left_out:
                raise UsageError(f"a pipeline's program is loaded without {name}", f"leave {name} out, or export a plan without stages")
        return _load_pipeline(place_of, device)
    plan = load(place_of / PLAN)
    check_torch(plan)
    join_launched()
    if mesh is None:
        start_process_group(machine_of(plan).mesh)
    else:
        check_mesh(mesh, machine_of(plan).mesh)
    team, where, planned = team_of(mesh), find_device(device), machine_of(plan).mesh
    schedule, shards = together(lambda: (replay(plan, graph_of(plan)), _read(place_of, team.rank, where)), team)
    _check_program(shards.program, team)
    check_agreement(schedule, team)
    place = Place(planned, device_mesh_of(planned, where) if mesh is None else mesh, team, where)
    call, inputs = CallTree(schedule.graph.arguments, None), inputs or plan.model.inputs or "global"
    step = bind_step(schedule, shards.constants(""), call, place, inputs, True, execute)
    step = replace(step, outputs=outputs)
    tree = shards.grow_tree(place)
    tree.train(plan.model.mode == "train")
    return ShardedModule(tree, Programs(step, tuple(part.training for part in tree.modules())), plan)


def _load_pipeline(folder: Path, device: str | torch.device | None) -> PipelineModule:
    """This rank's stages of an exported pipeline."""
    plan = PipelinePlan.from_json(read_text(folder / PLAN, "the plan", EXPORTED), str(folder / PLAN))
    check_torch(plan)
    join_launched()
    start_process_group(whole_mesh(plan))
    where, team = find_device(device), team_of(None)
    replayed, shards = together(lambda: (recorded_pipeline(plan), _read(folder, team.rank, where)), team)
    _check_program(shards.program, team)
    ranks, groups, place = place_ranks(replayed, whole_mesh(plan), where)
    split, call = stages_split(replayed.order), CallTree(plan.model.arguments, None)

    def bind_stage(stage: int) -> Step:
        constants = shards.constants(stage_prefix(stage))
        return bind_step(replayed.schedules[stage], constants, call, place, "global", True, "eager", split=stage in split)

    running = run_stages(replayed, {stage: bind_stage(stage) for stage in replayed.stages.at(ranks.position)}, ranks, groups)
    tree = shards.grow_tree(place, plan.model_names())
    planned = PipelinePrograms(
        running.main, tuple(part.training for part in tree.modules()), plan=plan, running=running, absent={}, bind_stage=None
    )  # fmt: skip
    return PipelineModule(tree, planned, plan, set(), running)


def _check_program(program: str, team: Team) -> None:
    """Compares the hash of the whole, which programs without stages do not have. Collective. Raises MismatchError on every rank."""
    programs = everyones(program, team)
    other = next((rank for rank, one in enumerate(programs) if one != programs[0]), None)
    if other is not None:
        raise MismatchError(f"ranks 0 and {other} have programs of different exports", "give every rank the files of one export")


@dataclass(frozen=True)
class _Shards:
    """A rank's file.

    Args:
        described: what each tensor is, by name.
        parts: this rank's, on its device.
        program: the hash of the whole; empty without stages.
    """

    described: Mapping[str, Mapping[str, Any]]
    parts: Mapping[str, torch.Tensor]
    program: str

    def constants(self, prefix: str) -> dict[str, torch.Tensor]:
        """The constants of a stage (``stage_prefix``), or of a plan without stages, by the graph's names."""
        start = f"{prefix}{CONSTANT}"
        return {name.removeprefix(start): part for name, part in self.parts.items() if name.startswith(start)}

    def grow_tree(self, place: Place, names: Iterable[str] = ()) -> nn.Module:
        """A tree of plain modules that holds this rank's weights.

        Args:
            names: of the whole model's; those that this rank does not have are None in the tree.
        """
        tree, held = nn.Module(), set[str]()
        for name, row in self.described.items():
            if row["kind"] == "constant":
                continue
            tensor: torch.Tensor = place.dtensor(self.parts[name], ShardingSpec.parse(row["spec"]), row["shape"])
            tensor = nn.Parameter(tensor, requires_grad=row["trained"]) if row["kind"] == "parameter" else tensor
            for path in (name, *row["aliases"]):
                _put(tree, path, tensor, row.get("persistent", True))
                held.add(path)
        for name in sorted(set(names) - held):
            _put(tree, name, None, True)
        return tree


def _read(folder: Path, rank: int, device: torch.device) -> _Shards:
    """A rank's file. Raises FileError: there is none, or it is of another rank. MismatchError: it was written for another plan."""
    file = folder / shard_name(rank)
    if not file.exists():
        raise FileError(f"the program in {folder} has no file of rank {rank}: {file.name}", "give each rank the folder with its own file")
    opened = open_shards(file)
    metadata = opened.metadata() or {}
    if metadata.get("schema") != SCHEMA or metadata.get("rank") != str(rank):
        raise FileError(f"{file} is not the program of rank {rank}", AGAIN)
    if metadata.get("plan_sha256") != sha256_of(folder / PLAN):
        raise MismatchError(f"the weights in {folder} were written for another plan than its {PLAN}", AGAIN)
    parts = {name: opened.get_tensor(name).to(device) for name in opened.keys()}  # noqa: SIM118
    return _Shards(json.loads(metadata["tensors"]), parts, metadata.get("program_sha256", ""))


def _put(tree: nn.Module, path: str, tensor: torch.Tensor | None, persistent: bool) -> None:
    *modules, name = path.split(".")
    for part in modules:
        if part not in tree._modules:
            tree.add_module(part, nn.Module())
        tree = tree.get_submodule(part)
    if tensor is None or isinstance(tensor, nn.Parameter):
        tree.register_parameter(name, tensor)
    else:
        tree.register_buffer(name, tensor, persistent)
