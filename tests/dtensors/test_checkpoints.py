"""Roads by which torch saves and loads DTensors, over the layouts that plans make, with and without a flattened mesh."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

from autopar.cost_models import Mesh
from autopar.runtime.ranks.placement import local_part, to_dtensor, to_placements
from autopar.runtime.weights.checkpoints import chunks, part_of
from autopar.sharding import ShardingSpec
from autopar.torch_compat import checkpoint_in_chunks, lay_by_parts, teach_dtensors
from tests.runtime.test_training import on_ranks

MESH = Mesh.parse("dp=2,tp=2")
LAYOUTS = {
    (12, 12): ["R R", "S0 R", "R S1", "S01 R", "S10 R", "R S10", "S0 S1", "S0/3 R", "R S1/3", "S1/3 S0"],
    (7, 10): ["S0 R", "S01 R", "R S01", "S0 S1"],
    (5, 3): ["S01 R", "R S01", "S0 S1"],
}
SHAPES = [(shape, spec) for shape, specs in LAYOUTS.items() for spec in specs]


class Holder(nn.Module):
    """A parameter for each layout."""

    def __init__(self, device_mesh: Any, shift: float, turned: int = 0) -> None:
        super().__init__()
        self.wholes = [torch.arange(shape[0] * shape[1]).reshape(shape) + shift for shape, _ in SHAPES]
        for index, ((shape, _), whole) in enumerate(zip(SHAPES, self.wholes, strict=True)):
            specs = LAYOUTS[shape]
            spec = ShardingSpec.parse(specs[(specs.index(SHAPES[index][1]) + turned) % len(specs)])
            part = local_part(whole, spec, MESH, dist.get_rank()).clone()
            setattr(self, f"w{index}", nn.Parameter(to_dtensor(part, spec, shape, device_mesh)))

    def wrong(self, shift: float) -> list[str]:
        """The layouts whose values are not those of a holder with this shift."""
        parameters = dict(self.named_parameters())
        pairs = enumerate(zip(SHAPES, self.wholes, strict=True))
        return [
            str(layout) for index, (layout, whole) in pairs
            if not torch.equal(parameters[f"w{index}"].full_tensor().detach(), whole - self.wholes[0][0, 0] + shift)
        ]  # fmt: skip

    def state(self) -> dict[str, Tensor]:
        return {f"w{index}": whole for index, whole in enumerate(self.wholes)}


def steps(holder: Holder) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(holder.parameters(), lr=0.0, weight_decay=0.0)
    for parameter in holder.parameters():
        parameter.grad = parameter.detach().clone()
    optimizer.step()
    return optimizer


def wrong_moments(holder: Holder, optimizer: torch.optim.Optimizer, wholes: list[Tensor]) -> list[str]:
    pairs = zip(holder.parameters(), SHAPES, wholes, strict=True)
    return [str(name) for one, name, whole in pairs if not torch.allclose(optimizer.state[one]["exp_avg"].full_tensor(), 0.1 * whole)]


def full(mesh: Any, folder: Path, *, broadcasts: bool) -> list[str]:
    """A full state dict, out and in."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    source, target = Holder(mesh, 1.0), Holder(mesh, 0.0)
    first, second = steps(source), torch.optim.AdamW(target.parameters(), lr=0.0)
    weights, states = get_model_state_dict(source, options=options), get_optimizer_state_dict(source, first, options=options)
    if dist.get_rank() == 0:
        assert all(torch.equal(weights[name], whole) for name, whole in source.state().items())
    elif not broadcasts:
        weights = source.state()
    given = [weights, states]
    if not broadcasts:
        dist.broadcast_object_list(given, src=0)
        weights, states = given
    elif dist.get_rank():
        weights, states = {}, {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcasts)
    set_model_state_dict(target, weights, options=options)
    set_optimizer_state_dict(target, second, states, options=options)
    left = [wrong_moments(source, first, source.wholes), wrong_moments(target, second, source.wholes)]
    return target.wrong(1.0) + [f"moments {index}: {one}" for index, found in enumerate(left) for one in found]


def saved(mesh: Any, folder: Path) -> list[str]:
    """A sharded checkpoint, loaded into other layouts, and as one file."""
    source, target = Holder(mesh, 1.0), Holder(mesh, 0.0, turned=1)
    dcp.save(get_model_state_dict(source), checkpoint_id=folder)
    state = get_model_state_dict(target)
    dcp.load(state, checkpoint_id=folder)
    if dist.get_rank() == 0:
        dcp_to_torch_save(folder, folder / "whole.pt")
        stored = torch.load(folder / "whole.pt")
        assert all(torch.equal(stored[name], whole) for name, whole in source.state().items())
    return target.wrong(1.0)


def in_safetensors(mesh: Any, folder: Path) -> list[str]:
    """Of a tensor in blocks they would hold one block of each rank."""
    source, target = Holder(mesh, 1.0), Holder(mesh, 0.0, turned=1)
    state, in_blocks = get_model_state_dict(source), {f"w{index}" for index, (_, spec) in enumerate(SHAPES) if "/" in spec}
    writer = dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True)
    try:
        dcp.save(state, storage_writer=writer)
        return ["blocks are not refused"]
    except CheckpointException as error:
        assert "lies in blocks, so that a rank holds several parts of it" in str(error)
        assert "\nhint: save get_model_state_dict" in str(error)
    dcp.save({name: value for name, value in state.items() if name not in in_blocks}, storage_writer=writer)
    there = {name: value for name, value in get_model_state_dict(target).items() if name not in in_blocks}
    dcp.load(there, storage_reader=dcp.HuggingFaceStorageReader(str(folder)))
    return [layout for layout in target.wrong(1.0) if "/" not in layout]


def by_rank(mesh: Any, folder: Path) -> list[str]:
    """Each rank's own file."""
    source, target, file = Holder(mesh, 1.0), Holder(mesh, 0.0), io.BytesIO()
    torch.save(source.state_dict(), file)
    file.seek(0)
    target.load_state_dict(torch.load(file, weights_only=False))
    return target.wrong(1.0)


def distributed(mesh: Any, folder: Path) -> list[str]:
    """A whole tensor, as placements say."""
    found = []
    for shape, text in SHAPES:
        whole, spec = torch.arange(shape[0] * shape[1]).reshape(shape), ShardingSpec.parse(text)
        made = distribute_tensor(whole, mesh, to_placements(spec, (2, 2)))
        if not torch.equal(made.to_local(), local_part(whole, spec, MESH, dist.get_rank())) or not torch.equal(made.full_tensor(), whole):
            found.append(f"{shape} {spec}")
    return found


def copied(mesh: Any, folder: Path) -> list[str]:
    """From other layouts by what a loop writes."""
    source, target = Holder(mesh, 1.0, turned=1), Holder(mesh, 0.0)
    with torch.no_grad():
        for one, other in zip(target.parameters(), source.parameters(), strict=True):
            one.copy_(other)
    return target.wrong(1.0)


ROADS: list[Callable[[Any, Path], list[str]]] = [
    partial(full, broadcasts=False), partial(full, broadcasts=True), saved, in_safetensors, by_rank, distributed, copied,
]  # fmt: skip


@pytest.mark.parametrize("road", ROADS, ids=["full", "from rank 0", "saved", "safetensors", "by rank", "distributed", "copied"])
@pytest.mark.parametrize("flattens", [False, True])
def test_roads_of_states(road: Callable[[Any, Path], list[str]], flattens: bool, tmp_path: Path) -> None:
    def run(rank: int) -> list[str]:
        teach_dtensors()
        checkpoint_in_chunks(chunks)
        lay_by_parts(part_of)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        if flattens:
            mesh["dp", "tp"]._flatten("dp_tp")
        assert isinstance(next(Holder(mesh, 0.0).parameters()), DTensor)
        return road(mesh, tmp_path)

    assert on_ranks(run, 4) == [[]] * 4
