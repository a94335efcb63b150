"""Placements of DTensors: strided shards, blocks and unequal parts in redistributions, checkpoints and ``fully_shard``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from operator import is_
from typing import Any

import torch
from torch import nn

from autopar.errors import UsageError


def strided_shard(dim: int, split_factor: int) -> Any:
    """DTensor's placement of a dim that ``split_factor`` blocks of later mesh axes have already cut (``_StridedShard``)."""
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard(dim, split_factor=split_factor)


def split_factor_of(placement: Any) -> int | None:
    """1 for a plain shard, the split factor for a strided one, None for anything else."""
    from torch.distributed.tensor.placement_types import Shard, _StridedShard

    if isinstance(placement, _StridedShard):
        return placement.split_factor
    return 1 if isinstance(placement, Shard) else None


Chunk = tuple[tuple[int, ...], torch.Tensor]
"""Offsets in the whole tensor, and the part at them."""


def has_blocks(tensor: Any) -> bool:
    """Whether a DTensor may hold more than one part of a dim: it has a strided shard."""
    return any((split_factor_of(placement) or 1) > 1 for placement in tensor.placements)


@cache
def checkpoint_in_chunks(chunks: Callable[[Any], list[Chunk] | None]) -> None:
    """Lets checkpoints store a DTensor as several parts of a rank (DTensor's side of ``_Checkpointable``, which knows one part a rank).

    Args:
        chunks: the parts that this rank holds; None where torch's own way does.
    """
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
    from torch.distributed.tensor import DTensor

    kept = {name: vars(DTensor)[name] for name in ("__create_write_items__", "__create_chunk_list__", "__get_tensor_shard__")}

    def stored(chunk: Chunk) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(offsets=torch.Size(chunk[0]), sizes=chunk[1].size())

    def write_items(self: Any, name: str, value: Any) -> Any:
        found = chunks(self)
        if found is None:
            return kept["__create_write_items__"](self, name, value)
        properties = TensorProperties.create_from_tensor(self.to_local())
        return [
            WriteItem(
                index=MetadataIndex(name, torch.Size(chunk[0])), type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=stored(chunk), properties=properties, size=self.size()),
            )
            for chunk in found
        ]  # fmt: skip

    def chunk_list(self: Any) -> Any:
        found = chunks(self)
        return kept["__create_chunk_list__"](self) if found is None else list(map(stored, found))

    def shard(self: Any, index: Any) -> Any:
        found = chunks(self)
        if found is None or index.offset is None:
            return kept["__get_tensor_shard__"](self, index)
        return dict(found)[tuple(index.offset)]

    for name, method in (("__create_write_items__", write_items), ("__create_chunk_list__", chunk_list), ("__get_tensor_shard__", shard)):
        setattr(DTensor, name, method)
    refuse_several_parts()


@cache
def refuse_several_parts() -> None:
    """A file of safetensors holds one part of a tensor for each rank; of several parts ``HuggingFaceStorageWriter`` would keep the last."""
    from torch.distributed.checkpoint import HuggingFaceStorageWriter

    usual: Any = HuggingFaceStorageWriter.write_data

    def write_data(self: Any, plan: Any, planner: Any) -> Any:
        names = [item.index.fqn for item in plan.items]
        if several := sorted({name for name in names if names.count(name) > 1}):
            message = f"{several[0]} lies in blocks, so that a rank holds several parts of it; safetensors keep one part for each rank"
            hint = "save get_model_state_dict(module, options=StateDictOptions(full_state_dict=True)), or by dcp.save(checkpoint_id=...)"
            raise UsageError(message, hint)
        return usual(self, plan, planner)

    HuggingFaceStorageWriter.write_data = write_data


def dtensor_like(local: torch.Tensor, like: Any) -> Any:
    """The DTensor of which this rank holds ``local``, placed as ``like`` is, of its shape and dtype.

    The public way derives placements and strides anew each time, which for a model's gradients takes milliseconds a step; ``__init__`` does
    nothing, behind a wrapper that takes as long as all the rest.
    """
    kind = dtensor_class()
    return kind.__new__(kind, local, like._spec, requires_grad=False)


def dtensors_like(parts: Sequence[torch.Tensor], like: Sequence[Any]) -> list[Any]:
    """Several of them."""
    kind = dtensor_class()
    make = kind.__new__
    return [make(kind, part, other._spec, requires_grad=False) for part, other in zip(parts, like, strict=True)]


@cache
def dtensor_class() -> Any:
    """Imported once: the import of a thing that is there already takes a fifth of the time that making a DTensor does."""
    from torch.distributed.tensor import DTensor

    return DTensor


def local_of(tensor: Any) -> torch.Tensor:
    """The part of a DTensor that this rank holds, as it is kept: outside autograd, and without the view that ``to_local`` makes."""
    return tensor._local_tensor


def spec_of(tensor: Any) -> Any:
    """A DTensor's mesh, placements, shape and dtype: the same object as long as none of them changes. None of another tensor."""
    return getattr(tensor, "_spec", None)


def lie_as_before(tensors: Sequence[Any], specs: Sequence[Any], parts: Sequence[torch.Tensor]) -> bool:
    """Whether each DTensor has the spec and the part that it is given with."""
    return all(map(is_, [tensor._spec for tensor in tensors], specs)) and all(map(is_, [tensor._local_tensor for tensor in tensors], parts))


@cache
def gather_unequal_parts() -> None:
    """Parts of a dim that two axes split unequally are gathered one axis after the other (``_optimize_transform_infos``).

    Where the user's mesh has a flattened one, torch gathers over both axes at once, as if ``torch.chunk`` had cut the dim once: 13 rows on
    2x2 lie as 4, 3, 3, 3; it takes them for 4, 4, 4, 1, and the whole is corrupt without a word.
    """
    from torch.distributed.tensor import _redistribute

    merged = _redistribute._optimize_transform_infos

    def is_unequal(infos: list[Any], mesh: Any) -> bool:
        extents: dict[int, int] = {}
        counts: dict[int, int] = {}
        for info in infos:
            if info._comm_type_key() == "all_gather":
                dim = info.src_dst_placements[0].dim
                extents[dim] = max(extents.get(dim, 0), info.logical_shape[dim])
                counts[dim] = counts.get(dim, 1) * mesh.size(info.mesh_dim)
        return any(extents[dim] % count for dim, count in counts.items())

    def optimize(infos: list[Any], mesh: Any, *ends: Any) -> list[Any]:
        is_strided = any((split_factor_of(placement) or 1) > 1 for placements in ends for placement in placements)
        return infos if is_strided or is_unequal(infos, mesh) else merged(infos, mesh, *ends)

    _redistribute._optimize_transform_infos = optimize


PartOf = Callable[[torch.Tensor, Iterable[Any], Any], torch.Tensor | None]
"""From a whole tensor, placements and a mesh to what this rank holds; None where the placements say no layout of ours."""


@cache
def lay_by_parts(part_of: PartOf) -> None:
    """Lets DTensors be cut as ``part_of`` cuts where torch's own way is wrong for strided shards (``S10``, weights in blocks).

    - A full state dict that one rank reads and sends (``_distribute_tensors``): torch takes one contiguous box for each rank.
    - Redistribution from and into such placements (``redistribute_local_tensor``): torch fails on some ranks, while others wait, or takes
      other rows.

    A whole lies in rows where its parts do. In torch 2.11 what is gathered of unequal columns has gaps, which broadcasts of it send too.
    """
    from torch.distributed import _state_dict_utils
    from torch.distributed.tensor import Replicate, _api, _dispatch, _dtensor_spec, _redistribute

    def distribute(local: dict[str, Any], keys: list[str], device: torch.device, pg: Any = None) -> None:
        for key in keys:
            held = local.get(key)
            if held is None or isinstance(held, torch.Tensor):
                continue
            tensor, whole = held
            part = part_of(whole, tensor.placements, tensor.device_mesh)
            if part is None:
                message = f"the state dict holds {key} whole, whose DTensor lies as {list(tensor.placements)}: its parts are not known"
                raise UsageError(message, "load it by torch.distributed.checkpoint, or distribute it with Shard placements")
            if tensor.is_meta:
                local[key] = dtensor_like(part.detach().clone(), tensor)
            else:
                tensor.to_local().copy_(part)
                local[key] = tensor

    usual = _redistribute.redistribute_local_tensor

    def redistribute(local: torch.Tensor, current: Any, target: Any, **named: Any) -> torch.Tensor:
        is_plain = not any((split_factor_of(one) or 1) > 1 for one in (*current.placements, *target.placements))
        is_whole = all(one.is_replicate() for one in target.placements)
        if is_plain or is_whole or current.placements == target.placements:
            made: torch.Tensor = usual(local, current, target, **named)
            return made.contiguous() if is_whole and local.is_contiguous() else made
        everywhere = _dtensor_spec.DTensorSpec(current.mesh, (Replicate(),) * current.mesh.ndim, tensor_meta=current.tensor_meta)
        whole = usual(local, current, everywhere)
        part = part_of(whole, target.placements, target.mesh)
        return usual(whole, everywhere, target, **named) if part is None else part.contiguous()

    planned: Any = getattr(_redistribute, "_gen_transform_infos_non_cached", None)

    def plan_steps(source: Any, target: Any, *rest: Any) -> Any:
        try:
            return planned(source, target, *rest)
        except ValueError:  # torch 2.11 takes every strided shard for an order of axes; 2.13 goes on as here where it is none
            planner = _redistribute.get_redistribute_planner(source.mesh, source.tensor_meta)
            return planner.generate_greedy_transform_infos(source, target)

    _state_dict_utils._distribute_tensors = distribute
    if planned is not None:
        _redistribute._gen_transform_infos_non_cached = plan_steps
    for module in (_redistribute, _dispatch, _api):
        module.redistribute_local_tensor = redistribute


@cache
def shard_beside_blocks() -> None:
    """``fully_shard`` cuts a parameter that is in blocks along another dim; one without such a dim, a bias, is whole on the plan's axes.

    FSDP cuts the rows that a rank has (``FSDPParam``), and says of them that they are cut once more: of rows in blocks no DTensor can say
    which those are, and its whole has other rows. The compiled module takes such a bias whole.
    """
    from torch.distributed.fsdp._fully_shard import _fsdp_param
    from torch.distributed.tensor import DTensor, Replicate, Shard

    usual = _fsdp_param.FSDPParam._init_sharded_param

    def init(self: Any, param: Any, device: Any, placement_of: Any, *rest: Any) -> None:
        mesh_info = rest[0] if rest else self.mesh_info  # torch 2.11 has it there
        count = getattr(mesh_info, "shard_mesh_size", 1)
        given: Any = placement_of(param) if callable(placement_of) else None
        placement = getattr(given, "placement", given)
        dim = 0 if placement is None else placement.dim % param.dim()
        if not isinstance(param, DTensor) or count == 1 or not (strided := strided_dims(param)) & {dim}:
            return usual(self, param, device, placement_of, *rest)
        free = [other for other in range(param.dim()) if other not in strided and local_of(param).shape[other] % count == 0]
        if not free:
            param = nn.Parameter(param.detach().redistribute(placements=[Replicate()] * len(param.placements)), param.requires_grad)
        shard = Shard(free[0] if free else dim)
        chosen = replace(given, placement=shard) if hasattr(given, "placement") else shard
        return usual(self, param, device, lambda _: chosen, *rest)

    def strided_dims(param: Any) -> set[int]:
        return {placement.dim for placement in param.placements if (split_factor_of(placement) or 1) > 1}

    _fsdp_param.FSDPParam._init_sharded_param = init


def has_unequal_parts(tensor: Any) -> bool:
    """Whether the ranks' parts of a DTensor differ in size."""
    counts: dict[int, int] = {}
    for placement, size in zip(tensor.placements, tensor.device_mesh.shape, strict=True):
        if split_factor_of(placement) is not None:
            counts[placement.dim] = counts.get(placement.dim, 1) * size
    return any(tensor.shape[dim] % count for dim, count in counts.items())


@cache
def place_states() -> None:
    """Whole states that an optimizer loads for a parameter that is a DTensor are cut as the parameter is: one device's checkpoint."""
    from torch.distributed.tensor import DTensor, Replicate
    from torch.optim import Optimizer

    usual: Any = Optimizer._process_value_according_to_param_policy

    def placed(param: torch.Tensor, value: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
        made: torch.Tensor = usual(param, value, *rest, **named)
        if not isinstance(param, DTensor) or isinstance(made, DTensor) or not made.dim() or made.shape != param.shape:
            return made
        mesh = param.device_mesh
        whole: torch.Tensor = DTensor.from_local(made, mesh, [Replicate()] * mesh.ndim, run_check=False)
        return whole.redistribute(placements=param.placements).clone()

    Optimizer._process_value_according_to_param_policy = staticmethod(placed)


class WithinReplicas:
    """A module that is told when DistributedDataParallel goes around it (``_ddp_params_and_buffers_to_ignore``)."""

    def left_alone(self) -> list[str]:
        """The names of what it is to leave alone. Raises UsageError: it cannot go around this module."""
        raise NotImplementedError

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> list[str]:
        return self.left_alone()


def mixes_dtensors(error: Exception) -> bool:
    """Whether DTensor's dispatcher refused an operator for a plain tensor beside a DTensor; it has no class of errors for it."""
    return "got mixed torch.Tensor and DTensor" in str(error)
